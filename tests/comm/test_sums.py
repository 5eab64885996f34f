"""Dense sums between virtual ranks, on one host and on several, and in blocks over an imitated MPI.

The imitated MPI delivers messages late and in any order of their senders.
"""

from collections import defaultdict, deque

import ml_dtypes
import numpy as np
import pytest

from hvdx.comm import sums as sums_module
from hvdx.comm.local import VirtualChannel
from hvdx.comm.sums import BlockSum, DenseSums
from tests.comm.test_interfaces import in_rank_order, vector
from tests.strategies.virtual import on_hosts

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]
BLOCK = 48


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
        monkeypatch.setattr(sums_module, name, value)

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


class Network:
    """Messages that were sent and not yet received, by sender and receiver; a message arrives after some polls."""

    def __init__(self, size, seed=0):
        self.sent, self.posted = defaultdict(deque), defaultdict(deque)
        self.random, self.log = np.random.default_rng(seed), []
        self.comms = [Comm(self, rank, size) for rank in range(size)]

    def deliver(self, sender, receiver):
        """Copy messages to posted buffers, at times before the receiver asks for them."""
        sent, posted = self.sent[sender, receiver], self.posted[sender, receiver]
        while sent and posted and self.random.random() < 0.7:
            data, given = sent.popleft()
            assert data.size == posted[0].size
            assert np.array_equal(data, given), "a rank wrote to a message before it was sent"
            posted.popleft()[:] = data


class Comm:
    def __init__(self, network, rank, size):
        self._network, self._rank, self._size, self.ahead = network, rank, size, 0
        self._sending = []

    def Get_rank(self):  # noqa: N802
        return self._rank

    def Get_size(self):  # noqa: N802
        return self._size

    def Isend(self, data, to, tag):  # noqa: N802
        self._network.log.append((self._rank, to, data.size))
        self.ahead += 1
        assert self.ahead <= sums_module._AHEAD, "a rank that is ahead fills the queues of the others"
        # MPI copies a message, or reads it when the receiver is ready.
        message = (data.copy() if self._network.random.random() < 0.5 else data), data.copy()
        self._network.sent[self._rank, to].append(message)
        self._network.deliver(self._rank, to)
        self._sending.append(data)

        def gone():
            if message[0] is data and any(m is message for m in self._network.sent[self._rank, to]):
                return False
            self._sending = [other for other in self._sending if other is not data]
            return True

        return Request(self._network, gone)

    def Irecv(self, buffer, sender, tag):  # noqa: N802
        assert not any(np.shares_memory(buffer, data) for data in self._sending), "a message that is being sent"
        self._network.posted[sender, self._rank].append(buffer)
        self._network.deliver(sender, self._rank)

        def arrived():
            self._network.deliver(sender, self._rank)
            if any(buffer is other for other in self._network.posted[sender, self._rank]):
                return False
            self.ahead -= 1
            return True

        return Request(self._network, arrived)


class Request:
    def __init__(self, network, done):
        self._network, self._done = network, done

    def Test(self):  # noqa: N802
        return self._network.random.random() < 0.4 and self._done()


def summed(size, elements, dtype=np.float32, scale=1.0, cast=np.ndarray.astype, seed=0):
    """Return the sum on each rank, and the messages as (sender, receiver, bytes)."""
    network = Network(size, seed)
    outs = [vector(r, elements, dtype) for r in range(size)]
    sums = [BlockSum(network.comms[r], outs[r], scale, cast) for r in range(size)]
    for _ in range(100_000):
        if all(each.done for each in sums):
            break
        # Some ranks are slower than others.
        for rank in network.random.integers(size, size=size):
            sums[rank].advance()
    assert all(each.done for each in sums)
    assert not any(network.sent.values())
    return outs, network.log


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [0, 1, 5, 24, 2500])
@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_blocks_have_the_bits_of_a_sum_in_rank_order(monkeypatch, size, elements, dtype):
    monkeypatch.setattr(sums_module, "BLOCK_BYTES", BLOCK)
    expected = in_rank_order(size, elements, dtype, 1 / size)
    for got in summed(size, elements, dtype, 1 / size, seed=elements)[0]:
        assert got.tobytes() == expected.tobytes()


def test_ranks_send_the_bytes_of_a_ring(monkeypatch):
    monkeypatch.setattr(sums_module, "BLOCK_BYTES", BLOCK)
    size, elements = 4, 2400
    for rank in range(size):
        sent = sum(count for sender, _, count in summed(size, elements)[1] if sender == rank)
        assert sent == 2 * (size - 1) * 4 * elements // size


def test_blocks_go_to_the_other_ranks_in_turn(monkeypatch):
    monkeypatch.setattr(sums_module, "BLOCK_BYTES", BLOCK)
    for rank in range(4):
        targets = [to for sender, to, _ in summed(4, 2400)[1] if sender == rank]
        assert targets == [(rank + k) % 4 for k in (1, 2, 3)] * (len(targets) // 3)


def test_sum_makes_no_progress_without_the_other_ranks(monkeypatch):
    """Test that the time limit of the channel, which begins anew with each block, ends such a sum."""
    monkeypatch.setattr(sums_module, "BLOCK_BYTES", BLOCK)
    network = Network(3)
    alone = BlockSum(network.comms[0], vector(0, 10_000), 1.0, np.ndarray.astype)
    moved = [alone.advance() for _ in range(1000)]
    assert moved[0]
    assert not any(moved[500:])
    assert not alone.done


def test_nan_and_overflow_pass():
    network = Network(2)
    outs = [np.array([6e4, 1, np.nan], np.float16), np.array([6e4, 1, 1], np.float16)]
    sums = [BlockSum(network.comms[r], outs[r], 1.0, np.ndarray.astype) for r in range(2)]
    while not all(each.done for each in sums):
        [each.advance() for each in sums]
    for out in outs:
        np.testing.assert_array_equal(out, np.array([np.inf, 2, np.nan], np.float16))
