"""Sums of a host's ranks in shared memory, and by messages."""

import time

import numpy as np
import pytest

from hvdx.comm.local import VirtualChannel
from hvdx.strategies import Threshold
from hvdx.strategies.threshold import hosts, shards
from hvdx.strategies.threshold.hosts import MessageSums, SharedSums, open_sums
from tests.strategies.threshold.test_strategy import OPTIONS, flat, steps_of
from tests.strategies.virtual import on_all, on_hosts

#: Sizes of tensors, in rounds of 3 ranks and blocks of 8 elements mostly.
SIZES = {
    "one large": [500],
    "large between small": [3, 190, 10, 0, 260, 1],
    "small": [5, 7, 9],
    "whole rounds": [48, 96],
}


@pytest.fixture(params=[SharedSums, MessageSums])
def way(request, monkeypatch):
    if request.param is MessageSums:
        monkeypatch.setattr(VirtualChannel, "share", lambda self, elements: None)
    return request.param


def tensors(rank, sizes):
    random = np.random.default_rng(rank)
    return [(random.normal(size=size) * 10.0**rank).astype(np.float32) for size in sizes]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_have_the_bits_of_a_sum_in_rank_order(name, ranks, way, monkeypatch):
    monkeypatch.setattr(shards.Dealing.__init__, "__defaults__", (8,))
    monkeypatch.setattr(hosts, "_LARGE", 50)
    monkeypatch.setattr(hosts, "_CHUNK", 24)
    sizes = SIZES[name]
    wanted = np.concatenate(tensors(0, sizes))
    for rank in range(1, ranks):
        wanted = wanted + np.concatenate(tensors(rank, sizes))

    def run(comm):
        channel = comm.channel("sums")
        sums, mine, got = open_sums(channel, sizes), tensors(comm.rank, sizes), []
        assert type(sums) is way
        piece = np.zeros(int(np.diff(sums.dealing.bounds)[comm.rank]), np.float32)
        for _ in range(2):
            sums.publish(mine)
            channel.exchange([])
            assert sums.add_up(mine, piece)
            seen = sums.values(piece.size - 1, mine)
            channel.exchange([])
            if sums.targets is None or len(got) == 1:
                sums.gather(piece)
            else:
                for target, part in zip(sums.targets, np.split(piece, np.cumsum([t.size for t in sums.targets])[:-1]),
                                        strict=True):  # fmt: skip
                    target[:] = part
                sums.gather(None)
            got.append(sums.result.tobytes())
            channel.exchange([])
            sums.result[...] = 0 if comm.rank == 0 else sums.result
            channel.exchange([])
        last = sums.dealing.origin(comm.rank, piece.size - 1)
        return got, seen == [float(np.concatenate(tensors(r, sizes))[last]) for r in range(ranks)]

    for got, seen in on_all(ranks, run):
        assert got == [wanted.tobytes()] * 2
        assert seen


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sum_that_is_not_finite_is_found_in_every_part(bad, way, monkeypatch):
    monkeypatch.setattr(hosts, "_LARGE", 2048)
    sizes = [9000, 7]

    def run(comm):
        channel = comm.channel("sums")
        sums, found = open_sums(channel, sizes), []
        piece = np.zeros(int(np.diff(sums.dealing.bounds)[comm.rank]), np.float32)
        for element in (None, 0, 5000, 8999, 9006):
            mine = tensors(0, sizes)
            if comm.rank and element is not None:
                mine[element // 9000][element % 9000] = bad
            # Squares that overflow are no fault.
            mine[0][17] = 3e38 if comm.rank else 0.0
            sums.publish(mine)
            channel.exchange([])
            found.append(not sums.add_up(mine, piece))
            channel.exchange([])
        return found

    assert np.sum(on_all(2, run), axis=0).tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["density", "sharded"])
def test_training_has_the_same_bits_either_way(name, monkeypatch):
    strategy = Threshold(local="dense", **OPTIONS[name])

    def run(comm):
        steps, exchange = steps_of(strategy, 8, finite=lambda rank, t: (rank, t) != (1, 4))(comm)
        return [step.tobytes() for step in steps], flat(exchange.residuals).tobytes()

    shared = on_hosts("aaabbb", run)
    monkeypatch.setattr(VirtualChannel, "share", lambda self, elements: None)
    assert on_hosts("aaabbb", run) == shared


def test_updates_stay_until_all_ranks_have_read_them(monkeypatch):
    add_up = SharedSums.add_up

    def slow(self, tensors, out):
        time.sleep(0.05 * self._rank)
        return add_up(self, tensors, out)

    monkeypatch.setattr(SharedSums, "add_up", slow)

    def run(comm):
        sums = open_sums(comm.channel("sums"), [4])
        totals = [np.zeros(2, np.float32) for _ in range(2)]
        for t, total in enumerate(totals):
            sums.total([np.full(4, t + 1, np.float32)], total)
        return [total.tolist() for total in totals]

    assert on_all(2, run) == [[[2.0, 2.0], [4.0, 4.0]]] * 2
