"""Choice of the number of steps between two exchanges."""

import numpy as np
import pytest

from hvdx.costs.types import Link
from hvdx.strategies.threshold.density import MAX_PERIOD, MIN_DENSITY, DensityControl, PeriodControl, period_for


def train(fixed, computing=0.01, latency=1e-4, noise=0.1, steps=3000, longest=MAX_PERIOD):
    """Return the costs of a simulated training, relative to computing, its densities and periods, for each exchange."""
    random, control = np.random.default_rng(0), DensityControl(0.1, Link(latency, 1e8), 1, 1_000_000, longest)
    costs, densities, periods, since = [], [], [], 0
    while since < steps:
        period, density = control.period, control.density
        cost = (fixed + 0.02 * density) * (1 + noise * abs(random.normal())) + 0.01 * (random.random() < 1 / 30)
        control.observe(period * computing * (1 + noise * abs(random.normal())), [cost, cost])
        costs.append(cost / (period * computing))
        densities.append(density)
        periods.append(period)
        since += period
    return np.array(costs), np.array(densities), np.array(periods)


@pytest.mark.parametrize("fixed", [1e-4, 1e-3, 3e-3, 1e-2])
def test_exchange_keeps_its_budget_whatever_does_not_depend_on_the_density(fixed):
    costs, densities, periods = train(fixed)
    settled = slice(2 * len(costs) // 3, None)
    assert np.median(costs[settled]) < 0.115
    assert 0.5 <= periods[-1] / max(1, fixed / (0.5 * 0.1 * 0.01)) <= 2
    assert len(set(periods[settled])) <= 2
    # Half of the budget is left for entries.
    assert np.median(densities[settled]) > 0.01


def test_budget_is_exceeded_without_a_longer_period():
    costs, _, periods = train(3e-3, longest=1)
    assert np.median(costs[-100:]) > 0.3
    assert set(periods) == {1}


def test_latency_of_the_link_makes_the_first_period_long():
    _, _, periods = train(0.02, latency=0.02)
    assert periods[1:3].tolist() == [1, MAX_PERIOD]
    _, densities, periods = train(2e-5, latency=2e-5)
    assert set(periods) == {1}
    assert densities[-1] > 0.03


def test_restored_period_and_density_are_not_guessed_again():
    control = DensityControl(0.1, Link(2e-5, 1e5), 1, 1_000_000, MAX_PERIOD)
    control.restore(0.05, period=6)
    for _ in range(4):
        control.observe(computing=0.06, costs=[0.001])
    assert (control.period, control.density) == (6, 0.05)


def test_period_is_shortened_if_computing_takes_longer():
    control = PeriodControl(MAX_PERIOD)
    for _ in range(6):
        control.review(fixed=0.01, budget=0.001 * control.period)
    assert control.period == 20
    for _ in range(20):
        control.review(fixed=0.01, budget=0.02 * control.period)
    assert control.period == 2


def test_one_review_changes_nothing():
    control = PeriodControl(MAX_PERIOD)
    assert not control.review(0.01, 0.001)
    assert not control.review(0.0004, 0.001)
    assert not control.review(0.01, 0.001)
    assert control.period == 1


def test_period_is_unknown_without_computing():
    assert period_for(0.01, 0.0) == 1
    control = DensityControl(0.1, Link(0.01, 1e8), 1, 1000, MAX_PERIOD)
    for _ in range(30):
        control.observe(0.0, [0.01])
    assert (control.period, control.density) == (1, MIN_DENSITY)
