"""Averages of saved networks, in the file formats of several frameworks, and of models in memory."""

from hvdx.averaging.api import average, average_weights, compare
from hvdx.averaging.distance import Distance
from hvdx.averaging.network import Network, Tensor

__all__ = ["Distance", "Network", "Tensor", "average", "average_weights", "compare"]
