"""Communicators within one process: a world of one rank, and virtual ranks for tests and simulations."""

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from hvdx.comm.interfaces import (
    HEADER_WORDS,
    BufferFor,
    Channel,
    Comm,
    GraphComm,
    Mailbox,
    Message,
    Received,
    Reduction,
    T,
    Tensor,
    place_of,
)

# Time limit of a virtual rank for the others.
_LIMIT_SECONDS = 60.0


class LocalComm(GraphComm):
    """Communicator of a world of one rank.

    Example:
        >>> LocalComm().all_gather_object("here", "roll call")
        ['here']
    """

    rank = local_rank = cross_rank = 0
    size = local_size = cross_size = 1

    def __init__(self) -> None:
        self._table: _Table | None = None

    def all_gather_object(self, value: T, what: str) -> list[T]:
        return [value]

    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        return np.array(vector, dtype=np.float64)

    def broadcast(self, tensors: Sequence[npt.ArrayLike], root: int, what: str) -> list[npt.ArrayLike]:
        return list(tensors)

    def all_reduce(self, tensors: Sequence[Tensor], how: Reduction, name: str) -> list[Tensor]:
        return list(tensors)

    def all_gather(self, tensor: Tensor, name: str) -> Tensor:
        return tensor

    def all_to_all(self, tensor: Tensor, splits: Tensor, name: str) -> tuple[Tensor, Tensor]:
        return tensor, splits

    def subset(self, ranks: Sequence[int]) -> "LocalComm":
        return self

    def channel(self, what: str) -> Channel:
        return virtual_world(1)[0].channel(what)

    def divide(self, part: int, key: int, what: str) -> "LocalComm":
        return self

    def mailbox(self, box: int, buffer_for: BufferFor | None = None) -> Mailbox:
        if self._table is None:
            self._table = _Table(1)
        return VirtualMailbox(0, box, self._table, buffer_for)


def virtual_world(size: int, servers: int = 0, hosts: Sequence[str] | None = None) -> list[Comm]:
    """Return the communicators of virtual ranks in this process; each is to be used by its own thread.

    Args:
        size: number of workers.
        servers: number of server ranks; their communicators come last.
        hosts: name of the host of each worker; by default, all are on one.

    Example:
        >>> (alone,) = virtual_world(1)
        >>> alone.channel("a test").exchange([7], np.zeros(3, np.uint8)).headers.tolist()
        [[7]]
    """
    table = _Table(size)
    return [VirtualComm(rank, size, table, servers, hosts) for rank in range(size + servers)]


class _Table:
    """Memory through which virtual ranks exchange values and messages."""

    def __init__(self, size: int) -> None:
        self._values: list[object] = [None] * size
        self.barrier = threading.Barrier(size)
        # Messages by rank and box.
        self.boxes: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)

    def all_gather(self, rank: int, value: T) -> list[T]:
        """Gather one value from each rank, in rank order."""
        self._values[rank] = value
        self.barrier.wait(_LIMIT_SECONDS)
        everyone = cast(list[T], list(self._values))
        self.barrier.wait(_LIMIT_SECONDS)
        return everyone


class VirtualComm(Comm):
    """Communicator of one virtual rank; see `virtual_world`."""

    def __init__(self, rank: int, size: int, table: _Table, servers: int = 0, hosts: Sequence[str] | None = None):
        self.rank, self.size = rank, size
        self.servers, self.serves = servers, rank >= size
        self.hosts = ["here"] * size if hosts is None else list(hosts)
        place = (rank, size, 0, 1) if self.serves else place_of(self.hosts, rank)
        self.local_rank, self.local_size, self.cross_rank, self.cross_size = place
        self._table = table

    def all_gather_object(self, value: T, what: str) -> list[T]:
        return self._table.all_gather(self.rank, value)

    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        return np.sum(self._table.all_gather(self.rank, np.array(vector, np.float64)), axis=0)

    def broadcast(self, tensors: Sequence[npt.ArrayLike], root: int, what: str) -> list[npt.ArrayLike]:
        return [np.array(t) for t in self._table.all_gather(self.rank, list(tensors))[root]]

    def channel(self, what: str) -> Channel:
        shared = self._table.all_gather(self.rank, _Table(self.size))[0]
        return VirtualChannel(self.rank, self.size, shared)

    def divide(self, part: int, key: int, what: str) -> "VirtualComm":
        everyone = self._table.all_gather(self.rank, (part, key, self.rank))
        ranks = [rank for other, _, rank in sorted(everyone) if other == part]
        tables = self._table.all_gather(self.rank, _Table(len(ranks)))
        here = [self.hosts[rank] for rank in ranks]
        some = VirtualComm(ranks.index(self.rank), len(ranks), tables[ranks[0]], hosts=here)
        some.parent, some.parent_ranks = self, ranks
        return some

    def mailbox(self, box: int, buffer_for: BufferFor | None = None) -> Mailbox:
        return VirtualMailbox(self.rank, box, self._table, buffer_for)


class VirtualChannel(Channel):
    """Channel between virtual ranks; see `virtual_world`."""

    def __init__(self, rank: int, size: int, table: _Table):
        self.rank, self.size, self._table = rank, size, table

    def exchange(self, header: Sequence[int], message: np.ndarray | None = None) -> Received:
        everyone = self._table.all_gather(self.rank, (list(header), None if message is None else message.copy()))
        messages = [] if message is None else [m for _, m in everyone if m is not None]
        return Received(np.array([h for h, _ in everyone], np.int64), messages, 0.0, 0.0)

    def share(self, elements: int) -> list[np.ndarray] | None:
        shared: list[np.ndarray] = self._table.all_gather(self.rank, np.zeros(elements, np.float32))
        return shared


class VirtualMailbox(Mailbox):
    """Mailbox between virtual ranks; see `virtual_world`. Bodies are copied when they are sent."""

    receiving = False

    def __init__(self, rank: int, box: int, table: _Table, buffer_for: BufferFor | None = None):
        self.rank, self._mine, self._boxes, self._buffer_for = rank, table.boxes[rank, box], table.boxes, buffer_for

    def send(self, to: int, box: int, header: Sequence[int], body: np.ndarray | None = None) -> None:
        words = (*map(int, header), *[0] * (HEADER_WORDS - len(header)))
        self._boxes[to, box].append(Message(self.rank, words, None if body is None else body.copy()))

    def fetch(self) -> Message | None:
        message = self._mine.popleft() if self._mine else None
        if message is not None and message.body is not None and self._buffer_for is not None:
            target = self._buffer_for(message.sender, message.header, message.body.size)
            if target is not None:
                target[:] = message.body
        return message

    def pending_sends(self) -> int:
        return 0
