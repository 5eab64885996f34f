"""Simulated trainings: their times, bytes and losses under each strategy."""

# Tests: hvdx/simulation/training.py, hvdx/simulation/workloads.py

import dataclasses

import numpy as np
import pytest

from hvdx.costs.model import Situation
from hvdx.costs.types import Link, Machine
from hvdx.errors import ConfigError
from hvdx.simulation.training import Setting, check, simulate
from hvdx.simulation.workloads import Digits, Made
from hvdx.strategies import parse

SITUATION = Situation(4, (1,), 0.02, Link(1e-3, 1e6), Machine(memory=1e30), "mpi", batch=8, slots=1.0)
# Work of codecs takes no time, so every run gives the same figures.
SETTING = Setting(SITUATION, 24, core_speed=float("inf"))


@pytest.fixture(scope="module")
def task():
    """Return a model of classes that can be told apart."""
    random = np.random.default_rng(1)
    centres = random.normal(size=(10, 16)).astype(np.float32)
    classes = random.integers(10, size=600)
    images = centres[classes] + 0.3 * random.normal(size=(600, 16)).astype(np.float32)
    return Digits((images[:500], classes[:500]), (images[500:], classes[500:]), hidden=16, batch=8)


def with_workers(count, setting=SETTING, **changes):
    return dataclasses.replace(setting, situation=dataclasses.replace(setting.situation, workers=count), **changes)


def trained(task, spelling, setting=SETTING):
    return simulate(parse(spelling), setting, task)


@pytest.mark.parametrize(
    "spelling",
    [
        *("all_reduce", "all_reduce:compression=fp16", "parameter_averaging:period=4"),
        *("threshold:target_density=0.1", "threshold", "threshold:tau=0.01"),
        *("threshold:target_density=0.2,exchange=sharded", "threshold:exchange=sharded"),
        *("threshold:target_density=0.1,warmup=density:4", "threshold:target_density=0.1,placement=gradient"),
    ],
)
def test_training_learns_and_is_repeatable(task, spelling):
    first, again = trained(task, spelling), trained(task, spelling)
    assert first == again
    losses = [loss for _, loss in first.losses]
    assert losses[-1] < 0.8 * losses[0]
    assert first.seconds == pytest.approx(sum(first.parts.values()), rel=0.02)
    assert first.total >= first.losses[-1][0] > 0
    assert first.memory > 12 * 16 * 16


def test_all_reduce_trains_as_one_worker_with_all_batches(task):
    alone = with_workers(1)
    together = trained(task, "all_reduce", alone)
    assert together.sent == together.parts["network"] == 0.0
    replicas = [task.replica(rank) for rank in range(4)]
    for _ in range(24):
        gradients = [r.gradients(8) for r in replicas]
        for replica in replicas:
            replica.add(replica.updates([np.mean(g, axis=0) for g in zip(*gradients, strict=True)]))
    assert trained(task, "all_reduce").losses[-1][1] == pytest.approx(replicas[0].loss(), rel=1e-4)


def test_gradients_are_those_of_the_loss(task):
    replica = task.replica(0)
    whole = Digits((task.train[0][:1], task.train[1][:1]), (task.train[0][:1], task.train[1][:1]), hidden=16, batch=1)
    replica = whole.replica(0)
    before, step = replica.loss(), 1e-3
    for weight, gradient in zip(replica.weights, replica.gradients(1), strict=True):
        element = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
        weight[element] += step
        assert replica.loss() - before == pytest.approx(step * gradient[element], rel=0.05)
        weight[element] -= step


def test_bytes_and_times_are_those_of_the_prediction(task):
    elements = 16 * 16 + 16 + 160 + 10
    dense = trained(task, "all_reduce")
    assert dense.sent == dense.received == 4 * elements * 2 * 3 / 4
    found = parse("all_reduce").predict(dataclasses.replace(SITUATION, tensors=(elements,)))
    assert dense.seconds == pytest.approx(found.seconds)
    # Weights and momenta, every fourth step.
    averaged = trained(task, "parameter_averaging:period=4")
    assert averaged.sent == pytest.approx(2 * dense.sent / 4, abs=10)
    # 12 bytes a parameter for weights, gradients and momenta.
    assert dense.memory == pytest.approx(12 * elements + sum(found.memory.values()) - 12 * elements)


def test_slow_worker_and_jitter_keep_the_others_waiting(task):
    slow = trained(task, "all_reduce", dataclasses.replace(SETTING, slow={2: 10.0, 9: 3.0}))
    plain = trained(task, "all_reduce")
    assert slow.seconds == pytest.approx(plain.seconds + 0.18)
    assert slow.parts["waiting"] == pytest.approx(0.18 * 3 / 4)
    uneven = trained(task, "all_reduce", dataclasses.replace(SETTING, jitter=0.3))
    assert uneven.parts["computing"] == pytest.approx(0.02, rel=0.1)
    assert plain.seconds + 0.002 < uneven.seconds < plain.seconds + 0.02
    # The local steps of a period average out a part of it.
    alone = trained(task, "parameter_averaging:period=4", dataclasses.replace(SETTING, jitter=0.3))
    assert alone.parts["waiting"] < 0.8 * uneven.parts["waiting"]


@pytest.mark.parametrize("spelling", ["all_reduce", "threshold:target_density=0.1"])
def test_rows_follow_the_speeds(task, spelling):
    setting = dataclasses.replace(SETTING, slow={3: 10.0}, steps=30)
    even, divided = (trained(task, spelling, dataclasses.replace(setting, balance=b)) for b in (False, True))
    assert (even.rows, sum(divided.rows), divided.rows[3]) == ([8] * 4, 32, 1)
    assert divided.parts["computing"] + divided.parts["waiting"] < 0.15 * 0.2
    # Gradients weigh as many rows, so the loss falls as in steps of even rows.
    assert divided.losses[-1][1] == pytest.approx(even.losses[-1][1], rel=0.2)
    assert trained(task, spelling, dataclasses.replace(setting, balance=True)) == divided
    averaged = trained(task, "parameter_averaging:period=4", dataclasses.replace(setting, balance=True))
    assert averaged.rows == [8] * 4


def test_gradients_of_any_division_add_up_to_those_of_one_process(task):
    whole = Digits(task.train, task.held_out, hidden=16, batch=8).replica(0)
    parts = Digits(task.train, task.held_out, hidden=16, batch=8).replica(0)
    # One generator draws the rows one after another.
    pieces = [parts.gradients(rows) for rows in (5, 1, 2)]
    for gradient, *others in zip(whole.gradients(8), *pieces, strict=True):
        np.testing.assert_allclose(sum(others), gradient, atol=1e-6)


def test_automatic_density_keeps_its_budget():
    setting = dataclasses.replace(SETTING, steps=150)
    found = trained(Made(20_000), "threshold:warmup=none", setting)
    # 1.1 ms for the headers, or half of it with a period of two, and a tenth of 20 ms for the messages.
    assert 0.0022 < found.parts["network"] < 0.0038


def test_large_world_repeats_some_workers():
    made = Made(20_000)
    setting = with_workers(256, running=2)
    gathered = "threshold:target_density=0.01,exchange=all_gather"
    found = trained(made, gathered, setting)
    assert (found.running, found.losses) == (2, [])
    few = trained(made, gathered, with_workers(2))
    assert found.sent == pytest.approx(255 * few.sent, rel=0.1)
    # In two phases, a worker sends two messages of whole updates, with headers for each worker.
    sharded = trained(made, "threshold:target_density=0.01,exchange=sharded", setting)
    assert sharded.sent < 0.3 * found.sent
    late = trained(made, "all_reduce", with_workers(256, running=2, slow={255: 10.0}))
    assert late.parts["waiting"] == pytest.approx(0.18)
    # Each worker that repeats another one has rows of its own.
    alike = with_workers(256, running=2, slow={254: 10.0}, steps=30, balance=True)
    divided = trained(Made(20_000, batch=8), "all_reduce", alike)
    assert (sum(divided.rows), divided.rows[254], min(divided.rows[:254])) == (2048, 1, 8)
    # One host runs if it has several workers, else two.
    assert [with_workers(n, running=2).running_hosts for n in (1, 2, 64)] == [1, 2, 2]
    eight = dataclasses.replace(SITUATION, workers=64, per_host=8)
    assert dataclasses.replace(SETTING, situation=eight, running=2).running_hosts == 1


def test_measured_work_appears_in_the_parts():
    found = simulate(
        parse("threshold:target_density=0.05"), dataclasses.replace(SETTING, core_speed=1.0), Made(300_000)
    )
    assert 1e-5 < found.parts["encoding"] < 0.5
    assert 1e-5 < found.parts["decoding"] < 0.5
    slower = simulate(
        parse("threshold:target_density=0.05"), dataclasses.replace(SETTING, core_speed=1e-3), Made(300_000)
    )
    assert slower.parts["encoding"] > 50 * found.parts["encoding"]


def test_limit_ends_a_training_early():
    setting = dataclasses.replace(SETTING, steps=500, limit=1e-6)
    for spelling in ("threshold:tau=0.001", "all_reduce"):
        found = trained(Made(1000), spelling, setting)
        assert (found.taken, found.steps) == (2, 2)
        assert 2 * 0.02 <= found.total < 0.07
    assert trained(Made(1000), "all_reduce", dataclasses.replace(SETTING, limit=100.0)).taken == 24


@pytest.mark.parametrize("spelling", ["parameter_server", "auto", "threshold:threads=4"])
def test_strategies_that_cannot_be_simulated_are_refused(spelling):
    with pytest.raises(ConfigError, match=r"simulat.* out"):
        check(parse(spelling))
