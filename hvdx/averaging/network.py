"""The contract of a saved network: what every file format gives to the averaging, and takes from it."""

import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

#: Gives the new content of a tensor: one-dimensional blocks of its dtype, in order, all of them once.
Values = Callable[["Tensor"], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a saved network.

    Attributes:
        name: what the file calls it.
        shape: its shape.
        dtype: of its elements, in the byte order of the file.
        read: `read(start, out)` fills the one-dimensional array `out`, of that dtype, with the elements from `start`
            on of the flattened tensor (last index fastest). Threads may call it side by side.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, np.ndarray], None] = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.size * self.dtype.itemsize

    def array_at(self, start: int, count: int) -> np.ndarray:
        """Some elements of the flattened tensor."""
        flat = np.empty(count, self.dtype)
        self.read(start, flat)
        return flat

    def array(self) -> np.ndarray:
        """All of it."""
        return self.array_at(0, self.size).reshape(self.shape)


class Network(abc.ABC):
    """A saved network that is open for reading.

    Attributes:
        path: where it is.
        tensors: by name, in the order in which `write` asks for them.
        architecture: what else has to be alike in networks that are averaged, as nested dictionaries and lists of
            JSON; None where the file says nothing of it.
        normalises: whether it has batch normalisation, whose statistics are stale after averaging.
    """

    #: How people call the format, such as "PyTorch".
    format: str
    #: Endings of file names that mean this format; the first is the usual one.
    suffixes: tuple[str, ...]

    path: Path
    tensors: Mapping[str, Tensor]
    architecture: Any = None
    normalises: bool = False

    @classmethod
    @abc.abstractmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """Whether `path` is of this format.

        Args:
            path: a file, a directory, or the prefix of several files.
            head: the first bytes of the file; empty where `path` is no file.
        """

    @classmethod
    @abc.abstractmethod
    def open(cls, path: Path) -> "Network":
        """Read what tensors there are, and not yet their elements.

        Raises:
            AverageError: it is damaged, or holds what cannot be averaged; the message names the file.
        """

    @abc.abstractmethod
    def write(self, out: Path, values: Values) -> None:
        """Write a network like this one with other values.

        Args:
            out: a path that does not exist, in the folder where the result will be. What is called `out`, or begins
                with its name and a dot, is removed should this raise.
            values: called once for every tensor, in the order of `tensors`.
        """

    def close(self) -> None:  # noqa: B027 - not every format keeps its file open
        """Let go of the file."""


def native(dtype: np.dtype) -> np.dtype:
    """A dtype in this machine's byte order."""
    return dtype.newbyteorder("=")


def gather(tensor: Tensor, values: Values) -> np.ndarray:
    """The new content of a tensor, all of it."""
    array, at = np.empty(tensor.size, tensor.dtype), 0
    for block in values(tensor):
        array[at : at + block.size] = block
        at += block.size
    return array.reshape(tensor.shape)
