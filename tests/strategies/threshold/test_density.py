"""Control of the density on simulated links, whose token buckets let bursts pass faster than the rate."""

import numpy as np
import pytest

from hvdx.costs.sizes import message_bytes
from hvdx.costs.types import Link
from hvdx.strategies.threshold.density import (
    INITIAL_DENSITY,
    MAX_DENSITY,
    MIN_DENSITY,
    DensityControl,
    affordable_density,
)

_ELEMENTS, _COMPUTING, _STEPS, _SETTLING = 1_863_690, 0.013, 400, 100


def train(rate, bucket, size, seed, fixed=8e-4, overhead=0.1, steps=_STEPS, noise=0.1):
    """Return the costs and the densities of the steps of a simulated training.

    Args:
        rate: bits per second of each link.
        bucket: bytes that pass at once after a pause.
        size: number of ranks.
        seed: seed of the noise: steps that take up to a third longer, and a pause of 10 ms in one step of 30.
        fixed: seconds of encoding that do not depend on the density.
        overhead: budget as a share of computing.
        steps: number of steps.
        noise: standard deviation of costs: of half of a normal distribution, and of a mean that drifts.
    """
    random, bandwidth, tokens = np.random.default_rng(seed), rate / 8, bucket
    # The probe's messages pass in the bucket, so it takes the link for a faster one.
    control = DensityControl(overhead, Link(1e-4, 25 * bandwidth if bucket > 1e5 else bandwidth), size - 1, _ELEMENTS)
    costs, densities, drift = [], [], 1.0
    for _ in range(steps):
        density = control.density
        sent = (size - 1) * (message_bytes(_ELEMENTS, density) + 100)
        queued = max(0.0, sent - tokens) / bandwidth
        cost = 1e-4 * size + queued + fixed + 25e-9 * _ELEMENTS * density * (1 + size)
        computing = _COMPUTING * (1 + 0.1 * abs(random.normal()))
        cost = cost * (1 + noise * abs(random.normal())) + 0.01 * (random.random() < 1 / 30)
        if noise > 0.1:
            drift += 0.05 * (1 + random.normal() * noise - drift)
            cost *= drift
        tokens = min(bucket, max(0.0, tokens - sent) + (computing + cost - queued) * bandwidth)
        control.observe(computing, [cost] * size)
        costs.append(cost / computing)
        densities.append(density)
    return np.array(costs), np.array(densities)


@pytest.mark.parametrize("rate", [1e7, 1e8, 1e9])
@pytest.mark.parametrize("bucket", [5e3, 2e4, 256e3])
@pytest.mark.parametrize("size", [2, 4])
def test_density_settles_within_the_budget(rate, bucket, size):
    for seed in range(5):
        costs, densities = train(rate, bucket, size, seed)
        settled = densities[_SETTLING:]
        assert np.median(costs[_SETTLING:]) < 0.15
        middle = np.median(settled)
        assert 0.75 * middle <= settled.min() <= settled.max() <= 1.25 * middle


def test_density_uses_the_budget():
    costs, densities = train(1e9, 5e3, 2, 0, fixed=2e-4)
    assert 0.07 < np.median(costs[_SETTLING:]) < 0.13
    costs, densities = train(1e11, 5e3, 2, 0, fixed=0.0, overhead=10.0)
    assert densities[-1] == MAX_DENSITY


def test_fixed_cost_above_the_budget_does_not_starve_the_exchange():
    """A lower density would save next to nothing."""
    costs, densities = train(1e9, 5e3, 2, 0, fixed=3e-3)
    assert densities[-1] > 10 * MIN_DENSITY
    # The budget holds the lower quartile of the costs.
    assert np.median(costs[_SETTLING:]) < 4.2e-3 / _COMPUTING


def test_noise_does_not_let_the_density_fall():
    """Where the fixed part is most of the cost, noise seldom asks for a higher density."""
    ends = np.array([train(1e9, 5e3, 4, seed, fixed=3.2e-3, noise=0.6)[1][-1] for seed in range(40)])
    assert np.quantile(ends, 0.1) > 0.35 * np.median(ends)
    assert np.quantile(ends, 0.9) < 5 * np.median(ends)


@pytest.mark.parametrize("size", [2, 4])
def test_a_busy_machine_does_not_push_the_density_to_its_floor(size):
    """In a third of the steps another program stops a rank for some milliseconds, which no density can save."""

    def end(seed, busy, steps=400):
        random, control = np.random.default_rng(seed), DensityControl(0.1, Link(2e-4, 12.5e6), size - 1, 85_000)
        for _ in range(steps):
            sent = (size - 1) * (message_bytes(85_000, control.density) + 100)
            own = sent / 12.5e6 + 25e-9 * 85_000 * control.density * (1 + size)
            stops = np.where(random.random((2, size)) < busy, random.exponential(8e-3, (2, size)), 0)
            costs = (6e-4 + own) * (1 + 0.1 * abs(random.normal(size=size))) + stops[0]
            control.observe(float(np.median(4e-3 + stops[1])), costs.tolist())
        return control.density

    quiet, loaded = (np.array([end(seed, busy) for seed in range(20)]) for busy in (0.0, 1 / 3))
    assert loaded.min() > 1e-3
    assert np.median(loaded) > 0.5 * np.median(quiet)


def test_decrease_that_saves_nothing_is_taken_back():
    control, found = DensityControl(0.1, Link(1e-4, 1e9), 1, _ELEMENTS), []
    for _ in range(100):
        control.observe(_COMPUTING, [0.1, 0.1])
        found.append(control.density)
    assert min(found) < INITIAL_DENSITY == found[-1]


def test_link_that_is_known_to_be_slow_lowers_the_density_at_once():
    control = DensityControl(1.0, Link(1e-4, 1e5), 1, _ELEMENTS)
    for _ in range(2):
        control.observe(_COMPUTING, [1.0])
    assert 1e-4 + message_bytes(_ELEMENTS, control.density) / 1e5 < 1.05 * _COMPUTING or control.density == MIN_DENSITY


def test_density_follows_a_link_that_gets_slower_and_faster():
    control = DensityControl(0.1, Link(1e-4, 1e8), 1, _ELEMENTS)
    found = []
    for bandwidth in (1e8, 1e6, 1e8):
        for _ in range(1000):
            cost = 2e-4 + message_bytes(_ELEMENTS, control.density) / bandwidth
            control.observe(_COMPUTING, [cost])
        found.append(control.density)
    assert found[1] < found[0] / 10
    assert found[2] == pytest.approx(found[0], rel=0.5)


@pytest.mark.parametrize("seconds", [0.0005, 0.002, 0.02])
def test_affordable_density_fits_the_time(seconds):
    def cost(density):
        return 2e-4 + message_bytes(2_000_000, density) / 12.5e6

    density = affordable_density(cost, seconds)
    assert cost(density) <= seconds
    assert density == MAX_DENSITY or cost(1.05 * density) > seconds
    assert affordable_density(cost, 1e-5) == MIN_DENSITY
