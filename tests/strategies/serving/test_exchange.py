"""Trainings on virtual ranks: the weights hold each pushed update exactly once, and every wait ends."""

# Tests: hvdx/strategies/contract.py, hvdx/strategies/serving/worker_sessions.py

import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from hvdx.comm.local import LocalComm, virtual_world
from hvdx.errors import ConfigError, ExchangeError, HvdxError, ReplicaError
from hvdx.strategies import ParameterServer, StepInput, TensorSpec
from hvdx.strategies.contract import views
from hvdx.strategies.serving.client import client_of
from tests.strategies.serving.ranks import DOUBLE, SPECS, all_fine, expect_everywhere, flat, run, zeros

ELEMENTS = sum(s.elements for s in SPECS)
SERVERS = {"1": (1, 1), "2": (2, 2), "4": (4, 4), "one of them": ("colocated:1", 0), "two of them": ("colocated:2", 0),
           "all of them": ("colocated", 0)}  # fmt: skip


class Summing(ParameterServer):
    """Parameter server in which each update counts in full, so that sums of whole numbers are exact."""

    def config(self, *arguments, **more):
        return replace(super().config(*arguments, **more), share=1.0)


@pytest.fixture(autouse=True)
def _limit(monkeypatch):
    monkeypatch.setenv("HVDX_TIMEOUT", "20")


def train(strategy, steps, specs=SPECS, begin=None, delay=0.03):
    """Return a worker that adds small whole numbers; it returns their sum, the final weights and its exchange."""

    def work(comm):
        exchange, chance = strategy.open(comm, specs), random.Random(comm.rank)
        numbers = np.random.default_rng(comm.rank)
        weights, total = begin or zeros(specs), flat(zeros(specs)) * 0.0
        exchange.begin(weights)
        for _ in range(steps[comm.rank] if isinstance(steps, list) else steps):
            updates = [numbers.integers(-3, 4, s.shape) for s in specs]
            total = total + flat(updates)
            if chance.random() < delay:
                time.sleep(0.003 * chance.random())
            weights = exchange.step([w + u.astype(w.dtype) for w, u in zip(weights, updates, strict=True)])
        return total, flat(exchange.flush()), exchange

    return work


def check_sum(results, exact=True):
    """Check that weights and residuals add up to the sum of the updates, which is returned."""
    all_fine(results)
    wanted = np.sum([total for total, _, _ in results], axis=0, dtype=np.float64)
    residuals = np.sum([flat(exchange.residuals) for *_, exchange in results], axis=0, dtype=np.float64)
    for _, weights, _ in results:
        assert weights.tobytes() == results[0][1].tobytes()
        if exact:
            np.testing.assert_array_equal(weights + residuals, wanted)
        else:
            np.testing.assert_allclose(weights + residuals, wanted, atol=1e-3)
    return wanted


@pytest.mark.parametrize("rule", [{}, {"staleness": "bound", "max_staleness": 2}], ids=["plain", "bound"])
@pytest.mark.parametrize("servers", SERVERS)
def test_each_update_is_applied_exactly_once(servers, rule):
    strategy, ranks = Summing(SERVERS[servers][0], **rule), SERVERS[servers][1]
    steps = 250
    results = run(4, train(strategy, steps), ranks)
    assert check_sum(results).any()
    for *_, exchange in results:
        counts = exchange.telemetry
        assert counts.steps == steps
        for server in counts.servers:
            assert server[1:5] == (4 * steps, 4 * steps, 4 * steps, 0)
        assert min(counts.staleness) >= 1


@pytest.mark.parametrize("servers", ["1", "4", "two of them", "all of them"])
def test_weights_and_residuals_add_up_to_the_sum_of_the_updates(servers):
    strategy, ranks = Summing(SERVERS[servers][0], codec="threshold:0.2"), SERVERS[servers][1]
    results = run(4, train(strategy, 120, DOUBLE), ranks)
    check_sum(results)
    assert any(flat(exchange.residuals).any() for *_, exchange in results)
    check_sum(run(4, train(strategy, 60), ranks), exact=False)


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_dense_codecs_send_small_whole_numbers_exactly(codec):
    results = run(3, train(Summing(2, codec=codec), 20), 2)
    check_sum(results)


@pytest.mark.parametrize("rule", [{}, {"staleness": "bound", "max_staleness": 0}, {"staleness": "bound"}], ids=str)
def test_workers_may_take_different_numbers_of_steps(rule):
    results = run(4, train(Summing(2, **rule), [10, 120, 0, 61]), 2)
    check_sum(results)


def test_aggregated_updates_are_applied_together():
    results = all_fine(run(4, train(Summing("colocated", aggregate=4), 50)))
    for *_, exchange in results:
        for server in exchange.telemetry.servers:
            assert server[2:4] == (200, 200)
            # Fewer updates are aggregated after some workers have ended.
            assert 50 <= server[1] < 200
    assert len({weights.tobytes() for _, weights, _ in results}) == 1


@pytest.mark.parametrize("servers", ["2", "all of them"])
def test_in_synchronous_training_all_workers_pull_the_same_weights(servers):
    """After each step the weights hold the mean of all updates, on every worker."""
    value, ranks = SERVERS[servers]
    strategy = ParameterServer(value, staleness="bound", max_staleness=0, aggregate=4)

    def work(comm):
        exchange, weights, seen = strategy.open(comm, SPECS), zeros(), []
        exchange.begin(weights)
        for step in range(30):
            weights = exchange.step([w + np.float32(4 * step + 8 * comm.rank) for w in weights])
            seen.append(flat(weights).tolist())
        return seen

    results = all_fine(run(4, work, ranks))
    sums = np.cumsum([4 * step + 12 for step in range(30)])
    for seen in results:
        np.testing.assert_array_equal(seen, np.repeat(sums[:, None], ELEMENTS, axis=1))


def test_double_precision_weights_keep_all_their_bits():
    start = [np.full(s.shape, 2.0**40) for s in DOUBLE]
    results = all_fine(run(2, train(Summing(1), 50, DOUBLE, begin=start), 1))
    wanted = np.sum([total for total, _, _ in results], axis=0)
    assert results[0][1].dtype == np.float64
    np.testing.assert_array_equal(results[0][1] - 2.0**40, wanted)


def test_the_first_weights_are_those_of_worker_0():
    def work(comm):
        exchange = Summing("colocated").open(comm, SPECS)
        exchange.begin([w + np.float32(comm.rank + 5) for w in zeros()])
        return flat(exchange.flush())

    for weights in all_fine(run(3, work)):
        np.testing.assert_array_equal(weights, np.full(ELEMENTS, 5, np.float32))


def test_workers_may_begin_a_session_at_any_time():
    def work(comm):
        exchange, weights = Summing("colocated").open(comm, SPECS), zeros()
        for session in range(3):
            time.sleep(0.05 * ((comm.rank + session) % 3))
            exchange.begin(zeros())
            weights = exchange.step([w + np.float32(1) for w in zeros()])
            weights = exchange.flush()
        return flat(weights)

    for weights in all_fine(run(3, work)):
        np.testing.assert_array_equal(weights, np.full(ELEMENTS, 3))


def test_the_mean_of_n_updates_is_the_step_of_one():
    """By default an update counts 1 / N. If updates are scaled, the share makes up for their staleness."""
    for options, alone in (
        ({}, 0.25),
        ({"staleness": "scale"}, 1.0),
        ({"staleness": "scale", "aggregate": 2}, 0.5),
        ({"staleness": "scale", "staleness_exponent": 0.5}, 0.5),
        ({"staleness": "scale", "staleness_exponent": 2.0, "aggregate": 2}, 1.0),
    ):

        def work(comm, options=options):
            exchange = ParameterServer("colocated:1", **options).open(comm, SPECS)
            exchange.begin(zeros())
            if comm.rank == 2:
                exchange.step([w + np.float32(1) for w in zeros()])
            return flat(exchange.flush())

        for weights in all_fine(run(4, work)):
            np.testing.assert_array_equal(weights, np.full(ELEMENTS, alone, np.float32))


def test_a_synchronous_round_of_scaled_updates_counts_the_harmonic_number():
    strategy = ParameterServer("colocated:1", staleness="scale+bound", max_staleness=0)

    def work(comm):
        exchange = strategy.open(comm, SPECS)
        exchange.begin(zeros())
        exchange.step([w + np.float32(12) for w in zeros()])
        return flat(exchange.flush())

    for weights in all_fine(run(4, work)):
        np.testing.assert_allclose(weights, np.full(ELEMENTS, 12 + 6 + 4 + 3), rtol=1e-6)


def test_two_exchanges_may_be_open_at_once():
    others = [TensorSpec("another", (5, 5), 4)]

    def work(comm):
        chance = random.Random(comm.rank)
        strategy = Summing("colocated:2", staleness="bound", max_staleness=3)
        exchanges = [strategy.open(comm, specs) for specs in (SPECS, others)]
        weights, totals = [zeros(), zeros(others)], [0, 0]
        for exchange, begin in zip(exchanges, weights, strict=True):
            exchange.begin(begin)
        for _ in range(100):
            for i, exchange in enumerate(exchanges):
                number = chance.randint(-9, 9)
                totals[i] += number
                weights[i] = exchange.step([w + np.float32(number) for w in weights[i]])
        return totals, [flat(exchange.flush()) for exchange in exchanges]

    results = all_fine(run(3, work))
    for _, weights in results:
        for i in range(2):
            assert set(weights[i].tolist()) == {sum(totals[i] for totals, _ in results)}


@pytest.mark.parametrize(("servers", "ranks"), [(2, 2), ("colocated", 0)])
def test_an_exchange_may_begin_again_after_its_end(servers, ranks):
    def work(comm):
        exchange, ends = Summing(servers, codec="fp16").open(comm, SPECS), []
        assert not exchange.is_open
        assert exchange.flush() is None
        for session in range(5):
            weights = [w + np.float32(100 * session) for w in zeros()]
            exchange.begin(weights)
            assert exchange.is_open
            for _ in range(1 + comm.rank):
                weights = exchange.step([w + np.float32(1) for w in weights])
            ends.append(flat(exchange.flush()))
            assert not exchange.is_open
        return ends

    for ends in all_fine(run(3, work, ranks)):
        for session, weights in enumerate(ends):
            np.testing.assert_array_equal(weights, np.full(ELEMENTS, 100 * session + 6))


@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 3), (0,)], [()], [(2,), (0,), ()]], ids=str)
@pytest.mark.parametrize("codec", ["none", "threshold:0.5"])
def test_there_may_be_fewer_elements_than_servers(shapes, codec):
    specs = [TensorSpec(str(i), shape, 4) for i, shape in enumerate(shapes)]

    def work(comm):
        exchange = Summing("colocated", codec=codec).open(comm, specs)
        weights = zeros(specs)
        exchange.begin(weights)
        for _ in range(5):
            weights = exchange.step([w + np.float32(1) for w in weights])
        got = [w + u for w, u in zip(exchange.flush(), exchange.residuals, strict=True)]
        return [w.shape for w in got], float(sum(w.sum() for w in got))

    results = all_fine(run(4, work))
    assert all(found == list(shapes) for found, _ in results)
    if codec == "none":
        assert {total for _, total in results} == {20.0 * sum(s.elements for s in specs)}


def test_large_weights_are_divided_into_several_parts():
    specs = [TensorSpec("large", (700_001,), 4), TensorSpec("small", (3,), 4)]
    results = run(2, train(Summing(1), 6, specs), 1)
    check_sum(results)
    assert len(results[0][2].telemetry.servers) > 1


# -- configuration errors ---------------------------------------------------------------------------------------------


def test_different_variables_are_an_error_before_anything_is_sent():
    def work(comm):
        specs = SPECS[:-1] if comm.rank == 2 else SPECS
        Summing("colocated").open(comm, specs)

    expect_everywhere(run(3, work), ReplicaError, "different variables")


def test_different_strategies_are_an_error_before_anything_is_sent():
    def work(comm):
        Summing("colocated", staleness="scale" if comm.rank else "none").open(comm, SPECS)

    expect_everywhere(run(3, work), ReplicaError, "different strategies")


@pytest.mark.parametrize(
    ("strategy", "servers", "match"),
    [
        (ParameterServer("colocated", aggregate=4), 0, "aggregate: expected at most 3"),
        (ParameterServer("colocated:4"), 0, "servers: expected at most 3"),
        (ParameterServer(2), 1, "1 of the ranks only serve"),
        (ParameterServer(1), 0, "all ranks were made workers.*HVDX_STRATEGY=parameter_server:servers=1"),
        (ParameterServer("colocated"), 2, "2 of the ranks only serve"),
    ],
    ids=str,
)
def test_strategies_that_do_not_fit_the_ranks_are_refused_on_all(strategy, servers, match):
    results = run(3, lambda comm: strategy.open(comm, SPECS), servers)
    expect_everywhere(results, ConfigError, match)
    assert all(error.collective for error in results)


def test_a_single_process_serves_itself():
    comm = LocalComm()
    for strategy in (Summing(), Summing(3), Summing("colocated", staleness="bound", max_staleness=0)):
        exchange, weights = strategy.open(comm, SPECS), zeros()
        exchange.begin(weights)
        for step in range(1, 4):
            weights = exchange.step([w + np.float32(step) for w in weights])
            assert set(flat(weights).tolist()) == {step * (step + 1) / 2}
        assert exchange.telemetry.staleness.mean == 1
        assert (exchange.telemetry.sent, exchange.telemetry.received) == (0, 0)
        exchange.flush()
    client_of(comm).close()


# -- refused updates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "fp16", "threshold:0.3"])
@pytest.mark.parametrize("value", [np.nan, np.inf, None], ids=["NaN", "infinity", "gradients"])
def test_updates_that_are_not_finite_are_refused_counted_and_reported(value, codec, capfd):
    """NaN in the weights or in the gradients: the other workers continue, and so does this one."""
    where = f"update of {SPECS[3].name}" if value is not None else "gradient of kernel"

    def work(comm):
        exchange = Summing("colocated:1", codec=codec).open(comm, SPECS)
        weights = zeros()
        exchange.begin(weights)
        before = [flat(weights), flat(exchange.residuals)]
        if comm.rank == 1:
            tensors = [w + np.float32(1) for w in weights]
            if value is not None:
                tensors[3][5] = value
            weights = exchange.take(StepInput(tensors, value is not None, "kernel" if value is None else ""))
            np.testing.assert_array_equal(flat(exchange.residuals), before[1])
        else:
            for _ in range(3):
                weights = exchange.step([w + np.float32(1) for w in weights])
        return flat(exchange.flush()), flat(exchange.residuals), exchange.telemetry

    results = all_fine(run(2, work))
    for weights, _, counts in results:
        if codec != "threshold:0.3":
            np.testing.assert_array_equal(weights, np.full(ELEMENTS, 3))
        ((_, _, updates, applied, refused, *_),) = counts.servers
        assert (updates, applied, refused) == (3, 3, 1)
    assert [counts.skipped for *_, counts in results] == [0, 1]
    # Rank 0 counts the refusals of others too, because users read its history.
    assert [counts.full()["refused_updates"] for *_, counts in results] == [1, 1]
    assert list(results[1][2].staleness) == []
    line = f"hvdx: step 1 of rank 1: its update was refused: it held NaN or infinity in the {where}.\n"
    assert capfd.readouterr().err.count(line) == 1


def test_an_update_is_dropped_as_a_whole_if_one_part_is_refused(capfd):
    """Parts that were already encoded are not sent, and do not change the residual."""

    def work(comm):
        exchange = Summing("colocated", codec="threshold:0.3").open(comm, SPECS)
        exchange.begin(zeros())
        noise = np.random.default_rng(comm.rank).normal(size=(2, ELEMENTS)).astype(np.float32)
        weights = exchange.step(views(noise[0], SPECS))
        before = flat(exchange.residuals)
        if comm.rank == 1:
            noise[1, -1] = 2.0**127
            exchange.step([w + n for w, n in zip(weights, views(noise[1], SPECS), strict=True)])
            np.testing.assert_allclose(flat(exchange.residuals), before, atol=1e-6)
        exchange.flush()
        return exchange.telemetry.skipped

    assert all_fine(run(2, work)) == [0, 1]
    assert f"its update was refused: {SPECS[-1].name}: element" in capfd.readouterr().err


def test_refused_updates_release_waiting_workers():
    def work(comm):
        exchange = Summing(1, staleness="bound", max_staleness=0, aggregate=2).open(comm, SPECS)
        weights = zeros()
        exchange.begin(weights)
        for step in range(20):
            weights = exchange.step([w + np.float32(1) for w in weights], finite=comm.rank == 0 or step % 2 == 0)
        return flat(exchange.flush())

    for weights in all_fine(run(2, work, 1)):
        np.testing.assert_array_equal(weights, np.full(ELEMENTS, 30))


def test_a_long_series_of_refusals_ends_the_training(capfd):
    def work(comm):
        exchange = Summing("colocated:1").open(comm, SPECS)
        exchange.begin(zeros())
        good = 0
        for _ in range(99):
            exchange.step(zeros(), finite=False)
        good = exchange.step(zeros())  # restarts the count
        for _ in range(99):
            exchange.step(zeros(), finite=False)
        assert not flat(good).any()
        exchange.step([w * np.float32(np.nan) for w in zeros()] if comm.rank else zeros(), finite=comm.rank == 0)

    first, second = run(2, work)
    assert first is None
    with pytest.raises(HvdxError, match=r"100 updates in a row of rank 1 .* lower the learning rate"):
        raise second
    printed = capfd.readouterr().err
    assert [f", {n} in a row" in printed for n in (2, 3, 4, 63, 64)] == [True, False, True, False, True]


# -- state ------------------------------------------------------------------------------------------------------------


def saved_by(workers, servers, steps=20, strategy="threshold:0.1"):
    """Return each worker's state and residual after some steps."""

    def work(comm):
        exchange, weights = Summing(servers, codec=strategy).open(comm, SPECS), zeros()
        numbers = np.random.default_rng(comm.rank)
        exchange.begin(weights)
        for _ in range(steps):
            weights = exchange.step([w + numbers.normal(size=w.shape).astype(np.float32) for w in weights])
        exchange.flush()
        return exchange.state_dict(), flat(exchange.residuals)

    return all_fine(run(workers, work))


def restored(workers, servers, arrays_of):
    """Return each worker's state and residual after restoring."""

    def work(comm):
        exchange = Summing(servers, codec="threshold:0.1").open(comm, SPECS)
        exchange.load_state_dict(arrays_of(comm))
        return exchange.state_dict(), flat(exchange.residuals)

    return all_fine(run(workers, work))


@pytest.mark.parametrize("servers", ["colocated:1", "colocated"])
def test_residuals_are_restored_bit_for_bit(servers):
    before = saved_by(2, servers)
    assert all(residuals.any() for _, residuals in before)
    after = restored(2, servers, lambda comm: before[comm.rank][0])
    for (old, _), (new, _) in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        for name, value in old.items():
            assert value.dtype == new[name].dtype
            np.testing.assert_array_equal(value, new[name])


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("servers", ["colocated:1", "colocated"])
def test_residuals_are_distributed_over_another_number_of_workers_and_servers(servers, workers):
    before = saved_by(3, "colocated")
    strategy = Summing(servers, codec="threshold:0.1")
    arrays = [a for a, _ in before]
    after = restored(workers, servers, lambda comm: strategy.merge(arrays, comm.rank, comm.size))
    sums = [np.sum([residuals for _, residuals in side], axis=0, dtype=np.float64) for side in (before, after)]
    np.testing.assert_allclose(sums[0], sums[1], atol=1e-6)


def test_codecs_without_a_residual_have_no_state():
    assert Summing().merge([{}, {}], 0, 1) == {}
    assert Summing().merge([], 0, 1) == {}
    ((arrays, residuals),) = saved_by(1, 1, strategy="fp16")
    assert arrays == {}
    assert not residuals.any()


def test_tensors_added_to_the_residual_are_sent_with_the_next_updates():
    def work(comm):
        exchange, weights = Summing("colocated", codec="threshold:0.5").open(comm, SPECS), zeros()
        exchange.add_to_residual([np.full(s.shape, 3, np.float32) for s in SPECS])
        assert set(flat(exchange.residuals).tolist()) == {3.0}
        exchange.begin(weights)
        for _ in range(4):
            weights = exchange.step(weights)
        return flat(exchange.flush()), flat(exchange.residuals)

    results = all_fine(run(2, work))
    np.testing.assert_array_equal(results[0][0] + results[0][1] + results[1][1], np.full(ELEMENTS, 6))


def test_a_step_returns_new_arrays():
    (comm,) = virtual_world(1)
    exchange = Summing("colocated").open(comm, SPECS)
    exchange.begin(zeros())
    first = exchange.step([w + np.float32(1) for w in zeros()])
    kept = flat(first).copy()
    exchange.step([w + np.float32(1) for w in first])
    np.testing.assert_array_equal(flat(first), kept)
    client_of(comm).close()


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("servers", "ranks"), [(1, 1), ("colocated", 0)])
def test_a_worker_that_waits_too_long_names_the_worker_it_waits_for(servers, ranks, monkeypatch):
    monkeypatch.setenv("HVDX_TIMEOUT", "2")
    gave_up = threading.Semaphore(0)

    def work(comm):
        exchange = Summing(servers, staleness="bound", max_staleness=0).open(comm, SPECS)
        exchange.begin(zeros())
        if comm.rank == 1:
            # Connected but idle until both others have given up.
            assert gave_up.acquire(timeout=20)
            assert gave_up.acquire(timeout=20)
            return
        try:
            for _ in range(2):
                exchange.step(zeros())
        finally:
            gave_up.release()

    begin = time.monotonic()
    first, second, third = run(3, work, ranks)
    assert time.monotonic() - begin < 10
    assert second is None
    with pytest.raises(
        ExchangeError, match=r"rank 0 has been waiting for 2 s; the servers? waits? for worker 1\b.*HVD"
    ):
        raise first
    with pytest.raises(ExchangeError, match=r"rank 2 has been waiting .* worker 1\b"):
        raise third


def test_a_server_that_never_answers_is_named(monkeypatch):
    monkeypatch.setenv("HVDX_TIMEOUT", "1")
    comm, _ = virtual_world(1, 1)
    exchange = Summing(1).open(comm, SPECS)
    with pytest.raises(ExchangeError, match=r"no answer from the server at rank 1\b"):
        exchange.begin(zeros())
    client_of(comm).close()


def test_no_worker_waits_for_one_that_failed():
    def work(comm):
        exchange = Summing("colocated", staleness="bound", max_staleness=0).open(comm, SPECS)
        weights = zeros()
        exchange.begin(weights)
        for step in range(10):
            if comm.rank == 1 and step == 4:
                raise RuntimeError("a script's own")
            weights = exchange.step([w + np.float32(1) for w in weights])
        return flat(exchange.flush())

    first, second, third = run(3, work)
    assert isinstance(second, RuntimeError)
    for weights in (first, third):
        np.testing.assert_array_equal(weights, np.full(ELEMENTS, 24))


@pytest.mark.parametrize(("servers", "ranks"), [(1, 1), ("colocated", 0), ("colocated:1", 0)])
def test_an_exchange_without_steps_ends_at_once(servers, ranks):
    def work(comm):
        Summing(servers).open(comm, SPECS).begin(zeros())
        return comm.rank

    begin = time.monotonic()
    assert all_fine(run(3, work, ranks)) == [0, 1, 2]
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("codec", ["none", "fp16"])
@pytest.mark.parametrize("servers", ["1", "one of them", "all of them"])
def test_sent_and_received_bytes_are_counted(servers, codec):
    """Colocated servers count for their rank: all sent bytes are received, except for those of the first weights."""
    steps, workers, specs = 10, 3, [TensorSpec("a", (50, 40), 4)]
    strategy, ranks = Summing(SERVERS[servers][0], codec=codec), SERVERS[servers][1]
    results = all_fine(run(workers, train(strategy, steps, specs), ranks))
    sent, received = (sum(getattr(e.telemetry, name) for *_, e in results) for name in ("sent", "received"))
    if not ranks:
        assert 0 <= sent - received < 8000 + 1000
    update = 8000 if codec == "none" else 4000
    # Colocated servers also send answers; messages of a rank to itself are not counted.
    expected = workers * steps * update if ranks else (workers - 1) * steps * (update + 8000)
    # The first and the final weights are sent in addition to the steps.
    assert expected <= sent <= expected + 5 * 8000 + 88 * (steps + 2) * 2 * workers * workers
