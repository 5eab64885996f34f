"""Interface of a saved network, which every file format implements, and the dtypes that NumPy lacks."""

import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvdx.errors import AverageError

#: Function that yields the new values of a tensor: one-dimensional blocks of its dtype, in order, each once.
Values = Callable[["Tensor"], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Tensor:
    """One tensor of a saved network.

    Attributes:
        name: name in the file.
        shape: extents of the dimensions.
        dtype: dtype of the elements, in the byte order of the file.
        read: `read(start, out)` fills `out`, a one-dimensional array of this dtype, with elements of the flattened
            tensor (last index fastest), from `start` on. Several threads may call it at the same time.
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
        """Size of the elements, in bytes."""
        return self.size * self.dtype.itemsize

    def array_at(self, start: int, count: int) -> np.ndarray:
        """Return `count` elements of the flattened tensor, from `start` on."""
        flat = np.empty(count, self.dtype)
        self.read(start, flat)
        return flat

    def array(self) -> np.ndarray:
        """Return all elements."""
        return self.array_at(0, self.size).reshape(self.shape)


class Network(abc.ABC):
    """Saved network that is open for reading.

    Attributes:
        path: path of the network.
        tensors: tensors by name, in the order in which `write` requests their values.
        architecture: further properties that must be equal in networks that are averaged, as a JSON value; None if
            the file does not describe them.
        normalises: True if it has batch normalisation, whose statistics are stale after averaging.
    """

    #: Name of the format for users, such as "PyTorch".
    format: str
    #: Endings of file names that belong to this format; the first is the usual one.
    suffixes: tuple[str, ...]

    path: Path
    tensors: Mapping[str, Tensor]
    architecture: object = None
    normalises: bool = False

    @classmethod
    @abc.abstractmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """Return whether `path` has this format.

        Args:
            path: file, directory, or prefix of several files.
            head: first bytes of the file; empty if `path` is not a file.
        """

    @classmethod
    @abc.abstractmethod
    def open(cls, path: Path) -> "Network":
        """Open a network and list its tensors; `Tensor.read` reads their elements.

        Raises:
            AverageError: if it is damaged or cannot be averaged; the message names the file.
        """

    @abc.abstractmethod
    def write(self, out: Path, values: Values) -> None:
        """Write a copy of this network with new values.

        Args:
            out: path that does not exist, in the folder of the result. If this method raises, the caller removes `out`
                and all paths that begin with its name and a dot.
            values: function that is called once for every tensor, in the order of `tensors`.
        """

    def close(self) -> None:  # noqa: B027 - not every format keeps its file open
        """Close the files of the network."""


def native(dtype: np.dtype) -> np.dtype:
    """Return a dtype in the byte order of this machine."""
    return dtype.newbyteorder("=")


def gather(tensor: Tensor, values: Values) -> np.ndarray:
    """Return all new values of a tensor as one array."""
    array, at = np.empty(tensor.size, tensor.dtype), 0
    for block in values(tensor):
        array[at : at + block.size] = block
        at += block.size
    return array.reshape(tensor.shape)


def small_float(name: str, path: Path) -> np.dtype:
    """Return bfloat16, or one of the float8 dtypes.

    Args:
        name: name of the dtype in `ml_dtypes`: "bfloat16", "float8_e4m3fn", "float8_e5m2" and others.

    Raises:
        AverageError: if `ml_dtypes` is not installed.
    """
    try:
        import ml_dtypes
    except ImportError:
        raise AverageError(
            f"{path}: expected the package ml_dtypes, for its {name} tensors, found none. Do: pip install ml_dtypes"
        ) from None
    return np.dtype(getattr(ml_dtypes, name))
