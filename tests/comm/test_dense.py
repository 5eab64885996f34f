"""Dense sums between virtual ranks, on one host and on several."""

import ml_dtypes
import numpy as np
import pytest

from hvdx.comm import dense
from hvdx.comm.dense import DenseSums
from hvdx.comm.local import VirtualChannel
from tests.comm.test_base import in_rank_order, vector
from tests.strategies.virtual import on_hosts

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]


def total(sums, vectors, scale):
    """Return the sum of the vectors one behind the other, as a new array."""
    copies = [v.copy() for v in vectors]
    sums.add_up(copies, scale, np.ndarray.astype)
    return np.concatenate(copies)


def totals(hosts, sizes, dtype=np.float32, scale=1.0):
    """Return the sums of each rank, for vectors of several sizes one after another, each of three parts."""

    def run(comm):
        sums = DenseSums(comm)
        found = []
        for size in sizes:
            mine = vector(comm.rank, size, dtype)
            found.append(total(sums, np.split(mine, [size // 3, size // 2]), scale))
        return found

    return on_hosts(hosts, run)


def by_hosts(hosts, size, dtype, scale):
    """Return the sum of the sums of the hosts, as a single process computes it."""
    wide = np.promote_types(dtype, np.float32)
    sums = []
    for host in dict.fromkeys(hosts):
        total = sum(vector(r, size, dtype).astype(wide) for r in range(len(hosts)) if hosts[r] == host)
        sums.append((total * scale).astype(dtype).astype(wide))
    return sum(sums).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hosts", ["a", "ab", "aa", "aaa", "aab", "abcd"])
def test_sum_is_in_rank_order_on_one_host_and_between_single_ranks(hosts, dtype):
    # Memory grows for a larger vector, and is used again for a smaller one.
    sizes = [0, 1, 5, 200_003, 7, 0]
    for found in totals(hosts, sizes, dtype, 0.3):
        for size, got in zip(sizes, found, strict=True):
            expected = in_rank_order(len(hosts), size, dtype, 0.3)
            assert got.dtype == expected.dtype
            assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaabbb"])
def test_sum_is_that_of_the_hosts_sums(hosts, dtype):
    for found in totals(hosts, [1001, 3], dtype, 0.25):
        for size, got in zip([1001, 3], found, strict=True):
            assert got.tobytes() == by_hosts(hosts, size, dtype, 0.25).tobytes()


def test_mean_of_large_float16_does_not_overflow_within_a_host():
    def run(comm):
        return total(DenseSums(comm), [np.full(3, 6e4, np.float16)], 0.25)

    for got in on_hosts("aabb", run):
        np.testing.assert_array_equal(got, np.full(3, 6e4, np.float16))


def test_link_of_a_host_carries_one_vector(monkeypatch):
    """Test that the ranks of a host send their pieces of its sum, not their vectors."""
    sent = []
    plain = VirtualChannel.scatter_pieces

    def count(channel, vector, bounds):
        sent.append(vector.nbytes - 4 * int(bounds[channel.rank + 1] - bounds[channel.rank]))
        return plain(channel, vector, bounds)

    monkeypatch.setattr(VirtualChannel, "scatter_pieces", count)
    totals("aaaabbbb", [1 << 16])
    assert sum(sent) == 2 * (4 << 16) // 2


def test_sums_replace_the_vectors_and_are_not_those_of_the_next_sum():
    def run(comm):
        sums = DenseSums(comm)
        mine = vector(comm.rank, 1000)
        sums.add_up([mine], 1.0, np.ndarray.astype)
        kept = mine.copy()
        sums.add_up([np.zeros(1000, np.float32)], 1.0, np.ndarray.astype)
        return mine, kept

    for mine, kept in on_hosts("aa", run):
        np.testing.assert_array_equal(mine, kept)
        np.testing.assert_array_equal(mine, in_rank_order(2, 1000, np.float32))


@pytest.mark.parametrize("hosts", ["aaa", "ab", "aabb"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("chunk", [7, 1 << 16])
def test_sums_in_many_blocks_need_memory_for_a_few(monkeypatch, hosts, dtype, chunk):
    """Blocks that begin and end within vectors, use each slot several times, and whose own pieces stay, or do not."""
    for name, value in {"_HOST_BLOCK": 1000, "_LINK_BLOCK": 1000, "_CHUNK": chunk}.items():
        monkeypatch.setattr(dense, name, value)

    def run(comm):
        sums, mine = DenseSums(comm), vector(comm.rank, 5003, dtype)
        found = [total(sums, np.split(mine, [3, 1700, 1701]), 0.25) for _ in range(3)]
        assert max([sums._flat.nbytes, *(array.nbytes for array in sums._shared)]) <= 3 * 1000
        return found

    for found in on_hosts(hosts, run):
        expected = (
            by_hosts(hosts, 5003, dtype, 0.25) if hosts == "aabb" else in_rank_order(len(hosts), 5003, dtype, 0.25)
        )
        assert all(got.tobytes() == expected.tobytes() for got in found)


@pytest.mark.parametrize("hosts", ["aaa", "aabb"])
def test_ranks_that_cannot_share_memory_send_messages(monkeypatch, hosts):
    plain, failing = VirtualChannel.share, {}

    def share(channel, elements):
        """Return None on the first host that asks."""
        found = plain(channel, elements)
        return None if failing.setdefault("host", channel._table) is channel._table else found

    monkeypatch.setattr(VirtualChannel, "share", share)
    for (got,) in totals(hosts, [1001]):
        assert got.tobytes() == in_rank_order(len(hosts), 1001, np.float32).tobytes()
