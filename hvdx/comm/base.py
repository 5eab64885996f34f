"""The contract of a communicator.

Every method that talks to other ranks is collective: all ranks call it, in the same order. Each wait ends: a
communicator that cannot reach a rank raises after its time limit.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Wire = Literal["none", "fp16", "bf16"]


@dataclass(frozen=True)
class Reduction:
    """How `Comm.all_reduce` combines tensors.

    Attributes:
        average: divide the sum by the number of ranks.
        wire: what a float32 or float64 value becomes on the network.
        groups: number of groups (int), or the tensors' indices group by group; each group is one collective.
        sparse: how `IndexedSlices` travel: "gather" their rows, or "dense" as the whole tensor.
        predivide: with `average`, divide by this before the sum and by size / predivide after it.
        device: the device the dense collectives are placed on; "" leaves it to TensorFlow.
        device_sparse: likewise for the gathered rows of `IndexedSlices`.
    """

    average: bool = True
    wire: Wire = "none"
    groups: int | tuple[tuple[int, ...], ...] = 1
    sparse: Literal["gather", "dense"] = "gather"
    predivide: float = 1.0
    device: str = ""
    device_sparse: str = ""


class Comm(abc.ABC):
    """Reaches the other ranks. `rank` and `size` place this process among them."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    @abc.abstractmethod
    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Gather one picklable value from each rank.

        Args:
            value: small and picklable.
            what: a name for the exchange, seen where a rank fails to come.

        Returns:
            The values in rank order.
        """

    @abc.abstractmethod
    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        """Sum a vector over the ranks.

        Args:
            vector: float64[n], n alike on all ranks.
            what: a name for the exchange.

        Returns:
            float64[n], the same bits on every rank.
        """

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[Any], root: int, what: str) -> list[Any]:
        """Give every rank the root's tensors.

        Args:
            tensors: TensorFlow tensors; shapes and dtypes alike on all ranks.
            root: the rank whose values travel.
            what: a name for the exchange.

        Returns:
            The root's values, one tensor for each given.
        """

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[Any], how: Reduction, name: str) -> list[Any]:
        """Sum or average tensors over the ranks, inside a TensorFlow graph or eagerly.

        Args:
            tensors: `tf.Tensor` or `tf.IndexedSlices`; shapes and dtypes alike on all ranks.
            how: the reduction.
            name: alike on all ranks; it pairs up what the ranks send.

        Returns:
            The combined tensors in the order given, the same bits on every rank.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: Any, name: str) -> Any:
        """Concatenate the ranks' tensors along their first dimension, in rank order.

        Args:
            tensor: a `tf.Tensor` of rank 1 or more; all but its first dimension alike on all ranks.
            name: alike on all ranks.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Take leave of the other ranks. Nothing may be sent afterwards."""
