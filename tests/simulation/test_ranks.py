"""Virtual clocks, by hand-computed cases, and the data of collectives between simulated ranks."""

# Tests: hvdx/comm/clock.py, hvdx/simulation/virtual_clock.py, hvdx/simulation/groups.py

import time

import numpy as np
import pytest

from hvdx.comm import clock
from hvdx.comm.interfaces import Reduction
from hvdx.comm.waiting import LIMIT_VARIABLE, overshoot
from hvdx.costs.model import Situation
from hvdx.costs.types import Link, Machine
from hvdx.errors import ConfigError, ExchangeError
from hvdx.simulation.ranks import on_all, world

# Memory is endless and messages take no work, so a transfer takes its bytes in microseconds, and 1 ms.
PLAIN = Machine(memory=1e30)
LATENCY = 1e-3
# A wait of more than 10 ms ends half a millisecond late; see `overshoot`.
LATE = 5e-4


def ranks(workers, per_host=1, slow=None, running_hosts=None, timer=lambda: 0.0, engine="mpi", core_speed=1.0):
    situation = Situation(workers, (1,), 0.0, Link(LATENCY, 1e6), PLAIN, engine, per_host=per_host)
    slow = np.ones(workers) if slow is None else np.array(slow, float)
    return world(situation, slow, core_speed, running_hosts or workers // per_host, timer)


def header(words, others=1):
    """Return the seconds of an exchange of headers."""
    seconds = LATENCY + others * 8e-6 * (words + 1)
    return seconds + overshoot(seconds)


def test_exchange_begins_with_the_last_rank_and_takes_the_largest_message():
    def work(comm):
        channel = comm.channel("a test")
        comm.start()
        comm.clock.compute(np.array([1.0 if comm.rank == 0 else 10.0]))
        received = channel.exchange([comm.rank], np.full(1_000_000 * (1 + 2 * comm.rank), comm.rank, np.uint8))
        assert [m[0] for m in received.messages] == [0, 1]
        assert received.headers.tolist() == [[0], [1]]
        return comm.clock, received, comm.traffic

    (first, seen, counts), (last, late, _) = on_all(ranks(2), work)
    # Rank 1 sends 3 MB at 1 MB/s.
    transfer = LATENCY + 3.0 + LATE
    assert seen.waited == pytest.approx(9 + header(1))
    assert late.waited == pytest.approx(header(1))
    assert seen.seconds == late.seconds == pytest.approx(transfer)
    assert first.times == last.times == pytest.approx(10 + header(1) + transfer)
    assert (first.costs.computing, first.costs.waiting, last.costs.waiting) == pytest.approx((1, 9, 0))
    assert first.costs.network == pytest.approx(header(1) + transfer)
    assert (counts.sent, counts.received, counts.crossing) == (1_000_016, 3_000_016, 1_000_016)


def test_ranks_of_a_host_share_its_link():
    def work(comm):
        channel = comm.channel("a test")
        comm.start()
        channel.gather_pieces(np.zeros(1_000_000, np.uint8), 1_000_000 * np.arange(5), np.zeros(4_000_000, np.uint8))
        return comm.clock.now(), comm.traffic

    # Two ranks of a host each send 1 MB to two ranks of the other host.
    for seconds, counts in on_all(ranks(4, per_host=2), work):
        assert seconds == pytest.approx(4.0 + LATENCY + LATE)
        assert (counts.sent, counts.crossing) == (3e6, 2e6)
    for seconds, counts in on_all(ranks(4, per_host=4), work):
        assert seconds < 1e-4
        assert (counts.sent, counts.crossing) == (3e6, 0)
    assert on_all(ranks(4), work)[0][0] == pytest.approx(3.0 + LATENCY + LATE)


def test_parts_across_hosts_share_the_links():
    def work(comm):
        local = comm.divide(comm.cross_rank, comm.rank, "the ranks of a host")
        across = comm.divide(comm.local_rank, comm.rank, "one rank of each host")
        assert (local.hosts, across.hosts) == ([comm.hosts[comm.rank]] * 2, ["host1", "host2"])
        inside, between = local.channel("inside"), across.channel("between")
        comm.start()
        gathered = np.zeros(2)
        inside.gather_pieces(np.array([comm.rank * 1.0]), np.arange(3), gathered)
        begin = comm.clock.now()
        got = between.exchange([], np.full(1_000_000, comm.rank, np.uint8))
        return gathered.tolist(), [m[0] for m in got.messages], begin, comm.clock.now() - begin

    for rank, (gathered, got, inside, between) in enumerate(on_all(ranks(4, per_host=2), work)):
        assert (gathered, got) == ([[0, 1], [2, 3]][rank // 2], [rank % 2, rank % 2 + 2])
        assert inside < 1e-4
        # The two ranks of a host send 1 MB each.
        assert between == pytest.approx(2.0 + LATENCY + LATE + header(0, others=2), abs=1e-5)


def test_all_reduce_of_the_graph_takes_the_predicted_time():
    def work(comm):
        comm.start()
        tensors = [np.full(1_000_000, comm.rank + 1.0, np.float32), np.array([0.1], np.float32)]
        mean, narrow = comm.all_reduce(tensors, Reduction(), "a test")
        assert mean[0] == 1.5
        seconds, counts = comm.clock.now(), (comm.traffic.sent, comm.traffic.received)
        (narrow,) = comm.all_reduce([tensors[1]], Reduction(average=False, wire="fp16"), "narrow")
        assert narrow[0] == np.float32(np.float16(2 * np.float32(np.float16(0.1))))
        (rounded,) = comm.all_reduce([tensors[1]], Reduction(wire="bf16"), "rounded")
        assert rounded[0] == np.float32(0.10009765625)
        return seconds, counts

    # On the host: half of 4 MB there and back.
    for seconds, counts in on_all(ranks(2), work):
        assert seconds == pytest.approx(2 * (2.0 + LATENCY) + LATE, abs=1e-4)
        assert counts == (4_000_004, 4_000_004)
    # Horovod: a ring of two rounds, or one round of all bytes; half a cycle of 1 ms, and an agreement.
    assert on_all(ranks(2, engine="horovod"), work)[0][0] == pytest.approx(4.0 + 1e-3 + 1e-3 + LATENCY, abs=2e-3)


def test_work_is_charged_to_the_rank_that_does_it():
    ticks = [0.0]

    def work(comm):
        channel = comm.channel("a test")
        comm.start()
        now = clock.timer()
        begin = now()
        ticks[0] += 3.0
        measured = now() - begin
        channel.exchange([])
        ticks[0] += 100.0
        comm.clock.resume()  # leaves out what the rank did since the exchange
        return measured, comm.clock

    (one, first), (other, second) = on_all(ranks(2, slow=[1, 8], timer=lambda: ticks[0], core_speed=2.0), work)
    # Cores of twice the speed; rank 1 is eight times slower.
    assert (one, other) == (1.5, 12.0)
    assert (first.costs.work, second.costs.work, first.costs.waiting) == (1.5, 12.0, 10.5)
    assert first.times[0] == second.times[0] == pytest.approx(12.0 + header(0))


def test_collectives_carry_the_data_of_all_ranks():
    def work(comm):
        channel, rank = comm.channel("a test"), comm.rank
        numbers = 10 * rank + np.arange(3)[:, None]
        assert channel.all_to_all_rows(numbers).tolist() == [[rank], [10 + rank], [20 + rank]]
        parts = [np.full(rank + 1, to, np.uint8) for to in range(3)]
        assert [p.tolist() for p in channel.all_to_all(parts, [1, 2, 3])] == [[rank] * n for n in (1, 2, 3)]
        vector, bounds = np.arange(5, dtype=np.float32) * (rank + 1), np.array([0, 1, 3, 5])
        assert channel.scatter_pieces(vector, bounds).tolist() == [
            [float(i * n) for i in range(bounds[rank], bounds[rank + 1])] for n in (1, 2, 3)
        ]
        for add in (channel.sum_in_order, channel.all_reduce):
            add(total := vector.copy())
            assert total.tolist() == [0, 6, 12, 18, 24]
        assert comm.all_gather_object({"rank": rank}, "ranks") == [{"rank": n} for n in range(3)]
        assert comm.all_reduce_sum(np.array([rank]), "ranks").tolist() == [3.0]
        assert comm.broadcast([np.array([rank])], 2, "a rank")[0].tolist() == [2]
        assert comm.any_true(rank == 1)
        assert comm.all_gather(np.array([rank]), "ranks").tolist() == [0, 1, 2]
        channel.close()
        comm.close()

    on_all(ranks(3), work)


def test_ranks_that_repeat_others_send_their_messages():
    def work(comm):
        channel = comm.channel("a test")
        comm.start()
        comm.clock.compute(np.ones(len(comm.clock.times)))
        got = channel.exchange([comm.rank], np.full(10 + comm.rank, comm.rank, np.uint8))
        seconds = comm.clock.now()
        sums = np.array([1.0 + comm.rank], np.float32)
        channel.all_reduce(sums)
        numbers = channel.all_to_all_rows(np.full((7, 1), comm.rank))
        gathered = np.zeros(7, np.float32)
        channel.gather_pieces(sums, np.arange(8), gathered)
        return got, seconds, sums, numbers[:, 0].tolist(), gathered.tolist(), comm.traffic.received

    found = on_all(ranks(7, running_hosts=2), work)
    assert len(found) == 2
    for got, seconds, sums, numbers, gathered, received in found:
        assert got.headers[:, 0].tolist() == [len(m) - 10 for m in got.messages] == [0, 1, 0, 1, 0, 1, 0]
        assert seconds == pytest.approx(1.0 + header(1, others=6) + 1.1e-3, abs=1e-4)
        assert sums == 4 * 1 + 3 * 2
        assert numbers == [0, 1, 0, 1, 0, 1, 0]
        assert gathered == [10.0] * 7
        assert received > 6 * 16 + 6 * 10


def test_parts_of_ranks_that_repeat_others_are_different():
    def work(comm):
        channel = comm.channel("a test")
        comm.start()
        parts = [np.full(3 + to, 10 * comm.rank + to, np.uint8) for to in range(7)]
        sizes = channel.all_to_all_rows(np.array([[part.size] for part in parts]))[:, 0].tolist()
        got = channel.all_to_all(parts, sizes)
        assert [part.size for part in got] == sizes
        return [int(part[0]) for part in got], sum(sizes) - sizes[comm.rank], comm.traffic.received

    for rank, (got, others, received) in enumerate(on_all(ranks(7, running_hosts=2), work)):
        # Ranks 0, 2, 4 and 6 are rank 0, and send its parts for four ranks.
        assert got == [10 * (sender % 2) + (rank + sender // 2) % 7 for sender in range(7)]
        assert received == others + 6 * 8


def test_rank_that_is_repeated_waits_for_a_slow_repetition():
    def work(comm):
        comm.start()
        comm.clock.compute(np.ones(2) if comm.rank else np.array([1.0, 7.0]))
        comm.any_true(False)
        return comm.clock.costs.waiting

    assert on_all(ranks(4, running_hosts=2), work) == [6.0, 6.0]


def test_divided_world_of_repeated_ranks():
    def work(comm):
        local = comm.divide(comm.cross_rank, comm.rank, "the ranks of a host")
        across = comm.divide(comm.local_rank, comm.rank, "one rank of each host")
        got = across.channel("between").exchange([comm.rank]).headers[:, 0].tolist()
        return local.size, across.size, across.hosts[-1], got

    assert on_all(ranks(10, per_host=2, running_hosts=2), work) == [
        (2, 5, "host5", [local, local + 2, local, local + 2, local]) for local in (0, 1, 0, 1)
    ]
    with pytest.raises(ConfigError, match="divides the ranks by host or by local rank"):
        on_all(ranks(10, per_host=2, running_hosts=2), lambda comm: comm.divide(comm.rank // 3, 0, "threes"))


def test_error_of_one_rank_ends_all():
    def work(comm):
        if comm.rank == 2:
            raise ZeroDivisionError("rank 2")
        comm.any_true(False)

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="rank 2"):
        on_all(ranks(4), work)
    assert time.monotonic() - begin < 10


def test_missing_and_mistaken_ranks_are_errors(monkeypatch):
    with pytest.raises(ExchangeError, match="different collectives: gather a flag, open a test"):
        on_all(ranks(2), lambda comm: comm.channel("a test") if comm.rank else comm.any_true(True))
    monkeypatch.setenv(LIMIT_VARIABLE, "0.2")
    with pytest.raises(ExchangeError, match="not all ranks joined"):
        on_all(ranks(2), lambda comm: None if comm.rank else comm.any_true(True))


def test_collective_outside_of_the_simulation_is_an_error():
    with pytest.raises(ConfigError, match="without a virtual clock"):
        ranks(2)[0].any_true(True)
    with pytest.raises(ConfigError, match="cannot be simulated"):
        ranks(2)[0].mailbox(0)
