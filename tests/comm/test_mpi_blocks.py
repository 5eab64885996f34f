"""Sums in blocks between ranks of an imitated MPI, which delivers messages late and in any order of their senders."""

from collections import defaultdict, deque

import ml_dtypes
import numpy as np
import pytest

from hvdx.comm import mpi_blocks
from hvdx.comm.mpi_blocks import BlockSum
from tests.comm.test_base import in_rank_order, vector

BLOCK = 48


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
        assert self.ahead <= mpi_blocks._AHEAD, "a rank that is ahead fills the queues of the others"
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


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("elements", [0, 1, 5, 24, 2500])
@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_blocks_have_the_bits_of_a_sum_in_rank_order(monkeypatch, size, elements, dtype):
    monkeypatch.setattr(mpi_blocks, "BLOCK_BYTES", BLOCK)
    expected = in_rank_order(size, elements, dtype, 1 / size)
    for got in summed(size, elements, dtype, 1 / size, seed=elements)[0]:
        assert got.tobytes() == expected.tobytes()


def test_ranks_send_the_bytes_of_a_ring(monkeypatch):
    monkeypatch.setattr(mpi_blocks, "BLOCK_BYTES", BLOCK)
    size, elements = 4, 2400
    for rank in range(size):
        sent = sum(count for sender, _, count in summed(size, elements)[1] if sender == rank)
        assert sent == 2 * (size - 1) * 4 * elements // size


def test_blocks_go_to_the_other_ranks_in_turn(monkeypatch):
    monkeypatch.setattr(mpi_blocks, "BLOCK_BYTES", BLOCK)
    for rank in range(4):
        targets = [to for sender, to, _ in summed(4, 2400)[1] if sender == rank]
        assert targets == [(rank + k) % 4 for k in (1, 2, 3)] * (len(targets) // 3)


def test_sum_makes_no_progress_without_the_other_ranks(monkeypatch):
    """Test that the time limit of the channel, which begins anew with each block, ends such a sum."""
    monkeypatch.setattr(mpi_blocks, "BLOCK_BYTES", BLOCK)
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
