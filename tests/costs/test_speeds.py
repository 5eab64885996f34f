"""Ranks of unequal speed that divide the rows of each step, in simulated time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdx.costs.speeds import Balancer, Speed, divided, slowest
from hvdx.errors import ConfigError

# Steps from a decision to the first batch that it changes: those that the pipelines have drawn.
_AHEAD = 6
speeds = st.tuples(st.floats(0, 2), st.floats(0.001, 1)).map(lambda both: Speed(*both))


def trained(times, steps, total=96, noise=0.0, exchange=0.01, seed=0):
    """Train with ranks whose computing takes `times(step)` seconds of all rows; return seconds of each step."""
    random, size = np.random.default_rng(seed), len(times(0))
    balancers = [Balancer(total) for _ in range(size)]
    waiting, rows, latest, first, seconds = [], [total // size] * size, [total // size] * size, True, []
    for step in range(steps):
        if waiting and waiting[0][0] <= step:
            rows = waiting.pop(0)[1]
        computing = np.array(times(step)) * rows / total * (1 + noise * random.exponential(size=size))
        seconds.append(computing.max() + exchange)
        for balancer, mine, own in zip(balancers, rows, computing, strict=True):
            balancer.add(mine, own, seconds[-1])
        if balancers[0].is_due:
            told = [b.tell() for b in balancers]
            decisions = [b.decide(told, latest, first) for b in balancers]
            assert all(d == decisions[0] for d in decisions)
            if decisions[0] is not None:
                latest, first = decisions[0], False
                assert (sum(latest), min(latest) >= 1) == (total, True)
                waiting.append((step + _AHEAD, latest))
    return np.array(seconds), rows


@given(st.lists(speeds, min_size=1, max_size=8), st.integers(0, 300))
def test_rows_add_up_and_no_other_division_of_whole_rows_ends_earlier_by_more_than_one(ranks, more):
    total = len(ranks) + more
    rows = divided(total, ranks)
    assert (sum(rows), min(rows) >= 1) == (total, True)
    # A row less on the slowest rank would be one more on another.
    worst = max(range(len(rows)), key=lambda r: ranks[r].seconds(rows[r]))
    for other in range(len(rows)):
        if other != worst and rows[worst] > 1:
            moved = [r + (i == other) - (i == worst) for i, r in enumerate(rows)]
            assert slowest(ranks, moved) >= slowest(ranks, rows) - 1e-9


@given(st.lists(speeds, min_size=2, max_size=6), st.integers(0, 100), st.data())
def test_each_rank_has_the_fewest_rows_that_it_may_have(ranks, more, data):
    total = len(ranks) + more
    least = data.draw(st.integers(1, total // len(ranks)))
    most = [data.draw(st.integers(1, total)) for _ in ranks]
    if sum(most) < total:
        with pytest.raises(ConfigError, match="and a step has"):
            divided(total, ranks, least, most)
        most = [total] * len(ranks)
    rows = divided(total, ranks, least, most)
    assert sum(rows) == total
    assert all(min(least, m) <= r <= m for r, m in zip(rows, most, strict=True))


def test_a_rank_that_dies_or_has_too_many_rows_gives_them_to_the_others_at_once():
    balancer = Balancer(96)
    told = [balancer.tell(), balancer.tell(20), balancer.tell()]
    assert balancer.decide(told, [32, 32, 32], True) == [38, 20, 38]
    assert balancer.decide(told, [40, 20, 20], False) == [51, 20, 25]
    assert balancer.decide(told, [40, 20, 36], False) is None


def test_a_rank_that_dies_between_two_windows_leaves_no_division_behind():
    balancers, rows = [Balancer(96) for _ in range(3)], [32, 32, 32]
    for living in (3, 3, 2, 2):
        for _ in range(8):
            for rank, balancer in enumerate(balancers[:living]):
                balancer.add(rows[rank], (0.9, 1.0, 1.1)[rank], 1.1)
        told = [b.tell() for b in balancers[:living]]
        rows = balancers[0].decide(told, rows[:living], True) or rows
    assert (len(rows), sum(rows)) == (2, 96)


def test_equal_ranks_keep_their_rows_whatever_the_noise():
    for seed in range(20):
        _, rows = trained(lambda _: [1.0] * 4, 400, noise=0.1, seed=seed)
        assert rows == [24] * 4, (seed, rows)


def test_pauses_at_random_move_few_rows():
    # Mean of the largest of four exponential numbers; if each window counted alone, steps would take 1.053 times that.
    even = (1 + 0.5 * (1 + 1 / 2 + 1 / 3 + 1 / 4)) / 4 + 0.01
    seconds = [trained(lambda _: [1.0] * 4, 400, noise=0.5, seed=seed)[0].mean() for seed in range(10)]
    assert np.mean(seconds) <= 1.035 * even


@pytest.mark.parametrize(("times", "goal"), [([1, 1, 1, 10], 0.15), ([1, 2], 0.70)])
def test_a_slow_rank_costs_little(times, goal):
    even = max(times) / len(times) + 0.01
    seconds, _ = trained(lambda _: times, 300, noise=0.02)
    assert seconds[30:].mean() / even <= goal


def test_eight_ranks_do_nearly_what_their_speeds_add_up_to():
    for seed in range(5):
        speed = np.random.default_rng(seed).uniform(1, 4, 8)
        seconds, _ = trained(lambda _, s=speed: 4 / s, 400, total=512, noise=0.02, exchange=0.0, seed=seed)
        ideal = 4 / speed.sum()
        assert ideal / seconds[30:].mean() >= 0.93, (seed, ideal / seconds[30:].mean())


def test_a_speed_that_changes_is_followed_within_twenty_steps():
    for slow, fast in (([1, 1, 1, 4], [1, 1, 1, 1]), ([1, 1, 1, 1], [1, 1, 1, 3]), ([1, 2, 1, 4], [3, 1, 1, 2])):
        seconds, _ = trained(lambda step, a=slow, b=fast: a if step < 100 else b, 200, exchange=0.0)
        ideal = 1 / sum(1 / t for t in fast)
        assert seconds[120:].mean() <= 1.05 * ideal + 1 / 96, (slow, fast, seconds[120:140] / ideal)


def test_a_fixed_cost_of_each_step_is_found():
    ranks = [Speed(0.5, 0.01)] * 3 + [Speed(0.2, 0.04)]
    balancers, rows = [Balancer(96) for _ in ranks], [24] * 4
    for _ in range(60):
        computing = [speed.seconds(r) for speed, r in zip(ranks, rows, strict=True)]
        for balancer, mine, own in zip(balancers, rows, computing, strict=True):
            balancer.add(mine, own, max(computing))
        if balancers[0].is_due:
            told = [b.tell() for b in balancers]
            rows = [b.decide(told, rows, False) for b in balancers].pop() or rows
    assert slowest(ranks, rows) <= 1.02 * slowest(ranks, divided(96, ranks))
