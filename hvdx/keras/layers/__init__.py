"""Layers whose weights are split over the ranks of a group; see `docs/split-layers.md`."""

from hvdx.keras.layers.replacements import (
    SplitDense,
    SplitEmbedding,
    SplitSparseCategoricalAccuracy,
    SplitSparseCategoricalCrossentropy,
)
from hvdx.keras.layers.split_layer import bytes_sent

__all__ = [
    "SplitDense",
    "SplitEmbedding",
    "SplitSparseCategoricalAccuracy",
    "SplitSparseCategoricalCrossentropy",
    "bytes_sent",
]
