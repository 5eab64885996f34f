"""Predictions of strategies: terms by hand-counted examples, and bytes as the exchanges count them."""

# Tests: hvdx/strategies/all_reduce.py, hvdx/strategies/parameter_averaging.py, hvdx/strategies/parameter_server.py
# Tests: hvdx/strategies/parameter_server.py, hvdx/strategies/threshold/prediction.py

import dataclasses
import itertools

import numpy as np
import pytest

from hvdx.comm.local import virtual_world
from hvdx.costs.model import Situation
from hvdx.costs.sizes import ring_bytes
from hvdx.costs.types import Codec, Layer, Link, Machine
from hvdx.strategies import AllReduce, ParameterAveraging, ParameterServer, Threshold, parse
from hvdx.strategies.contract import TensorSpec
from tests.strategies.serving.ranks import all_fine, run
from tests.strategies.virtual import on_all

# Powers of ten, so that each term can be read off; no overhead of messages, and an endless memory.
PLAIN = Machine(memory=1e30, codec=Codec(encode_element=1e-9))
BASE = Situation(4, (1_000_000,), 0.02, Link(1e-3, 1e6), PLAIN, "mpi", batch=32, slots=1.0)
STRATEGIES = [
    *("all_reduce", "all_reduce:compression=fp16", "threshold", "threshold:target_density=0.01,max_staleness=inf"),
    *("parameter_averaging", "parameter_server", "parameter_server:servers=colocated,codec=fp16"),
    *("parameter_server:servers=colocated:2,codec=threshold:0.01",),
]


def change(**values):
    return dataclasses.replace(BASE, **values)


def test_all_reduce_on_the_host_sends_the_bytes_of_a_ring():
    terms = AllReduce().predict(BASE).terms
    assert terms["transfer"] == pytest.approx(6.0)  # 2 * 3 quarters of 4 MB at 1 MB/s
    # Two ends of 1 ms; polling ends at most half of the longest sleep late.
    assert terms["latency"] == pytest.approx(2 * 1e-3 + 5e-4)
    assert AllReduce(compression="fp16").predict(BASE).terms["transfer"] == pytest.approx(3.0)


def test_threshold_sends_its_density_to_all():
    found = Threshold(target_density=0.01, exchange="all_gather").predict(BASE)
    assert found.terms["transfer"] == pytest.approx(3 * (11349 + 32) / 1e6, rel=1e-3)
    assert found.terms["encoding"] == pytest.approx(1e-3, rel=1e-3)
    assert found.note == "density 0.01, all-gather"
    sharded = Threshold(target_density=0.01, exchange="sharded").predict(BASE)
    assert sharded.note == "density 0.01, sharded"
    assert sharded.terms["transfer"] == pytest.approx(3 * ((11349 + 35287) / 4 + 2 * 26 + 32) / 1e6, rel=1e-3)
    assert sharded.terms["encoding"] == pytest.approx(1.25e-3, rel=1e-3)
    automatic = Threshold(exchange="all_gather").predict(change(computing=2.0))
    # A tenth of a step is for messages; headers and polling come on top.
    assert automatic.terms["transfer"] + automatic.terms["latency"] == pytest.approx(0.2, rel=0.02)
    assert Threshold(tau=0.1).predict(BASE) is None


def test_fixed_part_above_the_budget_leaves_a_quarter_of_it_for_the_density():
    situation = change(workers=2, link=Link(5e-3, 1e7))
    found = Threshold(exchange="all_gather", period=1).predict(situation)
    assert found.terms["latency"] > 0.1 * BASE.computing
    assert found.terms["transfer"] == pytest.approx(0.25 * 0.1 * BASE.computing, rel=0.1)
    rarely = Threshold(exchange="all_gather").predict(situation)
    assert rarely.period > 1
    assert rarely.note.endswith(f"every {rarely.period} steps")
    assert sum(rarely.terms.values()) < 1.15 * BASE.computing < sum(found.terms.values())
    fixed = Threshold(exchange="all_gather", target_density=0.01, period=4).predict(situation)
    each = Threshold(exchange="all_gather", target_density=0.01).predict(situation)
    assert (each.period, fixed.sent) == (1, each.sent / 4)


@pytest.mark.parametrize(("rate", "kind"), [(1e6, "sharded"), (1e12, "all-gather")])
def test_predicted_kind_of_exchange_does_not_depend_on_the_machine(rate, kind):
    """The ranks of a training choose alike, and measure no codec for it."""
    for codec in (Codec(), Codec(1e-8, 1e-7, 1e-8, 1e-6), Codec(decode_message=1.0), Codec(cut=1.0, join=1.0)):
        situation = change(workers=32, tensors=(100_000,), link=Link(1e-3, rate), machine=Machine(codec=codec))
        assert kind in Threshold().predict(situation).note


def test_each_message_and_each_part_takes_time():
    situation = change(machine=dataclasses.replace(PLAIN, codec=Codec(decode_message=1e-3, cut=1e-2, join=2e-2)))
    gathered, sharded = (
        Threshold(target_density=0.01, exchange=k).predict(situation) for k in ("all_gather", "sharded")
    )
    assert gathered.terms["decoding"] == pytest.approx(4e-3)
    # Four parts and a joined message are decoded, and four parts are cut and joined.
    assert sharded.terms["decoding"] == pytest.approx(5e-3 + 8e-2)
    assert sharded.terms["encoding"] == pytest.approx(4e-2 + 1.25 * 4e-4)


def test_hosts_send_one_update_for_all_their_workers():
    """Four hosts of two workers: three messages of half of the elements from each worker, two workers to a link."""
    situation = change(workers=8, per_host=2)
    dense, alone = (Threshold(target_density=0.01, local=local).predict(situation) for local in ("auto", "none"))
    assert dense.terms["transfer"] == pytest.approx(2 * 3 * (11349 / 2 + 32) / 1e6, rel=1e-3)
    assert alone.terms["transfer"] == pytest.approx(2 * 6 * (11349 + 32) / 1e6, rel=1e-3)
    assert dense.terms["encoding"] == pytest.approx(alone.terms["encoding"] / 2, rel=1e-3)
    assert dense.sent == pytest.approx(3 * (11349 / 2 + 32), rel=1e-3)
    assert dense.memory["residual"] == alone.memory["residual"] / 2
    slow = change(workers=8, per_host=2, machine=dataclasses.replace(PLAIN, memory=1e9))
    # Passes over a million elements: half to shared memory, sum of two; the result, and a rank's own weights.
    added = Threshold(target_density=0.01).predict(slow).terms["copying"]
    assert added == pytest.approx(1e6 * (8 + 4 + 4 + 2 + 20) / 1e9)
    for other in (change(workers=8, per_host=8), change(workers=8, per_host=3), change(workers=8)):
        assert Threshold(target_density=0.01).predict(other) == Threshold(target_density=0.01, local="none").predict(
            other
        )


def test_computing_hides_late_messages():
    shown, hidden = (Threshold(target_density=0.01, max_staleness=late).predict(BASE) for late in (0, "inf"))
    assert shown.seconds - hidden.seconds == pytest.approx(BASE.computing)
    assert "transfer" not in Threshold(target_density=0.01, max_staleness="inf").predict(change(computing=9.0)).terms


def test_averages_are_divided_by_the_period():
    # Weights and one slot, 2 * 3 / 4 times 8 MB at 1 MB/s, every 10 steps.
    found = ParameterAveraging(period=10).predict(BASE)
    assert found.terms["transfer"] == pytest.approx(1.2)
    assert found.period == 10
    assert ParameterAveraging(10, average_optimizer=False).predict(BASE).terms["transfer"] == pytest.approx(0.6)
    assert ParameterAveraging("1@0/5@100").predict(BASE).period == 5


def test_link_of_a_server_carries_all_workers():
    """Three workers push 4 MB each at 1 MB/s: a round of all three takes at least 12 s."""
    found = ParameterServer().predict(BASE)
    assert found.seconds == pytest.approx(12.0)
    assert found.samples == pytest.approx(3 * 32 / 12)
    assert ParameterServer(servers=4).predict(BASE) is None
    # Each worker's link carries 3/4 of its pushes and pulls and those of the others to its own part.
    terms = ParameterServer("colocated").predict(BASE).terms
    assert (terms["transfer"], terms["waiting"]) == pytest.approx((6.0, 4.5))


def test_thread_of_horovod_takes_a_part_of_a_core():
    # An agreement of two rounds of 1 ms after each sleep of 1 ms, or of 5 ms; MPI on the host has no thread.
    busy = change(engine="horovod")
    assert AllReduce().predict(busy).terms["polling"] == pytest.approx(0.02 * 2 / 3)
    assert ParameterAveraging().predict(busy).terms["polling"] == pytest.approx(0.02 * 2 / 7)
    assert AllReduce().predict(change(engine="horovod", cores=4.0)).terms["polling"] == pytest.approx(0.02 / 6)
    assert "polling" not in AllReduce(engine="mpi").predict(busy).terms


def test_gradients_of_embeddings_are_gathered_by_rows():
    table = Layer("table", 10, 80, 800_000)
    found = AllReduce().predict(change(tables=(table,)))
    rows = 32 * (4 * 80 + 4 * 10)
    assert found.sent == pytest.approx(2 * 3 / 4 * 4 * 200_000 + 3 * rows)
    assert AllReduce(engine="horovod").predict(change(tables=(table,))).sent == found.sent
    assert AllReduce(sparse="dense").predict(change(tables=(table,))).sent == AllReduce().predict(BASE).sent


def test_averages_wait_for_the_slowest_worker():
    noisy = change(spread=1e-3)
    # Over 16 steps the sums differ less.
    assert ParameterAveraging(16).predict(noisy).terms["waiting"] == pytest.approx(noisy.slowest / 4)


@pytest.mark.parametrize("spelling", STRATEGIES)
@pytest.mark.parametrize("engine", ["mpi", "horovod"])
def test_one_worker_sends_nothing(spelling, engine):
    found = parse(spelling).predict(change(workers=1, engine=engine))
    if found is not None:  # a server of its own leaves no worker
        assert found.sent == 0
        assert not {"transfer", "latency", "waiting"} & set(found.terms)


@pytest.mark.parametrize("spelling", STRATEGIES)
@pytest.mark.parametrize("engine", ["mpi", "horovod"])
def test_faster_link_is_never_slower(spelling, engine):
    found = [parse(spelling).predict(change(engine=engine, link=Link(1e-3, b))) for b in np.geomspace(1e5, 1e11, 40)]
    # A higher density sends more, so only the other densities are compared.
    seconds = [p.seconds - p.terms.get("decoding", 0.0) - p.terms.get("encoding", 0.0) for p in found]
    if spelling == "threshold":
        seconds = [min(s, BASE.computing * 1.15 + 5e-3) for s in seconds[20:]]
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(seconds))
    assert all(p.samples == pytest.approx(found[0].samples * found[0].seconds / p.seconds) for p in found)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_that_telemetry_counts(size):
    specs = [TensorSpec("wide", (300, 400), 4), TensorSpec("bias", (400,), 4)]
    elements = sum(s.elements for s in specs)
    situation = change(workers=size, tensors=tuple(s.elements for s in specs))

    def train(comm):
        exchange = Threshold(target_density=0.02, warmup="none").open(comm, specs)
        random, sent = np.random.default_rng(comm.rank), []
        for _ in range(20):
            before = exchange.telemetry.sent
            exchange.step([random.normal(size=s.shape).astype(np.float32) for s in specs])
            sent.append(exchange.telemetry.sent - before)
        return np.mean(sent)

    expected = Threshold(target_density=0.02).predict(situation).sent
    assert on_all(size, train) == pytest.approx([expected] * size, rel=0.1)
    (comm, *_) = virtual_world(size)
    for strategy in (AllReduce(), AllReduce(compression="fp16")):
        assert strategy.open(comm, specs).sent == strategy.predict(situation).sent
    averaging = ParameterAveraging(period=8)
    # The weights, and one slot for each.
    assert averaging.open(comm, [*specs, *specs]).sent == pytest.approx(8 * averaging.predict(situation).sent)
    assert ring_bytes(8 * elements, size) == averaging.open(comm, [*specs, *specs]).sent


@pytest.mark.parametrize("servers", [1, "colocated"])
@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_bytes_of_servers_are_those_that_telemetry_counts(servers, codec):
    specs = [TensorSpec("wide", (300, 400), 4)]
    strategy = ParameterServer(servers, codec=codec)
    expected = strategy.predict(change(workers=2 + strategy.dedicated, tensors=(120_000,))).sent

    def train(comm):
        exchange, weights = strategy.open(comm, specs), [np.zeros((300, 400), np.float32)]
        exchange.begin(weights)
        for _ in range(10):
            weights = [w + 1 for w in exchange.step(weights)]
        exchange.flush()
        return exchange.telemetry.sent / 10

    # Opening and ending the session take a few messages more.
    got = all_fine(run(2, train, strategy.dedicated))
    assert np.mean(got) == pytest.approx(expected, rel=0.15)
