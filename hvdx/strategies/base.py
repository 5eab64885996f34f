"""The contract of a strategy: one way in which the workers combine their work."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdx.comm import Comm


@dataclass(frozen=True)
class TensorSpec:
    """What a strategy is told of a tensor it will exchange.

    Attributes:
        name: the variable's name, for messages.
        shape: its shape.
        itemsize: bytes an element.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product


class Strategy(abc.ABC):
    """One way in which the workers combine their work.

    A strategy knows ranks and bytes, and nothing of Keras: the adapter in `hvdx.keras` calls `exchange` from inside
    the training step, with the gradients of the variables it described to `bytes_per_step`.
    """

    #: What `HVDX_STRATEGY` and `hvdx.strategy` call it.
    name: ClassVar[str]

    @abc.abstractmethod
    def exchange(self, comm: Comm, tensors: Sequence[Any], name: str) -> list[Any]:
        """Combine this rank's gradients with those of the others.

        Args:
            comm: reaches the other ranks.
            tensors: one `tf.Tensor` or `tf.IndexedSlices` a variable, in the order of the variables.
            name: alike on all ranks, and different for each optimiser.

        Returns:
            What the optimiser is to apply, in the same order; the same bits on every rank.
        """

    @abc.abstractmethod
    def bytes_per_step(self, specs: Sequence[TensorSpec], size: int) -> int:
        """Bytes that one rank sends in a step.

        Args:
            specs: the variables that are exchanged.
            size: number of ranks.
        """

    @abc.abstractmethod
    def __repr__(self) -> str:
        """The call that makes this strategy."""
