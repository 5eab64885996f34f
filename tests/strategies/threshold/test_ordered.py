"""Asynchronous trainings on virtual ranks: each message counts once on every rank, and every wait ends."""

# Tests: hvdx/strategies/threshold/session_mailbox.py

import random
import threading
import time

import numpy as np
import pytest

from hvdx.errors import ConfigError, ExchangeError, HvdxError, ReplicaError, WireError
from hvdx.strategies import StepInput, TensorSpec, Threshold, parse
from hvdx.strategies.threshold import replica
from tests.strategies.serving.ranks import DOUBLE, SPECS, all_fine, expect_everywhere, flat, run, zeros

ELEMENTS = sum(s.elements for s in SPECS)


@pytest.fixture(autouse=True)
def _limit(monkeypatch):
    monkeypatch.setenv("HVDX_TIMEOUT", "20")


class Summing(Threshold):
    """Strategy in which each update counts in full, so that sums of whole numbers are exact."""

    def open(self, comm, *arguments):
        exchange = super().open(comm, *arguments)
        exchange.encoder.correction = float
        return exchange


def whole():
    """Return a strategy that sends updates of whole numbers in full."""
    return Summing(tau=1.0, lookahead=0, max_staleness="inf")


def sparse(**options):
    return Threshold(max_staleness="inf", **{"target_density": 0.3, "lookahead": 0} | options)


def normal(numbers, shape):
    return numbers.normal(size=shape)


def train(strategy, steps, specs=SPECS, epochs=1, update=None, delay=0.1):
    """Return a worker that adds updates; it returns their sum, the final weights of each epoch, and its exchange."""

    def work(comm):
        exchange, chance = strategy.open(comm, specs), random.Random(comm.rank)
        numbers = np.random.default_rng(comm.rank)
        draw = update or (lambda numbers, shape: numbers.integers(-3, 4, shape))
        weights, total, finals = zeros(specs), np.zeros(ELEMENTS), []
        for _ in range(epochs):
            exchange.begin(weights)
            for _ in range(steps[comm.rank]):
                updates = [np.asarray(draw(numbers, s.shape), np.float32) for s in specs]
                total = total + flat(updates)
                if chance.random() < delay:
                    time.sleep(0.004 * chance.random())
                weights = exchange.step([w + u.astype(w.dtype) for w, u in zip(weights, updates, strict=True)])
            weights = exchange.flush()
            finals.append(flat(weights).copy())
        exchange.close()
        return total, finals, exchange

    return work


def test_each_message_is_applied_exactly_once_on_every_rank():
    results = all_fine(run(4, train(whole(), [40, 90, 60, 60], epochs=2)))
    total = np.sum([total for total, *_ in results], axis=0)
    for _, finals, exchange in results:
        np.testing.assert_array_equal(finals[-1], total)
        assert not flat(exchange.residuals).any()
        assert exchange.telemetry.steps == sum(exchange.telemetry.staleness.values())


def test_those_who_live_go_on_with_the_newest_weights():
    """The ranks meet as after a death, with messages in flight: each message counts once nevertheless."""

    def work(comm):
        comm.survives = True
        exchange, chance = whole().open(comm, SPECS), random.Random(comm.rank)
        numbers, weights, total = np.random.default_rng(comm.rank), zeros(), np.zeros(ELEMENTS)
        exchange.begin(weights)
        for meeting in range(10):
            if meeting:
                assert not exchange._meet(finished=False)
            for _ in range(chance.randrange(1, 12)):
                updates = [numbers.integers(-3, 4, s.shape).astype(np.float32) for s in SPECS]
                total += flat(updates)
                weights = exchange.step([w + u for w, u in zip(weights, updates, strict=True)])
        return total, flat(exchange.flush()).copy(), exchange

    results = all_fine(run(3, work))
    for _, final, exchange in results:
        np.testing.assert_array_equal(final, np.sum([total for total, *_ in results], axis=0))
        assert not flat(exchange.residuals).any()


@pytest.mark.parametrize("options", [{}, {"warmup": "density:9"}, {"target_density": "auto"}])
def test_final_weights_have_the_same_bits_on_all_ranks(options):
    """Sums of floats depend on their order, so equal bits show that all ranks applied the messages in one order."""
    strategy = sparse(**options)
    results = all_fine(run(3, train(strategy, [30, 50, 12], epochs=2, update=normal)))
    for epoch in range(2):
        assert len({finals[epoch].tobytes() for _, finals, _ in results}) == 1
    applied = 3 * results[0][1][-1].astype(np.float64)
    residuals = np.sum([flat(exchange.residuals) for *_, exchange in results], axis=0, dtype=np.float64)
    np.testing.assert_allclose(applied + residuals, np.sum([t for t, *_ in results], axis=0), atol=1e-4)


def test_double_precision_weights_keep_all_their_bits():
    begin = [w + 1e-12 for w in zeros(DOUBLE)]

    def work(comm):
        exchange = whole().open(comm, DOUBLE)
        exchange.begin(begin)
        exchange.step([w + 1 for w in begin])
        return flat(exchange.flush())

    for weights in all_fine(run(2, work)):
        np.testing.assert_array_equal(weights, np.full(ELEMENTS, 2 + 1e-12))


def test_nobody_waits_for_a_stopped_rank_until_its_messages_fill_up(monkeypatch):
    monkeypatch.setattr(replica, "MOST_AHEAD", 64)
    finished = threading.Semaphore(0)

    def work(comm):
        exchange, weights = whole().open(comm, SPECS), zeros()
        exchange.begin(weights)
        if comm.rank == 1:
            assert finished.acquire(timeout=15)
            assert finished.acquire(timeout=15)
        for _ in range(5 if comm.rank == 1 else 60):
            weights = exchange.step([w + np.float32(1) for w in weights])
        finished.release()
        return flat(exchange.flush())

    for weights in all_fine(run(3, work)):
        np.testing.assert_array_equal(weights, np.full(ELEMENTS, 125))


def test_a_rank_that_stays_stopped_is_named(monkeypatch):
    monkeypatch.setenv("HVDX_TIMEOUT", "1")
    gave_up = threading.Semaphore(0)

    def work(comm):
        exchange, weights = whole().open(comm, SPECS), zeros()
        exchange.begin(weights)
        if comm.rank == 2:
            assert gave_up.acquire(timeout=15)
            assert gave_up.acquire(timeout=15)
            return comm.rank
        try:
            for _ in range(100):
                weights = exchange.step([w + np.float32(1) for w in weights])
        finally:
            gave_up.release()

    *others, stopped = run(3, work)
    assert stopped == 2
    expect_everywhere(
        others, ExchangeError, r"messages to be applied: rank [01] has been waiting .* for rank 2\. .*HVDX"
    )


def test_a_flush_names_the_ranks_that_do_not_flush(monkeypatch):
    monkeypatch.setenv("HVDX_TIMEOUT", "1")

    def work(comm):
        exchange = whole().open(comm, SPECS)
        exchange.begin(zeros())
        if comm.rank != 1:
            return exchange.flush()
        raise RuntimeError("a script's own")

    first, second, third = run(3, work)
    assert isinstance(second, RuntimeError)
    expect_everywhere([first, third], ExchangeError, r"a flush: .* for rank 1\.")


def test_own_messages_count_before_they_have_a_place():
    """A rank whose messages are not placed yet returns weights that hold them, once."""
    go = threading.Event()

    def work(comm):
        exchange, weights = whole().open(comm, SPECS), zeros()
        exchange.begin(weights)
        seen = []
        if comm.rank == 0:
            with exchange._mailbox.lock:  # nothing is placed
                assert go.wait(15)
        else:
            for _ in range(4):
                weights = exchange.step([w + np.float32(1) for w in weights])
                seen.append(float(flat(weights)[0]))
            go.set()
        return seen, flat(exchange.flush())

    (_, first), (seen, second) = all_fine(run(2, work))
    assert seen == [1, 2, 3, 4]
    np.testing.assert_array_equal(first, np.full(ELEMENTS, 4))
    np.testing.assert_array_equal(second, first)


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_sessions_begin_with_the_weights_of_rank_0_which_travel_only_if_they_changed():
    specs = [TensorSpec("w", (5000,), 4)]

    def work(comm):
        exchange = whole().open(comm, specs)
        finals, sent = [np.zeros(5000, np.float32)], [0]
        for change in (1.0, 0.0, 5.0):
            begin = finals[-1] + np.float32(change * (comm.rank + 1))
            exchange.begin([begin])
            exchange.step([begin])
            finals.append(exchange.flush()[0])
            sent.append(exchange.telemetry.sent)
        return finals[1:], np.diff(sent)

    results = all_fine(run(3, work))
    for finals, _ in results:
        for weights, value in zip(finals, (1, 1, 6), strict=True):
            np.testing.assert_array_equal(weights, np.full(5000, value))
    weights = 4 * 5000
    sent = results[0][1]
    assert min(sent[0], sent[2]) > 2 * weights > 4 * sent[1]


def test_another_session_after_an_exception_begins_anew():
    def work(comm):
        exchange = whole().open(comm, SPECS)
        exchange.begin(zeros())
        if comm.rank == 0:
            exchange.step([w + np.float32(9) for w in zeros()])
        exchange.renew()
        exchange.begin(zeros())
        exchange.step([w + np.float32(1) for w in zeros()])
        return flat(exchange.flush())

    for weights in all_fine(run(3, work)):
        np.testing.assert_array_equal(weights, np.full(ELEMENTS, 3))


def test_two_exchanges_may_be_open_at_once():
    def work(comm):
        exchanges, weights = [whole().open(comm, SPECS), whole().open(comm, SPECS)], [zeros(), zeros()]
        for exchange in exchanges[:: 1 if comm.rank else -1]:
            exchange.begin(zeros())
        for step in range(20):
            which = (step + comm.rank) % 2
            weights[which] = exchanges[which].step([w + np.float32(1 + which) for w in weights[which]])
        return [flat(exchange.flush())[0] for exchange in exchanges]

    for sums in all_fine(run(2, work)):
        assert sums == [20, 40]


def test_one_rank_trains_alone():
    (result,) = all_fine(run(1, train(whole(), [7], epochs=2)))
    np.testing.assert_array_equal(result[1][-1], result[0])
    assert result[2].telemetry.staleness == {1: 14}


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["gradient", "update"])
def test_nan_on_one_rank_skips_the_step_on_that_rank_alone(where, capfd):
    def work(comm):
        exchange, weights = sparse().open(comm, SPECS), zeros()
        exchange.begin(weights)
        for step in range(12):
            bad = comm.rank == 1 and step in (3, 4)
            value = np.float32(np.nan if bad and where == "update" else 0.5)
            before = flat(exchange.residuals).copy()
            finite = not (bad and where == "gradient")
            weights = exchange.take(StepInput([w + value for w in weights], finite, "kernel" if bad else ""))
            if bad:
                np.testing.assert_allclose(flat(exchange.residuals), before, atol=1e-6)
            assert np.isfinite(flat(weights)).all()
        return flat(exchange.flush()).tobytes(), exchange.telemetry.skipped

    results = all_fine(run(3, work))
    assert len({weights for weights, _ in results}) == 1
    assert [skipped for _, skipped in results] == [0, 2, 0]
    said = capfd.readouterr().err
    assert "step 4 of rank 1: " in said
    assert ("kernel" if where == "gradient" else "variable 0: ") in said


def test_endless_nan_ends_the_training():
    def work(comm):
        exchange, weights = whole().open(comm, SPECS), zeros()
        exchange.begin(weights)
        for _ in range(200):
            weights = exchange.step(weights, False)

    expect_everywhere(run(1, work), HvdxError, "100 steps in a row were skipped on rank 0")


def test_a_damaged_message_names_its_sender():
    def work(comm):
        exchange, weights = sparse().open(comm, SPECS), zeros()
        exchange.begin(weights)
        if comm.rank == 1:
            encode = exchange.encoder.encode

            def cut(*arguments):
                encoded = encode(*arguments)
                return encoded._replace(message=encoded.message[:-1])

            exchange.encoder.encode = cut
        for _ in range(3):
            weights = exchange.step([w + np.float32(1) for w in weights])
        exchange.flush()

    expect_everywhere(run(2, work), WireError, "update of rank 1: ")


# -- figures, state and options ---------------------------------------------------------------------------------------


def test_mean_staleness_of_ranks_in_turn_is_their_number():
    turn = [threading.Semaphore(int(r == 0)) for r in range(3)]

    def work(comm):
        exchange, weights = whole().open(comm, SPECS), zeros()
        exchange.begin(weights)
        for _ in range(20):
            assert turn[comm.rank].acquire(timeout=15)
            weights = exchange.step([w + np.float32(1) for w in weights])
            # The message arrives before the next turn; one that comes later is a step staler.
            time.sleep(0.02)
            turn[(comm.rank + 1) % 3].release()
        exchange.flush()
        return exchange.telemetry

    for counts in all_fine(run(3, work)):
        assert 2 < counts.staleness.mean <= 3.4
        assert counts.sent > 0 < counts.received
        assert counts.live().keys() == {"staleness", "density", "MB_sent"}
        assert counts.full()["max_staleness"] >= 2


def test_updates_of_adam_are_scaled_by_their_sender():
    """Gradients of noise alone: the steps of the mean gradient are longer by the root of the number of ranks."""
    turn = threading.Barrier(4)

    def work(comm):
        exchange, noise = sparse(target_density=0.9).open(comm, SPECS), np.random.default_rng(comm.rank)
        exchange.begin(zeros())
        weights = zeros()
        for _ in range(60):
            sample = [noise.normal(size=64).astype(np.float32)]
            tensors = [w + np.asarray(normal(noise, w.shape), np.float32) for w in weights]
            turn.wait(20)
            weights = exchange.take(StepInput(tensors, sample=sample))
        return flat(exchange.flush()).tobytes(), exchange.encoder.correction(4) / 4

    results = all_fine(run(4, work))
    assert len({weights for weights, _ in results}) == 1
    for _, scale in results:
        assert 0.8 / 2 < scale < 1.1 / 2


def test_restored_residuals_are_sent():
    def first(comm):
        exchange = Threshold(tau=1.0, lookahead=0, max_staleness="inf").open(comm, SPECS)
        exchange.begin(zeros())
        exchange.step([w + np.float32(0.75) for w in zeros()])
        exchange.flush()
        return exchange.state_dict()

    saved = all_fine(run(2, first))

    def second(comm):
        strategy = Threshold(tau=1.0, lookahead=0, max_staleness="inf")
        exchange = strategy.open(comm, SPECS)
        exchange.load_state_dict(strategy.merge(saved, comm.rank, comm.size))
        exchange.begin(zeros())
        exchange.step([w + np.float32(0.25) for w in zeros()])
        return flat(exchange.flush())

    for weights in all_fine(run(2, second)):
        np.testing.assert_array_equal(weights, np.ones(ELEMENTS))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_staleness": 4}, "expected 0 or 'inf', got 4. A bound between them was removed"),
        ({"max_staleness": True}, "expected 0 or 'inf'"),
        ({"max_staleness": "inf", "placement": "gradient"}, "placement='gradient'"),
        ({"max_staleness": "inf", "device": "cuda"}, "device='cuda'"),
        ({"max_staleness": "inf", "exchange": "sharded"}, "exchange='sharded'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        Threshold(**options)


def test_one_line_spellings():
    strategy = parse("threshold:max_staleness=inf")
    assert repr(strategy) == "Threshold(max_staleness='inf')"
    assert strategy.asynchronous
    assert not parse("threshold:max_staleness=0").asynchronous
    assert repr(parse("threshold:max_staleness=0")) == "Threshold()"


def test_ranks_with_other_options_are_refused():
    density = {0: 0.1, 1: 0.2}
    results = run(2, lambda comm: sparse(target_density=density[comm.rank]).open(comm, SPECS))
    expect_everywhere(results, ReplicaError, "different strat")
