"""Dense sums over the ranks: in memory that the ranks of a host share, and in blocks over MPI between hosts.

On one host, each rank copies a block of its vectors to memory that all can read, adds up one piece of the blocks of
all, and copies the sum of the block back. If there are several hosts with the same number of ranks, the ranks with the
same piece, one on each host, add up the sums of their hosts in between, so that a host's link carries one vector. The
sums replace the vectors. The buffers hold a few blocks, whatever the size of the model.

Over MPI, every rank sums one piece of the vector. In turn it sends a block of a piece to each other rank, then a block
of its own sum to each, and so on. All ranks follow one schedule: the k-th block of a round goes to the rank k places
further and comes from the rank k places before, so no link has to carry the blocks of several ranks at once. A ring has
this property too, but it would add each element in another order, and round partial sums to the dtype on the network.
"""

import functools
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hvdx.comm.interfaces import Cast, Channel, Comm, add_in_order
from hvdx.comm.mesh import divide_by_host

# Elements that are summed at a time: few stay in the level-2 cache; a cast of TensorFlow takes 50 us whatever its size.
_CHUNK, _CAST_CHUNK = 1 << 16, 1 << 20
# Bytes of a block within a host, and of one that goes to other hosts, where the first and the last of its messages wait
# for each other. Between cores without a common cache, larger blocks within a host would be faster, since a store to a
# line that the other core holds waits for it: 900 MB of 2 ranks took 0.17 or 0.34 s, by where the cores were, and 0.22
# or 0.18 s in blocks of 16 MiB. These are 100 MB of shared memory.
_HOST_BLOCK, _LINK_BLOCK = 1 << 22, 1 << 25
# Bytes of a vector that is sent alone: a sum of its own takes a millisecond longer, and two copies of it are saved.
_APART = 1 << 22
# Between two meetings of the ranks, a block is written, the one before it added up, the one before that copied back.
_SLOTS = 3
#: Bytes of a block over MPI, a multiple of all item sizes. Open MPI sends up to 64 KiB over TCP, its header included,
#: without asking the receiver before. With blocks of 240 kB, four hosts took 1.1 times as long at 100 Mbit/s.
BLOCK_BYTES = 60_000
# Number of blocks over MPI by which a rank may have sent more than it has received, so that a rank that is ahead does
# not fill the queues of the others' links. With 8, eight hosts took 1.06 times as long at 100 Mbit/s.
_AHEAD = 16
# Tag of the messages. MPI keeps the order of those from one rank to another, so all can have the same.
_TAG = 8


def staging_bytes(size: int, here: int, leaves_host: bool) -> int:
    """Return the most bytes that a sum needs beside the vectors, in the memory of a rank or shared with it.

    Args:
        size: bytes of the vectors.
        here: number of ranks of a host.
        leaves_host: whether there are several hosts.

    Example:
        >>> staging_bytes(10**9, 2, False)
        25165824
    """
    block = min(size, _LINK_BLOCK if leaves_host else _HOST_BLOCK)
    return _SLOTS * here * block if here > 1 else block


class DenseSums:
    """Sums of vectors over the ranks of a communicator. Creating it is collective.

    Elements are added in rank order, within each host first and then in the order of the hosts, in float32, or in
    float64 if that is their dtype. With several ranks on each of several hosts, the sum of a host is rounded to the
    dtype of the vectors.

    Args:
        comm: communicator on the host, with channels.

    Example:
        >>> from hvdx.comm.local import virtual_world
        >>> sums = DenseSums(virtual_world(1)[0])
        >>> vectors = [np.ones(2, np.float32), np.zeros(1, np.float32)]
        >>> sums.add_up(vectors, 0.5, np.ndarray.astype)
        >>> vectors
        [array([0.5, 0.5], dtype=float32), array([0.], dtype=float32)]
    """

    def __init__(self, comm: Comm):
        self._comm, self.everyone = comm, comm.channel("the all-reduce")
        self._local, self._between = _channels(comm, self.everyone)
        # In one order on all ranks, without repetitions.
        self._open = list(dict.fromkeys(c for c in (self.everyone, self._local, self._between) if c is not None))
        self._block = _HOST_BLOCK if self._local is self.everyone else _LINK_BLOCK
        self._flat = np.empty(0, np.uint8)
        # By rank of the host: `_SLOTS` blocks, of so many bytes each; and the slot of the next block.
        self._shared: list[np.ndarray] = []
        self._capacity = self._turn = 0

    def add_up(self, arrays: Sequence[np.ndarray], scale: float, cast: Cast) -> None:
        """Replace some arrays of one dtype by their sums over the ranks. Collective.

        Args:
            arrays: contiguous floats of any shapes, of the same sizes and dtype on all ranks, in memory of their own.
            scale: factor on the sum.
            cast: see `Channel.sum_in_order`.

        Raises:
            ExchangeError: if ranks do not join within the time limit.
        """
        vectors = [array.reshape(-1) for array in arrays]
        sizes, itemsize = tuple(map(np.size, vectors)), vectors[0].itemsize
        needed = min(sum(sizes) * itemsize, self._block)
        if self._local is not None and needed > self._capacity:
            self._share(needed)
        if self._local is not None:
            blocks = _blocks(sizes, self._block // itemsize)
            self._add_up_in_memory(self._local, [self._staged(vectors, block) for block in blocks], scale, cast)
            return
        for block in _blocks(sizes, self._block // itemsize, _APART // itemsize):
            parts = [vectors[i][low:high] for i, low, high in block]
            flat = parts[0] if len(parts) == 1 else self._joined(parts)
            self.everyone.sum_in_order(flat, scale, cast)
            if len(parts) > 1:
                _divide(flat, parts)

    def close(self) -> None:
        """Free the channels. Collective."""
        for channel in self._open:
            channel.close()

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the parts one behind the other, in memory that is used again."""
        size, dtype = sum(part.size for part in parts), parts[0].dtype
        if self._flat.size < size * dtype.itemsize:
            self._flat = np.empty(size * dtype.itemsize, np.uint8)
        return np.concatenate(parts, out=self._flat[: size * dtype.itemsize].view(dtype))

    def _share(self, capacity: int) -> None:
        """Allocate shared memory for blocks of up to `capacity` bytes; if a host cannot, use messages from now on."""
        assert self._local is not None
        # Blocks begin at a border of 8 bytes.
        self._capacity = -(-capacity // 8) * 8
        shared = self._local.share(_SLOTS * self._capacity // 4)
        self._shared = [array.view(np.uint8) for array in shared or []]
        if self._comm.any_true(shared is None):
            self._local, self._shared = None, []

    def _add_up_in_memory(self, local: Channel, blocks: "Sequence[_Staged]", scale: float, cast: Cast) -> None:
        # Between two meetings no rank reads what another one writes: there the blocks have three different slots. After
        # the last meeting the ranks only read; the slot is written again after two more, by this sum or the next.
        for stage in range(len(blocks) + 2):
            if stage < len(blocks):
                blocks[stage].write()
            if 1 <= stage <= len(blocks):
                blocks[stage - 1].add_up(scale, cast, self._between)
            if stage >= 2:
                blocks[stage - 2].read()
            if stage <= len(blocks):
                local.exchange([])

    def _staged(self, vectors: Sequence[np.ndarray], block: "Block") -> "_Staged":
        """Return a block in the next slot."""
        assert self._local is not None
        dtype, begin = vectors[0].dtype, self._turn % _SLOTS * self._capacity
        self._turn += 1
        size = sum([high - low for _, low, high in block])
        slots = [array[begin : begin + size * dtype.itemsize].view(dtype) for array in self._shared]
        return _Staged(vectors, block, slots, self._local.rank)


class _Staged:
    """A block of vectors of this rank, and the memory for the same block of each rank of the host.

    Of a rank's own piece, the others read nothing but the sum: unless it has small parts, its addend stays where it
    is.

    Args:
        vectors: vectors of one dtype.
        block: which of their elements.
        slots: memory of each rank, of the block's size; the first takes the sum.
        rank: number of this rank on its host.

    Example:
        >>> vectors, slots = [np.ones(4)], [np.zeros(4), np.full(4, 2.0)]
        >>> block = _Staged(vectors, [(0, 0, 4)], slots, 0)
        >>> block.write()
        >>> block.add_up(1.0, np.ndarray.astype, None)
        >>> vectors, slots[0]
        ([array([3., 3., 1., 1.])], array([3., 3., 1., 1.]))
    """

    def __init__(self, vectors: Sequence[np.ndarray], block: "Block", slots: Sequence[np.ndarray], rank: int):
        self._slots, self._rank, size = slots, rank, slots[0].size
        self._begin, self._end = rank * size // len(slots), (rank + 1) * size // len(slots)
        self._before = _within(vectors, block, 0, self._begin)
        self._own = _within(vectors, block, self._begin, self._end)
        self._after = _within(vectors, block, self._end, size)
        self._stays = self._end - self._begin >= len(self._own) * _CHUNK

    def write(self) -> None:
        """Copy what the other ranks add up to memory that they can read."""
        mine = self._slots[self._rank]
        _join(self._before, mine[: self._begin])
        _join(self._after, mine[self._end :])
        if not self._stays:
            _join(self._own, mine[self._begin : self._end])

    def add_up(self, scale: float, cast: Cast, between: Channel | None) -> None:
        """Add up this rank's piece, over the hosts too if there is a channel between them."""
        total = self._slots[0]
        chunk = _CHUNK if total.itemsize >= 4 else _CAST_CHUNK
        begin = self._begin
        for part in self._own if self._stays else [total[self._begin : self._end]]:
            for low in range(0, part.size, chunk):
                size = min(chunk, part.size - low)
                addends = [slot[begin : begin + size] for slot in self._slots]
                if self._stays:
                    addends[self._rank] = part[low : low + size]
                add_in_order(addends, total[begin : begin + size], scale, cast)
                begin += size
        if between is not None:
            between.sum_in_order(total[self._begin : self._end], 1.0, cast)
        # Here, since it is in the cache now.
        _divide(total[self._begin : self._end], self._own)

    def read(self) -> None:
        """Copy the sums of the other ranks into the vectors."""
        _divide(self._slots[0][: self._begin], self._before)
        _divide(self._slots[0][self._end :], self._after)


#: Elements of a block: number of a vector, and the first and the last element there, plus one.
Block = list[tuple[int, int, int]]


@functools.lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], limit: int, apart: int = 0) -> list[Block]:
    """Divide vectors, one behind the other, into blocks of up to `limit` elements.

    Args:
        sizes: number of elements of each vector.
        limit: number of elements of a block.
        apart: number of elements from which a vector shares no block with others; 0 for none.

    Example:
        >>> _blocks((3, 4), 5)
        [[(0, 0, 3), (1, 0, 2)], [(1, 2, 4)]]
    """
    blocks: list[Block] = []
    room = 0
    for index, size in enumerate(sizes):
        low, alone = 0, 0 < apart <= size
        room = 0 if alone else room
        while low < size:
            if not room:
                blocks.append([])
                room = limit
            high = min(low + room, size)
            blocks[-1].append((index, low, high))
            room -= high - low
            low = high
        room = 0 if alone else room
    return blocks


def _within(vectors: Sequence[np.ndarray], block: Block, begin: int, end: int) -> list[np.ndarray]:
    """Return the parts of vectors that are in a block, from one of its elements up to another.

    Example:
        >>> _within([np.arange(9), np.arange(3)], [(0, 5, 9), (1, 0, 3)], 1, 6)
        [array([6, 7, 8]), array([0, 1])]
    """
    found, offset = [], 0
    for index, low, high in block:
        first, last = max(low, low + begin - offset), min(high, low + end - offset)
        if first < last:
            found.append(vectors[index][first:last])
        offset += high - low
    return found


def _join(parts: Sequence[np.ndarray], flat: np.ndarray) -> None:
    """Copy the parts one behind the other."""
    if parts:
        np.concatenate(parts, out=flat)


def _divide(flat: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    """Copy a vector into its parts."""
    begin = 0
    for part in parts:
        part[:] = flat[begin : begin + part.size]
        begin += part.size


def _channels(comm: Comm, everyone: Channel) -> tuple[Channel | None, Channel | None]:
    """Open the channels within a host and between hosts; None if sums have no such part."""
    hosts = list(dict.fromkeys(comm.hosts))
    counts = {list(comm.hosts).count(host) for host in hosts}
    if counts == {1} or len(counts) > 1:
        return None, None
    if len(hosts) == 1:
        return everyone, None
    local, between = divide_by_host(comm)
    return local.channel("the all-reduce within a host"), between.channel("the all-reduce between hosts")


class Request(Protocol):
    """Message of MPI in flight, `MPI.Request`."""

    def Test(self) -> bool: ...  # noqa: N802


class Peers(Protocol):
    """Communicator of MPI as `BlockSum` uses it, `MPI.Comm`."""

    def Get_rank(self) -> int: ...  # noqa: N802

    def Get_size(self) -> int: ...  # noqa: N802

    def Isend(self, buf: np.ndarray, dest: int, tag: int, /) -> Request: ...  # noqa: N802

    def Irecv(self, buf: np.ndarray, source: int, tag: int, /) -> Request: ...  # noqa: N802


class BlockSum:
    """Sum of one vector over MPI, in progress.

    Args:
        comm: communicator of the ranks, at least two; it carries no other messages with this tag.
        vector, scale, cast: see `Channel.sum_in_order`.
    """

    def __init__(self, comm: Peers, vector: np.ndarray, scale: float, cast: Cast):
        self._comm, self._scale, self._cast, self._dtype = comm, scale, cast, vector.dtype
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._others = others = self._size - 1
        ends = (np.arange(1, self._size) * vector.size // self._size * vector.itemsize).tolist()
        # The pieces: addends, which become sums.
        self._pieces = np.split(vector.view(np.uint8), ends)
        count = -(-max(piece.size for piece in self._pieces) // BLOCK_BYTES)
        # So many rounds pass from the addends of a block to its sum that no rank waits for the sum.
        lag = -(-_AHEAD // (2 * others))
        # Each round has one block for each other rank: addends (True) or sums, and the number of the block.
        addends, sums = ([(kind, block) for block in range(count)] for kind in (True, False))
        self._rounds = addends[:lag]
        for pair in zip(addends[lag:], sums, strict=False):
            self._rounds += pair
        self._rounds += sums[max(count - lag, 0) :]
        # Number of the round in which the addends of a block are sent.
        self._given = {block: number for number, (addends, block) in enumerate(self._rounds) if addends}
        # Addends of blocks whose sum is not ready: those that may arrive before others of their block, or before their
        # turn to be summed.
        self._arriving = np.empty((2 + (_AHEAD + others) // others, self._size, BLOCK_BYTES), np.uint8)
        self._total, self._sent, self._posted, self._received, self._summed = others * len(self._rounds), 0, 0, 0, 0
        self._sending: deque[Request] = deque()
        self._receiving: deque[Request] = deque()

    @property
    def done(self) -> bool:
        """True after the last block was sent and received."""
        return self._received == self._total == self._sent and not self._sending

    def advance(self) -> bool:
        """Receive, sum and send what is possible without waiting; return whether there was progress."""
        before = self._received, self._sent, len(self._sending)
        while self._receiving and self._receiving[0].Test():
            self._receiving.popleft()
            self._received += 1
            self._sum_if_complete()
        while self._sending and self._sending[0].Test():
            self._sending.popleft()
        # A block finds its place in memory if its receive is posted before it arrives.
        while self._posted < min(self._received + _AHEAD + self._others, self._total) and self._is_free(self._posted):
            self._receiving.append(self._comm.Irecv(*self._incoming(self._posted), _TAG))
            self._posted += 1
        while self._sent < min(self._received + _AHEAD, self._total) and self._is_ready(self._sent):
            self._sending.append(self._comm.Isend(*self._outgoing(self._sent), _TAG))
            self._sent += 1
        return before != (self._received, self._sent, len(self._sending))

    def _find(self, message: int) -> tuple[bool, slice, int, int]:
        """Return whether a message of the schedule holds addends, its bytes in a piece, its block, and its k."""
        number, k = divmod(message, self._others)
        addends, block = self._rounds[number]
        return addends, slice(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES), block, k + 1

    def _outgoing(self, message: int) -> tuple[np.ndarray, int]:
        """Return the content of a message, uint8[bytes], and the rank to which it goes."""
        addends, part, _, k = self._find(message)
        to = (self._rank + k) % self._size
        return self._pieces[to if addends else self._rank][part], to

    def _incoming(self, message: int) -> tuple[np.ndarray, int]:
        """Return the buffer of a message, uint8[bytes], and the rank from which it comes."""
        addends, part, block, k = self._find(message)
        sender = (self._rank - k) % self._size
        return (self._slot(block)[sender] if addends else self._pieces[sender][part]), sender

    def _slot(self, block: int) -> np.ndarray:
        """Return the buffer for the addends of all ranks to one block of this rank's piece, uint8[size, bytes]."""
        mine = min(self._pieces[self._rank].size - block * BLOCK_BYTES, BLOCK_BYTES)
        return self._arriving[block % len(self._arriving), :, : max(mine, 0)]

    def _is_ready(self, message: int) -> bool:
        addends, _, block, _ = self._find(message)
        return addends or block < self._summed

    def _is_free(self, message: int) -> bool:
        """Return whether a message may be received: a sum takes the place of an addend, which must have been sent."""
        addends, _, block, k = self._find(message)
        # What comes from the rank k places before goes to the one `size - k` places further.
        return addends or self._sent - len(self._sending) > self._given[block] * self._others + self._others - k

    def _sum_if_complete(self) -> None:
        """Sum a block of this rank's piece if the last message that arrived completes its addends."""
        addends, part, block, k = self._find(self._received - 1)
        if not addends or k < self._others:
            return
        slot = self._slot(block)
        mine = self._pieces[self._rank][part]
        slot[self._rank] = mine
        add_in_order(list(slot.view(self._dtype)), mine.view(self._dtype), self._scale, self._cast)
        self._summed += 1
