"""Dense sums over the ranks: in memory that the ranks of a host share, and in blocks between hosts.

On one host, each rank copies its vector to memory that all can read, adds up one piece of the vectors of all, and
copies the pieces of the others' sums. If there are several hosts with the same number of ranks, the ranks with the same
piece, one on each host, then add up the sums of their hosts, so that a host's link carries one vector.
"""

from collections.abc import Sequence

import numpy as np

from hvdx.comm.alignment import aligned
from hvdx.comm.base import Cast, Channel, Comm, add_in_order

# Elements that are summed at a time: few stay in the level-2 cache; a cast of TensorFlow takes 50 us whatever its size.
_CHUNK, _CAST_CHUNK = 1 << 16, 1 << 20


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
        >>> sums.total([np.ones(2, np.float32), np.zeros(1, np.float32)], 0.5, np.ndarray.astype)
        array([0.5, 0.5, 0. ], dtype=float32)
    """

    def __init__(self, comm: Comm):
        self._comm, self.everyone = comm, comm.channel("the all-reduce")
        self._flat = np.empty(0, np.uint8)
        self._local, self._between = _channels(comm, self.everyone)
        # In one order on all ranks, without repetitions.
        self._open = list(dict.fromkeys(c for c in (self.everyone, self._local, self._between) if c is not None))
        self._capacity = 0
        # By rank of the host: its vector, and behind it its piece of the sum.
        self._shared: list[np.ndarray] = []

    def total(self, vectors: Sequence[np.ndarray], scale: float, cast: Cast) -> np.ndarray:
        """Return the sum over the ranks of some vectors of one dtype, one behind the other, as a new array. Collective.

        Args:
            vectors: contiguous floats[any], of the same sizes and dtype on all ranks.
            scale: factor on the sum.
            cast: see `Channel.sum_in_order`.

        Raises:
            ExchangeError: if ranks do not join within the time limit.
        """
        size, dtype = sum(v.size for v in vectors), vectors[0].dtype
        if self._local is not None and (not self._shared or size * dtype.itemsize > self._capacity):
            self._share(size * dtype.itemsize)
        if self._local is not None:
            return self._total_of_host(self._local, vectors, size, scale, cast)
        if self._flat.size < size * dtype.itemsize:
            self._flat = np.empty(size * dtype.itemsize, np.uint8)
        flat = self._flat[: size * dtype.itemsize].view(dtype)
        np.concatenate(vectors, out=flat)
        return self.everyone.sum_in_order(flat, scale, cast)

    def close(self) -> None:
        """Free the channels. Collective."""
        for channel in self._open:
            channel.close()

    def _share(self, capacity: int) -> None:
        """Allocate shared memory for vectors of up to `capacity` bytes; if a host cannot, use messages from now on."""
        local = self._local
        assert local is not None
        self._capacity = capacity
        # A vector up to a border of 8 bytes, and a piece, which may have an element of 8 bytes more than others.
        shared = local.share(-(-capacity // 4) + -(-capacity // (4 * local.size)) + 4)
        self._shared = [array.view(np.uint8) for array in shared or []]
        if self._comm.any_true(shared is None):
            self._local, self._shared = None, []

    def _total_of_host(
        self, local: Channel, vectors: Sequence[np.ndarray], size: int, scale: float, cast: Cast
    ) -> np.ndarray:
        dtype = vectors[0].dtype
        addends = [array[: size * dtype.itemsize].view(dtype) for array in self._shared]
        bounds = (np.arange(local.size + 1) * size // local.size).tolist()
        lengths = np.diff(bounds).tolist()
        behind = -(-self._capacity // 8) * 8
        pieces = [
            array[behind : behind + length * dtype.itemsize].view(dtype)
            for array, length in zip(self._shared, lengths, strict=True)
        ]
        np.concatenate(vectors, out=addends[local.rank])
        local.exchange([])
        begin, end, mine = bounds[local.rank], bounds[local.rank + 1], pieces[local.rank]
        chunk = _CHUNK if dtype.itemsize >= 4 else _CAST_CHUNK
        for low in range(begin, end, chunk):
            part = slice(low, min(low + chunk, end))
            add_in_order([addend[part] for addend in addends], mine[low - begin :][:chunk], scale, cast)
        if self._between is not None:
            mine[:] = self._between.sum_in_order(mine, 1.0, cast)
        # After this exchange all pieces are there, and nobody reads an addend any more. A piece is not written before
        # the first exchange of the next sum, which all ranks join after they have copied it.
        local.exchange([])
        return np.concatenate(pieces, out=aligned(size, dtype))


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
