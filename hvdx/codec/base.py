"""The contract of a codec.

A codec encodes an update, a list of float32 arrays, as one message of bytes, and adds decoded messages to an output. An
encoder's state between updates is an explicit value: `init` makes it, `encode` takes it and returns the next one, and
it can be saved and loaded. The codec itself holds no state. Every codec keeps these promises, and
`tests/codec/battery.py` tests them:

- `decode` adds exactly the values that `encode` sent: the same bits on every machine, for any number of threads.
- If the codec has a state, `sent + state after == update + state before`, up to the rounding of that addition.
- If an update cannot be sent (NaN, infinity), `encode` raises `UpdateError` and leaves the state unchanged, up to the
  rounding of an addition and its reversal.
- If bytes are not a message, `decode` raises `WireError` and leaves the output unchanged. `decode_sum` and `add_sum`
  raise it too, but leave the output undefined.
"""

import abc
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np


class Array(Protocol):
    """Contiguous array of float32 in the memory of a host or a GPU, such as one of NumPy or Numba."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each dimension."""

    @property
    def size(self) -> int:
        """Number of elements."""

    def __array__(self) -> np.ndarray: ...

    def __setitem__(self, index: EllipsisType, value: float) -> None: ...


class State(abc.ABC):
    """State of an encoder between updates."""

    @abc.abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """Return a copy of the state as named arrays, for a checkpoint."""


class EmptyState(State):
    """Empty state of a stateless encoder."""

    def arrays(self) -> dict[str, np.ndarray]:
        return {}


S = TypeVar("S", bound=State)


class Decoder(Protocol):
    """Codec as a receiver of messages sees it, without the state of an encoder."""

    def decode(self, messages: Sequence[np.ndarray], out: Sequence[Array], scale: float = 1.0) -> None:
        """See `Codec.decode`."""

    def decode_sum(self, messages: Sequence[np.ndarray], out: Sequence[Array], scale: float = 1.0) -> None:
        """See `Codec.decode_sum`."""

    def add_sum(self, messages: Sequence[np.ndarray], out: Sequence[np.ndarray], scale: float = 1.0) -> None:
        """See `Codec.add_sum`."""


class Codec(abc.ABC, Generic[S]):
    """A format for updates."""

    #: Name in the catalogue.
    name: ClassVar[str]
    #: Number in the frame of a message, one byte.
    number: ClassVar[int]
    #: Device of the arrays: "cpu" for NumPy arrays, "cuda" or "cuda:NUMBER" for arrays on a GPU.
    device: str = "cpu"
    #: Seconds that `prepare` takes on an idle core if nothing is compiled yet.
    compile_seconds: ClassVar[int] = 0

    @abc.abstractmethod
    def init(self, sizes: Sequence[int]) -> S:
        """Return the state before the first update.

        Args:
            sizes: number of elements of each array of an update.
        """

    @abc.abstractmethod
    def encode(self, update: Sequence[Array], state: S) -> tuple[np.ndarray, S]:
        """Encode an update as a message.

        Args:
            update: contiguous float32 arrays of the sizes passed to `init`.
            state: state from `init`, `restore` or the last `encode`. It must not be used again; use the returned one.

        Returns:
            The message, uint8[bytes], and the state after it.

        Raises:
            UpdateError: if the update holds NaN, infinity, or a value outside the format's range. The state is
                unchanged up to rounding, and can be used again.
        """

    @abc.abstractmethod
    def decode(self, messages: Sequence[np.ndarray], out: Sequence[Array], scale: float = 1.0) -> None:
        """Decode messages and add them, times `scale`, to an output, one message after another.

        Args:
            messages: one message from each rank, in rank order: uint8[bytes] or bytes, also views of a larger buffer.
                They are untrusted, so every byte is checked. They must not change until `decode` returns.
            out: contiguous float32 arrays, read as one vector of the elements of an update; changed in place. One flat
                array is fastest.
            scale: float32 factor; 1 / number of messages gives their mean.

        Raises:
            WireError: if a message is not of this codec, or not for these sizes. The error names the rank. `out` is
                unchanged.
        """

    def decode_sum(self, messages: Sequence[np.ndarray], out: Sequence[Array], scale: float = 1.0) -> None:
        """Set an output to the sum of messages: to zeros, to which `decode` adds the messages.

        The sum has the same bits as if `out` had been cleared and `decode` called. A codec may override this method to
        take less time.

        Args:
            messages, out, scale: see `decode`. The elements of `out` are not read.

        Raises:
            WireError: as `decode` does, but `out` is undefined.
        """
        for array in out:
            array[...] = 0
        self.decode(messages, out, scale)

    def add_sum(self, messages: Sequence[np.ndarray], out: Sequence[np.ndarray], scale: float = 1.0) -> None:
        """Add the sum of messages to an output on the host, as if `decode_sum` had set another array that is added.

        A codec may override this method to take less memory.

        Args:
            messages, out, scale: see `decode`.

        Raises:
            WireError: as `decode` does, but `out` is undefined.
        """
        total = [np.empty(array.shape, np.float32) for array in out]
        self.decode_sum(messages, total, scale)
        for array, change in zip(out, total, strict=True):
            np.add(array, change, out=array)

    @property
    def prepared(self) -> bool:
        """True if no kernel has to be compiled."""
        return True

    def prepare(self) -> str:
        """Load the compiled kernels, or compile and cache them. `encode` and `decode` call this too.

        Returns:
            A readable reason if the kernels could not be cached; "" if they were, or if there is nothing to compile.
        """
        return ""

    @abc.abstractmethod
    def restore(self, arrays: Mapping[str, np.ndarray], sizes: Sequence[int]) -> S:
        """Return the state that `State.arrays` saved.

        Args:
            arrays: saved arrays by name.
            sizes: number of elements of each array of an update.

        Raises:
            ConfigError: if the arrays are of another codec or of other sizes.
        """
