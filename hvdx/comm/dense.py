"""Dense sums over the ranks: in memory that the ranks of a host share, and in blocks between hosts.

On one host, each rank copies a block of its vectors to memory that all can read, adds up one piece of the blocks of
all, and copies the sum of the block back. If there are several hosts with the same number of ranks, the ranks with the
same piece, one on each host, add up the sums of their hosts in between, so that a host's link carries one vector. The
sums replace the vectors. The buffers hold a few blocks, whatever the size of the model.
"""

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from hvdx.comm.base import Cast, Channel, Comm, add_in_order

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

    Attributes:
        everyone: channel of all ranks.

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
        sizes, itemsize = tuple(v.size for v in vectors), vectors[0].itemsize
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
        size = sum(high - low for _, low, high in block)
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
        self._begin, self._end = (position * size // len(slots) for position in (rank, rank + 1))
        borders = (0, self._begin, self._end, size)
        self._before, self._own, self._after = (
            [vectors[i][low:high] for i, low, high in _within(block, *pair)] for pair in itertools.pairwise(borders)
        )
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


def _within(block: Block, begin: int, end: int) -> Block:
    """Return the parts of a block from one of its elements up to another.

    Example:
        >>> _within([(0, 5, 9), (1, 0, 3)], 1, 6)
        [(0, 6, 9), (1, 0, 2)]
    """
    found, offset = [], 0
    for index, low, high in block:
        first, last = max(low, low + begin - offset), min(high, low + end - offset)
        if first < last:
            found.append((index, first, last))
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
    host = hosts.index(comm.hosts[comm.rank])
    position = list(comm.hosts[: comm.rank]).count(hosts[host])
    local = comm.divide(host, position, "the ranks of a host")
    between = comm.divide(position, host, "the hosts")
    return local.channel("the all-reduce within a host"), between.channel("the all-reduce between hosts")
