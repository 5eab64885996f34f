"""Averages networks: saved ones file by file, whatever framework wrote them, and models in memory."""

from hvdx.averaging.api import average, average_weights, compare
from hvdx.averaging.distance import Distance
from hvdx.averaging.network import Network, Tensor

__all__ = ["Distance", "Network", "Tensor", "average", "average_weights", "compare"]
