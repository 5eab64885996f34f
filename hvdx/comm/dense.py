"""Dense sums over the ranks: in memory that the ranks of a host share, and in blocks between hosts.

On one host, each rank copies a block of its vectors to memory that all can read, adds up one piece of the blocks of
all, and copies the sum of the block back. If there are several hosts with the same number of ranks, the ranks with the
same piece, one on each host, add up the sums of their hosts in between, so that a host's link carries one vector. The
sums replace the vectors. The buffers hold a few blocks, whatever the size of the model.
"""

import functools
from collections.abc import Sequence

import numpy as np

from hvdx.comm.base import Cast, Channel, Comm, add_in_order

# Elements that are summed at a time: few stay in the level-2 cache; a cast of TensorFlow takes 50 us whatever its size.
_CHUNK, _CAST_CHUNK = 1 << 16, 1 << 20
# Bytes of a block within a host, and of one that goes to other hosts, where the first and the last of its messages wait
# for each other.
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

    def add_up(self, vectors: Sequence[np.ndarray], scale: float, cast: Cast) -> None:
        """Replace some vectors of one dtype by their sums over the ranks. Collective.

        Args:
            vectors: contiguous floats[any], of the same sizes and dtype on all ranks, in memory of their own.
            scale: factor on the sum.
            cast: see `Channel.sum_in_order`.

        Raises:
            ExchangeError: if ranks do not join within the time limit.
        """
        sizes, itemsize = tuple(v.size for v in vectors), vectors[0].itemsize
        needed = min(sum(sizes) * itemsize, self._block)
        if self._local is not None and needed > self._capacity:
            self._share(needed)
        if self._local is not None:
            self._add_up_in_memory(self._local, vectors, _blocks(sizes, self._block // itemsize), scale, cast)
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

    def _add_up_in_memory(
        self,
        local: Channel,
        vectors: Sequence[np.ndarray],
        blocks: "Sequence[Block]",
        scale: float,
        cast: Cast,
    ) -> None:
        slots = [self._slots(vectors, block, self._turn + k) for k, block in enumerate(blocks)]
        self._turn += len(blocks)
        # Between two meetings no rank reads what another one writes: there the blocks have three different slots. After
        # the last meeting the ranks only read; the slot is written again after two more, by this sum or the next.
        for stage in range(len(blocks) + 2):
            if stage < len(blocks):
                np.concatenate([vectors[i][low:high] for i, low, high in blocks[stage]], out=slots[stage][local.rank])
            if 1 <= stage <= len(blocks):
                self._add_piece(local, slots[stage - 1], scale, cast)
            if stage >= 2:
                _divide(slots[stage - 2][0], [vectors[i][low:high] for i, low, high in blocks[stage - 2]])
            if stage <= len(blocks):
                local.exchange([])

    def _slots(self, vectors: Sequence[np.ndarray], block: "Block", turn: int) -> list[np.ndarray]:
        """Return the memory of a block, by rank of the host."""
        dtype, begin = vectors[0].dtype, turn % _SLOTS * self._capacity
        end = begin + sum(high - low for _, low, high in block) * dtype.itemsize
        return [array[begin:end].view(dtype) for array in self._shared]

    def _add_piece(self, local: Channel, addends: Sequence[np.ndarray], scale: float, cast: Cast) -> None:
        """Add up this rank's piece of a block, where the first rank's addend was."""
        size, total = addends[0].size, addends[0]
        begin, end = (position * size // local.size for position in (local.rank, local.rank + 1))
        chunk = _CHUNK if total.itemsize >= 4 else _CAST_CHUNK
        for low in range(begin, end, chunk):
            part = slice(low, min(low + chunk, end))
            add_in_order([addend[part] for addend in addends], total[part], scale, cast)
        if self._between is not None:
            self._between.sum_in_order(total[begin:end], 1.0, cast)


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
