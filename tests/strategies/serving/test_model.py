"""Properties that hold in every order of messages, for two workers, two servers and a few steps."""

# Tests: hvdx/strategies/serving/client.py, hvdx/strategies/serving/server.py, hvdx/strategies/serving/shard.py

import numpy as np
import pytest

from tests.strategies.serving.model import WORKER_RANKS, BrokenError, Model

RULES = {
    "plain": {},
    "aggregate": {"aggregate": 2, "share": 0.5},
    "bound 0": {"max_staleness": 0},
    "bound 1": {"max_staleness": 1},
    "bound 2": {"max_staleness": 2},
    "synchronous": {"max_staleness": 0, "aggregate": 2, "share": 0.5},
    "bound 1, aggregate": {"max_staleness": 1, "aggregate": 2, "share": 0.5},
    "scale": {"staleness_exponent": 1.0},
    "scale, bound, aggregate": {"staleness_exponent": 1.0, "max_staleness": 1, "aggregate": 2, "share": 0.5},
}
STEPS = [(1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 3)]
_explored: dict[str, int] = {}


def program(steps, *end):
    return (*["push"] * steps, *(end or ("flush", "leave")))


def explore(rule, programs, room=3, end=lambda workers, weights: None, **more):
    """Visit all states. In the last ones the weights hold each update that was pushed exactly once, and no other."""

    def check(workers):
        for server in range(2):
            weights = np.frombuffer(next(w.finals[-1][server] for w in workers if w.finals)).reshape(2, room)
            for w in WORKER_RANKS:
                sent = [op != "nan" for op in programs[w] if op in ("push", "nan", "drop")]
                if not any(isinstance(op, tuple) for op in programs[w]):
                    np.testing.assert_array_equal(weights[w] > 0, [*sent, *[False] * (room - len(sent))])
                else:
                    np.testing.assert_array_equal(weights[w] > 0, np.arange(room) < workers[w].taken)
            share = rule.get("share", 1.0)
            if rule.get("staleness_exponent", 0) == 0:
                assert ((weights == 0) | (weights == share)).all(), "an update counted wrongly"
            assert weights.max() <= share, "an update was applied twice"
            end(workers, weights)

    model = Model(rule, tuple(programs), room, end=check, **more)
    states = model.explore()
    name = f"{rule} {programs}"
    _explored[name] = states
    return states


@pytest.fixture(scope="module", autouse=True)
def _print_number_of_states():
    yield
    print(f"\n{sum(_explored.values())} states of {len(_explored)} models explored")


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_order_keeps_the_promises(rule, steps):
    assert explore(RULES[rule], [program(n) for n in steps]) > 20


@pytest.mark.parametrize("rule", RULES)
def test_no_worker_waits_for_one_that_left(rule):
    for early in (("leave",), ("drop",), ("push", "leave"), ("push", "drop")):
        explore(RULES[rule], [early, program(2)])
        explore(RULES[rule], [program(2), early])


@pytest.mark.parametrize("rule", RULES)
def test_refused_updates_count_as_steps_and_add_nothing(rule):
    explore(RULES[rule], [("nan", "push", "flush", "leave"), program(2)])
    explore(RULES[rule], [program(2), ("push", "nan", "flush", "leave")])
    explore(RULES[rule], [("nan", "flush", "leave"), ("nan", "nan", "flush", "leave")])


@pytest.mark.parametrize("rule", RULES)
def test_several_epochs_follow_each_other(rule):
    two = ("push", "flush", "push", "flush", "leave")
    explore(RULES[rule], [two, two])
    explore(RULES[rule], [two, ("push", "push", "flush", "flush", "leave")])


@pytest.mark.parametrize("rule", ["plain", "aggregate", "bound 0", "synchronous", "scale"])
def test_workers_take_exactly_the_steps_of_an_epoch(rule):
    """Each worker takes its first step without a request; a second round starts from zero."""
    shares = set()

    def count(workers, _):
        assert sum(w.taken for w in workers) == 4
        shares.add(tuple(w.taken for w in workers))

    epoch = ("push", ("ask", 1, 2), "flush", "leave")
    explore(RULES[rule], [epoch, epoch], end=count)
    # With max_staleness=0 no worker gets ahead.
    assert shares == {(2, 2)} | ({(1, 3), (3, 1)} if RULES[rule].get("max_staleness") != 0 else set())
    rounds = ("push", ("ask", 1, 1), "flush", "push", ("ask", 2, 0), "flush", "leave")

    def count_rounds(workers, _):
        assert sum(w.taken for w in workers) == 5

    explore(RULES[rule], [rounds, rounds], end=count_rounds)


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_max_staleness_0_and_aggregating_all_is_synchronous_training(steps):
    """After step k each worker has all updates up to k, from the workers that take part in those steps."""

    def expected(step):
        weights = np.zeros((2, 3))
        for k in range(step):
            taking_part = [w for w in WORKER_RANKS if steps[w] > k]
            weights[taking_part, k] = 0.5
        return weights

    def seen(worker, step, weights):
        for part in weights:
            np.testing.assert_array_equal(part.reshape(2, 3), expected(step))

    def end(_, weights):
        np.testing.assert_array_equal(weights, expected(max(steps)))

    explore(RULES["synchronous"], [program(n) for n in steps], seen=seen, end=end)


def test_search_finds_a_worker_that_waits_forever():
    """Test of the search itself: it reports a state without an end."""
    with pytest.raises(BrokenError, match=r"worker 0 waits for servers .* forever"):
        explore({}, [program(1), ("push",)])
