"""Interfaces of communicators, channels and mailboxes.

Methods of `Comm`, `GraphComm` and `Channel` that send are collective: all ranks call them, in the same order. A
communicator that cannot reach a rank raises an error after its time limit.

`Comm` sends NumPy arrays and bytes from the host. `GraphComm` also sends tensors from inside a TensorFlow graph.
"""

import abc
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hvdx.comm.waiting import time_limit

Wire = Literal["none", "fp16", "bf16"]
#: Transport of tensors in the graph. "auto" is Horovod if it sends the tensors of GPUs by NCCL on all ranks, else MPI.
Engine = Literal["auto", "horovod", "mpi"]
#: Function from an array and a dtype to a new array of that dtype.
Cast = Callable[[np.ndarray, np.dtype], np.ndarray]


T = TypeVar("T")


class DType(Protocol):
    """Element type of a tensor, `tf.DType`."""

    @property
    def name(self) -> str:
        """Name, such as "float32"."""


class Tensor(Protocol):
    """Tensor of TensorFlow: `tf.Tensor`, or for a gradient also `tf.IndexedSlices`, which has only a dtype."""

    @property
    def dtype(self) -> DType:
        """Type of the elements."""

    def __getitem__(self, index: slice) -> "Tensor": ...

    def __mul__(self, other: float) -> "Tensor": ...

    def __truediv__(self, other: "Tensor") -> "Tensor": ...


@dataclass(frozen=True)
class Reduction:
    """Options of `GraphComm.all_reduce`.

    Attributes:
        average: divide the sum by the number of ranks.
        wire: dtype of float32 and float64 values on the network; "none" keeps theirs.
        groups: number of groups (int), or the tensors' indices group by group; each group is one collective.
        sparse: exchange of `IndexedSlices`: "gather" their rows, or sum the whole tensor ("dense").
        predivide: with `average`, divide by this before the sum and by size / predivide after it.
        device: device of the dense collectives; "" leaves it to TensorFlow.
        device_sparse: device of the collectives on the rows of `IndexedSlices`; "" leaves it to TensorFlow.
        sizes: elements of each tensor if the last tensors are computed first, as in a backward pass; they may then be
            sent while the others are computed. () if all tensors are ready at once.
        of_step: the tensors are gradients of a step of a training, which all ranks take together. Where MPI combines
            them, ranks at different steps get ExchangeError.
    """

    average: bool = True
    wire: Wire = "none"
    groups: int | tuple[tuple[int, ...], ...] = 1
    sparse: Literal["gather", "dense"] = "gather"
    predivide: float = 1.0
    device: str = ""
    device_sparse: str = ""
    sizes: tuple[int, ...] = ()
    of_step: bool = False


@dataclass(frozen=True)
class Received:
    """Result of one exchange over a channel.

    Attributes:
        headers: int64[size, k], the headers of all ranks, in rank order.
        messages: uint8[bytes] each, in rank order; views that the next exchange overwrites.
        waited: seconds until the headers of all ranks had arrived.
        seconds: seconds from then until all messages had arrived.
    """

    headers: np.ndarray
    messages: list[np.ndarray]
    waited: float
    seconds: float


class Channel(abc.ABC):
    """Collective exchange of messages of different lengths. One thread at a time may use it.

    `exchange` is the primitive. The other collectives are made of it here, and bring each rank also the data for
    others; where ranks are processes, a channel overrides them.
    """

    rank: int
    size: int

    @abc.abstractmethod
    def exchange(self, header: Sequence[int], message: np.ndarray | None = None) -> Received:
        """Gather the headers and messages of all ranks, this one's included.

        Args:
            header: int64[k], sent before the messages; k is the same on all ranks.
            message: uint8[bytes]; its length may differ between ranks. If it is None on all ranks, only headers are
                exchanged.

        Raises:
            ExchangeError: if ranks do not join within the time limit; it names them.
        """

    def all_reduce(self, vector: np.ndarray) -> None:
        """Sum a vector over the ranks, in place.

        Args:
            vector: float32[n] or float64[n], n the same on all ranks; afterwards it holds the same bits on all ranks.

        Raises:
            ExchangeError: if ranks do not join within the time limit.
        """
        received = self.exchange([], vector.view(np.uint8))
        add_in_order([message.view(vector.dtype) for message in received.messages], vector)

    def sum_in_order(
        self,
        vector: np.ndarray,
        scale: float = 1.0,
        cast: Cast = np.ndarray.astype,
    ) -> None:
        """Sum a vector over the ranks, in place, each element in rank order.

        Every rank sums one piece of the vector and sends the result to the others. Each rank sends 2 (N - 1) / N
        times the vector, as in a ring all-reduce.

        Args:
            vector: contiguous floats[n], n and dtype the same on all ranks; afterwards it holds the same bits on all
                ranks. Values are sent in this dtype and summed in float32, or in float64 if that is the dtype.
            scale: factor on the sum, applied before rounding to the dtype of the vector.
            cast: function from an array and a dtype to a new array. NumPy casts small numbers to float16 a hundred
                times more slowly than others.

        Raises:
            ExchangeError: if ranks do not join within the time limit.
        """
        bounds = np.arange(self.size + 1) * vector.size // self.size
        mine = np.empty(bounds[self.rank + 1] - bounds[self.rank], vector.dtype)
        add_in_order(list(self.scatter_pieces(vector, bounds)), mine, scale, cast)
        self.gather_pieces(mine, bounds, vector)

    def scatter_pieces(self, vector: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Send every rank its piece of this rank's vector (an all-to-all).

        Args:
            vector: contiguous [n], n and dtype the same on all ranks.
            bounds: int64[size + 1]; the piece of rank r is `vector[bounds[r] : bounds[r + 1]]`.

        Returns:
            [size, piece], this rank's piece of each rank's vector, in rank order; the next exchange may overwrite it.

        Raises:
            ExchangeError: if ranks do not join within the time limit.
        """
        ends = bounds * vector.itemsize
        mine = int(ends[self.rank + 1] - ends[self.rank])
        got = self.all_to_all(np.split(vector.view(np.uint8), ends[1:-1]), [mine] * self.size)
        return np.stack(got).view(vector.dtype)

    def gather_pieces(self, piece: np.ndarray, bounds: np.ndarray, into: np.ndarray) -> None:
        """Gather the pieces of all ranks into one vector (an all-gather).

        Args:
            piece: piece of this rank, [bounds[rank + 1] - bounds[rank]].
            bounds: int64[size + 1], bounds of the pieces; see `scatter_pieces`.
            into: contiguous [n], the output.

        Raises:
            ExchangeError: if ranks do not join within the time limit.
        """
        into[:] = np.concatenate(self.exchange([], piece.view(np.uint8)).messages).view(into.dtype)

    def share(self, elements: int) -> "list[np.ndarray] | None":
        """Allocate an array for each rank, which all ranks can read and write. Collective.

        What a rank writes is visible to the others after the next exchange of the channel.

        Args:
            elements: number of float32 elements of the array of this rank.

        Returns:
            The array of each rank, float32[elements of that rank] of zeros, in rank order; None on all ranks if they
            cannot share memory, as in channels that do not define this method.

        Raises:
            ExchangeError: if ranks do not join within the time limit.
        """
        return None

    def all_to_all_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Send each rank a few numbers of its own (an all-to-all of a fixed size).

        Args:
            numbers: contiguous integers [size, k], k and dtype the same on all ranks; row r is for rank r.

        Returns:
            [size, k], the row of each rank for this one, in rank order.

        Raises:
            ExchangeError: if ranks do not join within the time limit.
        """
        got = self.all_to_all(list(numbers.view(np.uint8)), [numbers[0].nbytes] * self.size)
        return np.stack(got).view(numbers.dtype)

    def all_to_all(self, parts: Sequence[np.ndarray], sizes: Sequence[int]) -> list[np.ndarray]:
        """Send each rank its part of this rank's data.

        Args:
            parts: uint8[bytes] for each rank, in rank order.
            sizes: bytes of the part that each rank sends to this one.

        Returns:
            uint8[sizes[r]] of each rank r; views that the next exchange overwrites.

        Raises:
            ExchangeError: if ranks do not join within the time limit, or if the parts are too large.
        """
        received = self.exchange([part.size for part in parts], np.concatenate(parts))
        ends = np.cumsum(received.headers, axis=1)[:, self.rank].tolist()
        return [m[end - size : end] for m, end, size in zip(received.messages, ends, sizes, strict=True)]

    def close(self) -> None:
        """Free the channel, if it holds anything. Collective."""
        return


def add_in_order(
    addends: Sequence[np.ndarray], out: np.ndarray, scale: float = 1.0, cast: Cast = np.ndarray.astype
) -> None:
    """Set `out` to the sum of vectors, each element in their order, times a factor.

    The sum is made in float32, or in float64 if that is the dtype of the vectors, and rounded once. Integers are
    summed in their own dtype.

    Args:
        addends: floats[n] or integers[n] each.
        out: [n] of the same dtype; it may be the first addend.
        scale: factor; 1 for integers.
        cast: see `Channel.sum_in_order`.

    Example:
        >>> add_in_order([np.array([1.0, 2.0]), np.array([3.0, 4.0])], out := np.empty(2), 0.5)
        >>> out
        array([2., 3.])
    """
    wide = out.dtype if out.dtype.kind in "iu" else np.promote_types(out.dtype, np.float32)
    narrow = out.dtype != wide
    total = np.empty(out.shape, wide) if narrow else out
    values = [cast(addend, wide) for addend in addends] if narrow else addends
    # A sum that float16 cannot hold becomes infinity, which checks of the result find.
    with np.errstate(over="ignore", invalid="ignore"):
        so_far = values[0]
        for value in values[1:]:
            so_far = np.add(so_far, value, out=total)
        if len(values) == 1:
            total[:] = so_far
        if scale != 1.0:
            np.multiply(total, scale, out=total)
        if narrow:
            out[:] = cast(total, out.dtype)


@dataclass(frozen=True)
class Message:
    """Message from one rank to another.

    Attributes:
        sender: rank of the sender; server ranks are numbered after the workers.
        header: HEADER_WORDS integers.
        body: uint8[bytes], or None.
    """

    sender: int
    header: tuple[int, ...]
    body: np.ndarray | None


#: Number of integers in the header of a message; those that are not given are 0.
HEADER_WORDS = 10
#: Function that returns the buffer, uint8[bytes], for the body of a message, from its sender, header and size in bytes.
#: If it returns None, the mailbox allocates a buffer.
BufferFor = Callable[[int, tuple[int, ...], int], np.ndarray | None]


class Mailbox(abc.ABC):
    """Mailbox for point-to-point messages: receives those to one box of this rank, and sends to any box of any rank.

    Messages from one rank to one box arrive in the order in which they were sent. One thread at a time may use it.
    If ranks may die and the others go on, mailboxes name ranks by their numbers in `Comm.world_ranks`, which stay.

    Attributes:
        rank: number of this rank.
        gone: numbers of ranks that have died. Messages to them are dropped, and those from them that had not arrived.
    """

    rank: int
    gone: Set[int] = frozenset()

    @abc.abstractmethod
    def send(self, to: int, box: int, header: Sequence[int], body: np.ndarray | None = None) -> None:
        """Start to send a message, without waiting for its completion.

        Args:
            to: rank of the receiver, which may be this rank.
            box: number of the receiver's box.
            header: integers, at most HEADER_WORDS.
            body: uint8[bytes], contiguous; it must not change until `all_sent` returns True.
        """

    @abc.abstractmethod
    def fetch(self) -> Message | None:
        """Return the next message that has arrived completely, or None if there is none. Does not wait."""

    @abc.abstractmethod
    def pending_sends(self) -> int:
        """Return the number of sends in flight; headers and bodies count separately."""

    def all_sent(self) -> bool:
        """Return whether all sends are complete, so that their bodies may be changed."""
        return not self.pending_sends()

    @property
    @abc.abstractmethod
    def receiving(self) -> bool:
        """True while a message has arrived in part."""


def of_comm(name: str) -> property:
    """Return a property with the value that an attribute of the object's own communicator has now.

    Args:
        name: name of the attribute.

    Example:
        >>> class Fixed:
        ...     size = of_comm("size")
        ...     def __init__(self, comm): self._comm = comm
        >>> from hvdx.comm import LocalComm
        >>> Fixed(LocalComm()).size
        1
    """
    return property(lambda self: getattr(self._comm, name))


@dataclass(frozen=True)
class Death:
    """Death of ranks after which the others went on.

    Attributes:
        ranks: those that died, by their numbers in the world.
        left: number of ranks that are left.
        seconds: from the first error on this rank to the end of the exchange that was repeated.
    """

    ranks: Sequence[int]
    left: int
    seconds: float


def place_of(hosts: Sequence[str], rank: int) -> tuple[int, int, int, int]:
    """Return local rank and size, and cross rank and size, of a rank, from the names of the ranks' hosts.

    Example:
        >>> place_of(["a", "a", "b"], 2)
        (0, 1, 1, 2)
    """
    numbers = [list(hosts[:other]).count(host) for other, host in enumerate(hosts)]
    peers = [other for other, number in enumerate(numbers) if number == numbers[rank]]
    return numbers[rank], list(hosts).count(hosts[rank]), peers.index(rank), len(peers)


class Comm(abc.ABC):
    """Communicator of a group of ranks.

    Attributes:
        rank, size: rank of this process in the group, and number of ranks in the group.
        local_rank, local_size: rank among the ranks on this host, and their number.
        cross_rank, cross_size: rank among the ranks with the same local rank, one per host, and their number.
        servers: number of server ranks outside the group; see `server_numbers`.
        serves: True if this process is a server rank.
        hosts: name of each rank's host.
        mesh: `Mesh` of the ranks, if they split layers; otherwise None.
        parent: communicator of which `divide` made this one; None if it made none.
        parent_ranks: rank in the parent of each rank; None if there is no parent.
        library: name and version of the MPI library; "" without one.
        survives: True if the ranks go on without one that dies; see `complete`.
        recoveries: number of times that ranks died and the others went on, or spares joined. Each changes `rank`,
            `size` and `hosts`.
        deaths: the deaths after which the others went on, in their order.
        waits: True on a spare, which has not joined the ranks yet; see `wait`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    servers: int = 0
    serves: bool = False
    hosts: Sequence[str] = ("",)
    mesh: "Mesh | None" = None
    parent: "Comm | None" = None
    parent_ranks: Sequence[int] | None = None
    library: str = ""
    survives: bool = False
    recoveries: int = 0
    deaths: Sequence[Death] = ()
    waits: bool = False

    @property
    def world_ranks(self) -> Sequence[int]:
        """Rank of each rank in the communicator from which `divide` was called first, for messages to users."""
        if self.parent is None or self.parent_ranks is None:
            return range(self.size)
        outer = self.parent.world_ranks
        return [outer[rank] for rank in self.parent_ranks]

    @property
    def patience(self) -> float:
        """Seconds for which a rank waits for messages of another one: until one that hangs has been ended."""
        return time_limit()

    @property
    def server_numbers(self) -> Sequence[int]:
        """Number in mailboxes of each server rank; they follow those of the workers at the start."""
        return range(self.size, self.size + self.servers)

    @property
    def workers(self) -> int:
        """Number of ranks that train: `size`, except on a server rank."""
        return self.size

    @abc.abstractmethod
    def all_gather_object(self, value: T, what: str) -> list[T]:
        """Gather one value from each rank.

        Args:
            value: small, picklable value.
            what: name of the exchange, for error messages.

        Returns:
            The values in rank order.
        """

    @abc.abstractmethod
    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        """Sum a vector over the ranks.

        Args:
            vector: float64[n], n the same on all ranks.
            what: name of the exchange, for error messages.

        Returns:
            float64[n], with the same bits on every rank.
        """

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[npt.ArrayLike], root: int, what: str) -> Sequence[npt.ArrayLike]:
        """Send the tensors of the root to every rank.

        Args:
            tensors: TensorFlow tensors or NumPy arrays; shapes and dtypes are the same on all ranks.
            root: rank of the sender.
            what: name of the exchange, for error messages.

        Returns:
            The root's values, one array or tensor for each of `tensors`.
        """

    @abc.abstractmethod
    def channel(self, what: str) -> Channel:
        """Open a separate channel, which one thread may use while another uses the communicator. Collective.

        Args:
            what: content of the channel, for error messages.

        Raises:
            ConfigError: if this communicator has no channels; the error names one that has.
        """

    @abc.abstractmethod
    def divide(self, part: int, key: int, what: str) -> "Comm":
        """Return the communicator of the ranks that give the same `part`. Collective.

        Args:
            part: number of this rank's part.
            key: position of this rank in its part; the part's ranks are numbered in the order of their keys.
            what: purpose of the communicator, for error messages.

        Raises:
            ConfigError: if this communicator cannot be divided; the error names one that can.
        """

    @abc.abstractmethod
    def mailbox(self, box: int, buffer_for: BufferFor | None = None) -> Mailbox:
        """Open a mailbox for point-to-point messages. The first call is collective.

        Args:
            box: number of the box, from 0; each box belongs to one thread.
            buffer_for: chooses the buffers of bodies; by default the mailbox allocates them.

        Raises:
            ConfigError: if this communicator has no mailboxes; the error names one that has.
        """

    def complete(self, work: Callable[[], T]) -> T:
        """Return the result of a unit of collectives, which either all ranks complete or none. Collective.

        Where `survives` is False, this is a call of `work`. Otherwise all ranks repeat the unit without those that died
        in it. A single collective of a communicator that survives, or of its channels, is such a unit by itself.

        Args:
            work: function that may run again from the same inputs. It reads `size` and makes its channels by `divide`
                anew if `recoveries` has changed.
        """
        return work()

    def can_admit(self, place: int) -> bool:
        """Return whether ranks have died, and spares wait at a place to take theirs. Collective.

        Args:
            place: number of the place.
        """
        return False

    def admit(self) -> None:
        """Let spares take the places of ranks that died, after `can_admit`. Collective.

        The ranks go on with new ones, which have their place in the program, but not their values.
        """
        raise NotImplementedError

    def wait(self, place: int) -> bool:
        """Wait on a spare until it has become a rank; return False if the others have ended.

        Args:
            place: see `can_admit`.
        """
        return not self.waits

    def any_true(self, mine: bool) -> bool:
        """Return whether the flag of any rank is True. May be called from TensorFlow's threads.

        Args:
            mine: flag of this rank.
        """
        return any(self.all_gather_object(mine, "a flag"))

    def close(self) -> None:
        """Disconnect from the other ranks. Nothing may be sent afterwards."""
        return


@dataclass(frozen=True)
class Mesh:
    """Position of this rank in its group and among its peers.

    Attributes:
        groups: ranks of each group, each by position.
        index: number of this rank's group.
        position: position of this rank in its group, which is the number of its part of a split layer.
        group: communicator of the group, ranked by position.
        peers: communicator of the ranks with this position in all groups, ranked by group.
        channel: channel of the group, for the collectives of split layers.
    """

    groups: tuple[tuple[int, ...], ...]
    index: int
    position: int
    group: Comm
    peers: Comm
    channel: Channel

    @property
    def split(self) -> int:
        """Number of ranks in a group."""
        return len(self.groups[0])

    @property
    def peer_ranks(self) -> list[list[int]]:
        """Ranks of each set of peers, by position."""
        return [list(ranks) for ranks in zip(*self.groups, strict=True)]

    def close(self) -> None:
        """Free the channels. Collective."""
        self.channel.close()
        self.group.close()
        self.peers.close()


class GraphComm(Comm):
    """Communicator with collectives that also work inside a TensorFlow graph."""

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor], how: Reduction, name: str) -> list[Tensor]:
        """Sum or average tensors over the ranks, inside a TensorFlow graph or eagerly.

        Args:
            tensors: `tf.Tensor` or `tf.IndexedSlices`; shapes and dtypes are the same on all ranks.
            how: options of the reduction.
            name: name of the collective, the same on all ranks; Horovod matches the ranks' calls by it.

        Returns:
            The combined tensors in the given order, with the same bits on every rank.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        """Concatenate the ranks' tensors along their first dimension, in rank order.

        Args:
            tensor: `tf.Tensor` with one or more dimensions; all except the first are the same on all ranks.
            name: name of the collective, the same on all ranks.
        """

    @abc.abstractmethod
    def all_to_all(self, tensor: Tensor, splits: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Send every rank its rows of this rank's tensor, inside a TensorFlow graph or eagerly.

        Args:
            tensor: `tf.Tensor` with one or more dimensions; all except the first are the same on all ranks.
            splits: int32[size], number of rows for each rank.
            name: name of the collective, the same on all ranks.

        Returns:
            The rows received, in rank order, and int32[size], the number of rows from each rank.
        """

    def check_call(self, call: str, tensors: Sequence[Tensor]) -> None:
        """Raise an error on all ranks if they are in different calls, or their tensors have other shapes or dtypes.

        Where nothing is sent this does nothing; Horovod compares the calls itself.

        Args:
            call: function and arguments, the same on all ranks.
            tensors: `tf.Tensor`; their shapes and dtypes are to be the same.
        """

    @abc.abstractmethod
    def subset(self, ranks: Sequence[int]) -> "GraphComm | None":
        """Return a communicator of some of the ranks. Collective over all ranks, with the same argument on all.

        Args:
            ranks: ranks in ascending order; the new communicator numbers them from 0 in this order.

        Returns:
            The communicator; None on ranks that are not in `ranks`.

        Raises:
            ConfigError: if the communicator was started without process sets; the error names the remedy.
        """
