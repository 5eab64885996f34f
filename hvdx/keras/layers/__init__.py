"""Layers whose weights are split over the ranks of a group; see `docs/split-layers.md`."""

from hvdx.keras.layers.dense import SplitDense
from hvdx.keras.layers.embedding import SplitEmbedding
from hvdx.keras.layers.group import bytes_sent
from hvdx.keras.layers.loss import SplitSparseCategoricalAccuracy, SplitSparseCategoricalCrossentropy

__all__ = [
    "SplitDense",
    "SplitEmbedding",
    "SplitSparseCategoricalAccuracy",
    "SplitSparseCategoricalCrossentropy",
    "bytes_sent",
]
