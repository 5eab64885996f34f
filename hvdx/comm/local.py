"""A world of one: what every collective means when there is nobody else."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdx.comm.base import Comm, Reduction


class LocalComm(Comm):
    """The communicator of a process that was started alone.

    Example:
        >>> LocalComm().all_gather_object("here", "roll call")
        ['here']
    """

    rank = local_rank = cross_rank = 0
    size = local_size = cross_size = 1

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """See `Comm.all_gather_object`."""
        return [value]

    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        """See `Comm.all_reduce_sum`."""
        return np.array(vector, dtype=np.float64)

    def broadcast(self, tensors: Sequence[Any], root: int, what: str) -> list[Any]:
        """See `Comm.broadcast`."""
        return list(tensors)

    def all_reduce(self, tensors: Sequence[Any], how: Reduction, name: str) -> list[Any]:
        """See `Comm.all_reduce`."""
        return list(tensors)

    def all_gather(self, tensor: Any, name: str) -> Any:
        """See `Comm.all_gather`."""
        return tensor

    def close(self) -> None:
        """See `Comm.close`."""
