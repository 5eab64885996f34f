"""The contract of a communicator.

Every method that talks to other ranks is collective: all ranks call it, in the same order. Each wait ends: a
communicator that cannot reach a rank raises after its time limit.

`Comm` reaches ranks from the host, with NumPy arrays and bytes; `GraphComm` also from inside a TensorFlow graph.
"""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Wire = Literal["none", "fp16", "bf16"]
#: What carries tensors in the graph; "auto" is Horovod where all ranks have it, else MPI on the host.
Engine = Literal["auto", "horovod", "mpi"]
# Bytes of a vector that `Channel.sum_in_order` passes on at a time: MPI counts in a C int, and buffers stay small.
_BLOCK_BYTES = 1 << 26


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


@dataclass(frozen=True)
class Received:
    """What one exchange over a channel brought.

    Attributes:
        headers: int64[size, k], every rank's header.
        messages: uint8[bytes] each, in rank order; views that the next exchange overwrites.
        waited: seconds until all ranks had come.
        seconds: seconds that the messages then took.
    """

    headers: np.ndarray
    messages: list[np.ndarray]
    waited: float
    seconds: float


class Channel(abc.ABC):
    """Carries messages of different lengths between all ranks. One thread at a time."""

    rank: int
    size: int

    @abc.abstractmethod
    def exchange(self, header: Sequence[int], message: np.ndarray | None = None) -> Received:
        """Give every rank every rank's message.

        Args:
            header: a few whole numbers that travel first; as many on all ranks.
            message: uint8[bytes], of any length on each rank; None sends nothing, and all ranks must agree on that.

        Returns:
            Everyone's, this rank's own included.

        Raises:
            ExchangeError: ranks that did not come within the time limit; it names them.
        """

    @abc.abstractmethod
    def all_reduce(self, vector: np.ndarray) -> None:
        """Sum a vector over the ranks, in place.

        Args:
            vector: float32[n], n alike on all ranks; afterwards the same bits on all.

        Raises:
            ExchangeError: see `exchange`.
        """

    def sum_in_order(self, vector: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """Sum a vector over the ranks, each element in rank order.

        Every rank adds up one piece of the vector and gives the result to the others, so that each sends
        2 (N - 1) / N times the vector, as in a ring.

        Args:
            vector: contiguous floats[n], n and dtype alike on all ranks. It travels in its dtype, and is added up in
                float32, or in float64 if that is its dtype.
            scale: factor on the sum, before it is rounded to the dtype of the vector.

        Returns:
            A new array of that dtype[n], the same bits on every rank.

        Raises:
            ExchangeError: see `exchange`.
        """
        wide, result = np.promote_types(vector.dtype, np.float32), np.empty_like(vector)
        most = _BLOCK_BYTES // vector.itemsize
        for begin in range(0, vector.size, most):
            block = vector[begin : begin + most]
            bounds = np.arange(self.size + 1) * block.size // self.size
            pieces = self.deal(block, bounds)
            # A sum that float16 cannot hold becomes infinity, which those who look at the result find.
            with np.errstate(over="ignore", invalid="ignore"):
                total = pieces[0].astype(wide)
                for piece in pieces[1:]:
                    total += piece.astype(wide, copy=False)
                mine = (total * scale if scale != 1.0 else total).astype(vector.dtype, copy=False)
            self.join(mine, bounds, result[begin : begin + most])
        return result

    @abc.abstractmethod
    def deal(self, vector: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Give every rank its piece of each rank's vector.

        Args:
            vector: contiguous [n], n and dtype alike on all ranks.
            bounds: int64[size + 1]; the piece of rank r is `vector[bounds[r] : bounds[r + 1]]`.

        Returns:
            [size, piece], this rank's piece of each vector, in rank order; the next exchange may overwrite it.

        Raises:
            ExchangeError: see `exchange`.
        """

    @abc.abstractmethod
    def join(self, piece: np.ndarray, bounds: np.ndarray, into: np.ndarray) -> None:
        """Put the pieces of all ranks together; see `deal`.

        Args:
            piece: this rank's.
            bounds: of the pieces.
            into: where they go: contiguous [n].

        Raises:
            ExchangeError: see `exchange`.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give the channel back; every rank does."""


@dataclass(frozen=True)
class Message:
    """What one rank sent another.

    Attributes:
        sender: its rank; those that only serve come after the others.
        header: HEAD_WORDS whole numbers.
        body: uint8[bytes], or None.
    """

    sender: int
    header: tuple[int, ...]
    body: np.ndarray | None


#: Whole numbers in the header of a message; those that are not given are 0.
HEAD_WORDS = 10
#: Where to put the body of a message from a rank with this header, of so many bytes; None leaves it to the mailbox.
Place = Callable[[int, tuple[int, ...], int], np.ndarray | None]


class Mailbox(abc.ABC):
    """Messages from one rank to another, without the others: those that come to one box of this rank.

    Messages from one rank to one box come in the order in which they were sent. One thread at a time.
    """

    rank: int

    @abc.abstractmethod
    def send(self, to: int, box: int, header: Sequence[int], body: np.ndarray | None = None) -> None:
        """Send a message; returns before it has left.

        Args:
            to: a rank; this one too.
            box: of that rank.
            header: whole numbers, HEAD_WORDS at most.
            body: uint8[bytes], contiguous; it must not change until it has `left`.
        """

    @abc.abstractmethod
    def fetch(self) -> Message | None:
        """The next message that has come as a whole; None if there is none. Does not wait."""

    @abc.abstractmethod
    def leaving(self) -> int:
        """How many messages, headers and bodies, are still on their way out."""

    def left(self) -> bool:
        """Whether all that was sent may be changed again."""
        return not self.leaving()

    @property
    @abc.abstractmethod
    def coming(self) -> bool:
        """Whether a part of a message is here, and the rest on its way."""


class Comm(abc.ABC):
    """Reaches the other ranks. `rank` and `size` place this process among them.

    Attributes:
        servers: ranks that only serve these, beside them; to mailboxes they are the ranks from `size` on.
        serves: whether this is one of them.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    servers: int = 0
    serves: bool = False

    @property
    def workers(self) -> int:
        """Number of ranks that train; `size`, where it is not one of the servers that asks."""
        return self.size

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
            tensors: TensorFlow tensors or NumPy arrays; shapes and dtypes alike on all ranks.
            root: the rank whose values travel.
            what: a name for the exchange.

        Returns:
            The root's values, an array or a tensor for each given.
        """

    @abc.abstractmethod
    def channel(self, what: str) -> Channel:
        """Open a channel of its own for messages: another thread may use it while this one uses the communicator.

        Args:
            what: what it carries, for messages about ranks that do not come.

        Raises:
            ConfigError: this communicator cannot carry messages; the error names one that can.
        """

    @abc.abstractmethod
    def mailbox(self, box: int, place: Place | None = None) -> Mailbox:
        """Open a box for messages from single ranks. The first call is collective.

        Args:
            box: its number, from 0; one thread a box.
            place: where bodies go.

        Raises:
            ConfigError: this communicator cannot carry messages; the error names one that can.
        """

    def any_true(self, mine: bool) -> bool:
        """Whether something holds on any rank. May be called from TensorFlow's threads.

        Args:
            mine: whether it holds on this one.
        """
        return any(self.all_gather_object(mine, "a flag"))

    @abc.abstractmethod
    def close(self) -> None:
        """Take leave of the other ranks. Nothing may be sent afterwards."""


class GraphComm(Comm):
    """Reaches the other ranks from inside a TensorFlow graph too."""

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
    def all_to_all(self, tensor: Any, splits: Any, name: str) -> tuple[Any, Any]:
        """Give every rank its part of each rank's tensor, inside a TensorFlow graph or eagerly.

        Args:
            tensor: a `tf.Tensor` of rank 1 or more; all but its first dimension alike on all ranks.
            splits: int32[size], how many of its rows go to each rank.
            name: alike on all ranks.

        Returns:
            The rows received, in rank order, and int32[size], how many came from each rank.
        """

    @abc.abstractmethod
    def subset(self, ranks: Sequence[int]) -> "GraphComm | None":
        """Make a communicator of some of the ranks. Collective over all ranks, alike on all.

        Args:
            ranks: some, in ascending order; in the communicator they are numbered from 0 in this order.

        Returns:
            The communicator; None on ranks that are not among them.

        Raises:
            ConfigError: the communicator was started without the means for it; the error names the remedy.
        """
