"""Layers whose weights are split over the ranks of a group; see `docs/split-layers.md`."""

from hvdx.keras import backend

backend.needs_tensorflow("layers that are split over workers")

from hvdx.keras.layers.replacements import (  # noqa: E402
    SplitDense,
    SplitEmbedding,
    SplitSparseCategoricalAccuracy,
    SplitSparseCategoricalCrossentropy,
)
from hvdx.keras.layers.split_layer import bytes_sent  # noqa: E402

__all__ = [
    "SplitDense",
    "SplitEmbedding",
    "SplitSparseCategoricalAccuracy",
    "SplitSparseCategoricalCrossentropy",
    "bytes_sent",
]
