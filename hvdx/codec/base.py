"""The contract of a codec.

A codec turns an update, a list of float32 arrays, into one message of bytes, and adds messages to an output. What an
encoder must remember from one update to the next is in a state of its own: a value that is made, passed in, given back,
saved and loaded, never hidden in the codec. Every codec keeps these promises, and `tests/codec/battery.py` holds it to
them:

- `decode` adds exactly what `encode` said it sends, on every machine the same bits, for any number of threads.
- `sent + state after == update + state before`, at most the rounding of that addition, where there is a state.
- An update that cannot be sent (NaN, infinity) raises `UpdateError`, and the state is as it was.
- Bytes that are not a message raise `WireError`, and the output is as it was.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np


class State(abc.ABC):
    """What an encoder remembers between updates."""

    @abc.abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """The state as named arrays, for a checkpoint: copies."""


class Nothing(State):
    """The state of an encoder that remembers nothing."""

    def arrays(self) -> dict[str, np.ndarray]:
        return {}


S = TypeVar("S", bound=State)


class Codec(abc.ABC, Generic[S]):
    """A format for updates."""

    #: The name by which the registry knows it.
    name: ClassVar[str]
    #: The byte by which a message names it.
    number: ClassVar[int]
    #: Seconds of an idle core that `prepare` takes where nothing is compiled yet.
    compile_seconds: ClassVar[int] = 0

    @abc.abstractmethod
    def init(self, sizes: Sequence[int]) -> S:
        """Make the state before the first update.

        Args:
            sizes: elements of each array of the updates to come.
        """

    @abc.abstractmethod
    def encode(self, update: Sequence[Any], state: S) -> tuple[np.ndarray, S]:
        """Turn an update into a message.

        Args:
            update: float32 arrays of the sizes that `init` was told, contiguous.
            state: from `init`, the last `encode` or `restore`. It is used up: go on with the one given back.

        Returns:
            The message, uint8[bytes], and the state after it.

        Raises:
            UpdateError: the update holds NaN, infinity, or what the format cannot hold; the state is as it was.
        """

    @abc.abstractmethod
    def decode(self, messages: Sequence[np.ndarray], out: Sequence[Any], scale: float = 1.0) -> None:
        """Add messages, one after another, times `scale`, to an output.

        Args:
            messages: uint8[bytes] each, or bytes; one from each rank, in rank order. Views of one large buffer will do.
                From anywhere, so nothing is believed; but they must not change until decode returns.
            out: float32 arrays of the sizes that `init` was told, contiguous; changed in place.
            scale: a float32; 1 / number of messages gives their mean.

        Raises:
            WireError: a message is not of this codec, or not for these sizes; it names the rank. `out` is as it was.
        """

    @property
    def prepared(self) -> bool:
        """True if nothing has to be compiled."""
        return True

    def prepare(self) -> str:
        """Load the compiled kernels, or compile and cache them; `encode` and `decode` call it too.

        Returns:
            Why it could not be kept, for people; "" where it was, or where there is nothing to compile.
        """
        return ""

    @abc.abstractmethod
    def restore(self, arrays: Mapping[str, np.ndarray], sizes: Sequence[int]) -> S:
        """Make a state of what `State.arrays` gave.

        Args:
            arrays: as they were saved.
            sizes: as for `init`.

        Raises:
            ConfigError: they are not of this codec, or of other sizes.
        """
