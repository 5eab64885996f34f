"""Tests of the search for tau: the grid, the first tau from a histogram, and the adaptation to a density."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdx.codec import Threshold
from hvdx.codec.tau import STEPS, first_tau, next_tau, on_grid
from hvdx.errors import UpdateError
from hvdx.kernels import cpu, reference
from hvdx.kernels.tiles import SHARES
from tests.kernels.strategies import fixed, powers

#: Number of elements: an update has 50 entries at the lowest density below.
N = 50_000


@pytest.mark.parametrize("exponent", [-126, -20, 0, 90])
def test_multiples_of_the_grid_are_exact(exponent):
    """m * tau is a float32 for every m below 2**23 / STEPS, because the product has at most 24 bits."""
    m = np.unique(np.concatenate([np.arange(1, 3000), 2**23 // STEPS - np.arange(1, 3000)]))
    for i in range(STEPS):
        tau = np.float32((1 + i / STEPS) * 2.0**exponent)
        assert float(tau) == (1 + i / STEPS) * 2.0**exponent
        np.testing.assert_array_equal(reference.amount(m, tau).astype(np.float64), m * np.float64(tau))


@fixed
@given(st.floats(2.0**-126, 2.0**126))
def test_on_grid_gives_the_neighbours_on_the_grid(tau):
    below, above = float(on_grid(tau)), float(on_grid(tau, up=True))
    assert below <= tau <= above
    for value in (below, above):
        assert value == float(on_grid(value)) == float(on_grid(value, up=True))
        fraction, _ = math.frexp(value)
        assert (fraction * 2 * STEPS).is_integer()
    assert below == above or above / below <= 1 + 1 / STEPS


def test_on_grid_stays_within_its_range():
    for tau in (0.0, 1e-300, 1e300, math.inf):
        assert 2.0**-126 <= on_grid(tau) <= 2.0**126
        assert 2.0**-126 <= on_grid(tau, up=True) <= 2.0**126


DISTRIBUTIONS = {
    "gauss": lambda rng: rng.normal(0, 1e-3, N),
    "laplace": lambda rng: rng.laplace(0, 1e-5, N),
    "lognormal": lambda rng: rng.normal(0, 1, N) * np.exp(rng.normal(0, 2, N)),
    "mostly zeros": lambda rng: rng.normal(0, 1, N) * (rng.random(N) < 0.2),
    "small": lambda rng: rng.normal(0, 1e-37, N),
}


@pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("density", [1e-3, 1e-2, 3e-2, 0.1])
def test_first_tau_hits_the_density(make, density):
    """At most the target is sent, and at least half of it: a bin is an eighth of an octave."""
    values = make(np.random.default_rng(0)).astype(np.float32)
    share = np.count_nonzero(np.abs(values) >= first_tau(cpu.histogram([values]), density)) / N
    assert 0.5 * density <= share <= density


@fixed
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50))
def test_first_tau_is_near_the_largest_element(values):
    """tau is None if all elements are nearly zero; else it is on the grid, and no element exceeds 2**21 times tau."""
    vector = np.array(values, np.float32)
    tau = first_tau(cpu.histogram([vector]), 0.1)
    largest = np.abs(vector).max()
    if tau is None:
        assert largest < 2.0**-129
        return
    assert tau == on_grid(float(tau))
    assert largest <= 2.0**21 * tau
    assert tau <= max(2 * largest, 2.0**-126)


def test_first_tau_of_zeros_is_none():
    assert first_tau(cpu.histogram([np.zeros(5, np.float32)]), 0.1) is None
    assert first_tau(np.zeros(2048, np.int64), 0.1) is None


def test_first_tau_of_equal_elements_sends_none():
    """The choice is between all and none. A message of all would be dense, so the elements stay in the residual."""
    values = np.full(1000, 0.37, np.float32)
    tau = first_tau(cpu.histogram([values]), 0.01)
    assert 0.37 < tau < 0.42


def test_next_tau_falls_after_an_update_that_sends_nothing():
    """It falls to the lowest share that as many residuals reach as may be sent, and stays if none is near."""
    for near, tau in (([0, 0, 5, 900], 0.25), ([0, 3, 900, 900], 0.375), ([50, 60, 70, 80], 0.5), ([0, 0, 0, 0], 0.5)):
        assert next_tau(np.float32(0.5), 3.0, 0, np.array(near), 1000, 0.01) == (np.float32(tau), 3.0)


def test_tau_that_is_too_high_for_the_next_updates_falls_at_once():
    """The first updates of Adam have elements of one size: all of them are sent at once, then none."""
    rng = np.random.default_rng(0)
    sequence = [np.float32(1e-3) * rng.choice(np.float32([-1, 1]), N)] * 2
    sequence += [rng.normal(0, 3e-4, N).astype(np.float32) for _ in range(18)]
    got = densities(Threshold(target_density=0.01, threads=1), sequence)
    assert got[1] > 50
    assert np.count_nonzero(got[2:] == 0) < 6


nears = st.lists(st.integers(0, 1000), min_size=len(SHARES), max_size=len(SHARES)).map(sorted).map(np.array)


@fixed
@given(
    powers, st.one_of(st.just(-1.0), st.floats(0, 1000)), st.integers(0, 1000), nears, st.floats(1e-4, 0.9),
)  # fmt: skip
def test_next_tau_stays_on_the_grid_and_near(tau, mean, sent, near, density):
    """tau changes by a factor of 4 at most, so a residual stays below 4 tau."""
    tau = np.float32(tau)
    after, mean_after = next_tau(tau, mean, sent, near, 1000, density)
    assert after == on_grid(float(after))
    assert 2.0**-126 <= after <= 2.0**126
    assert min(float(tau) / 4, 2.0**126) <= float(after) <= float(tau) * 4 * (1 + 1 / STEPS)
    assert mean_after >= 0 or sent == 0
    wanted = max(density * 1000, 1)
    if sent > 4 * wanted and tau < 2.0**125:
        assert after > tau
    if sent <= wanted and mean <= wanted:
        assert after <= tau


def updates(kind, steps, seed=0):
    """Yield updates whose residuals walk at random: with one scale, many scales, a drift, or bursts."""
    rng = np.random.default_rng(seed)
    scale = np.full(N, 1e-3, np.float32)
    if kind != "gauss":
        scale *= np.exp(rng.normal(0, 1, N)).astype(np.float32)
    drift = (rng.normal(0, 0.1, N) * scale).astype(np.float32) if kind == "drift" else np.float32(0)
    for _ in range(steps):
        update = rng.standard_normal(N, np.float32) * scale + drift
        yield update * rng.exponential(1, N).astype(np.float32) if kind == "bursts" else update


def densities(codec, sequence):
    """Return the density of each update's message, as a multiple of the target."""
    state, found = codec.init([N]), []
    for update in sequence:
        _, state = codec.encode([update], state)
        found.append(state.density / codec.target_density)
    return np.array(found)


@pytest.mark.parametrize("kind", ["gauss", "lognormal", "drift", "bursts"])
@pytest.mark.parametrize("density", [1e-3, 1e-2, 3e-2])
def test_tau_follows_a_density(kind, density):
    """The mean of the last 100 of 300 steps is within a quarter of the target, and no later step is far above it."""
    got = densities(Threshold(target_density=density, threads=1), updates(kind, 300))
    assert 0.5 <= got[0] <= 1
    assert got[-100:].mean() == pytest.approx(1, abs=0.25)
    assert got[3:].max() < 10
    # At 1e-3 the target is 50 entries, whose number has a standard deviation of 7.
    assert got[50:].max() < 2.5


@pytest.mark.parametrize("density", [1e-3, 1e-2, 3e-2])
@pytest.mark.parametrize("factor", [0.1, 10])
def test_tau_follows_the_scale_of_updates(factor, density):
    """If updates grow or shrink by a factor of ten, at most one message is large, and the density returns."""
    sequence = (
        update * np.float32(factor if step >= 100 else 1) for step, update in enumerate(updates("lognormal", 400))
    )
    got = densities(Threshold(target_density=density, threads=1), sequence)
    assert got[60:100].mean() == pytest.approx(1, abs=0.25)
    assert got[-100:].mean() == pytest.approx(1, abs=0.25)
    assert np.count_nonzero(got[100:] > 10) <= 1
    assert got[-100:].max() < 10


@pytest.mark.parametrize("share", [0.001, 0.005, 0.009])
def test_tau_has_a_floor_where_few_elements_move(share):
    """With embeddings or dead inputs, fewer than 1 % of the elements are not zero, so no tau sends 1 %."""
    rng = np.random.default_rng(0)
    codec = Threshold(target_density=0.01, threads=1)
    moving = rng.permutation(N)[: int(share * N)]
    update, state = np.zeros(N, np.float32), codec.init([N])
    for _ in range(200):
        update[moving] = rng.normal(0, 1e-3, len(moving))
        _, state = codec.encode([update], state)
    assert state.tau > 1e-3 * 2.0**-12
    assert state.density == pytest.approx(share, rel=0.2)


@pytest.mark.parametrize("idle", [7, 200])
def test_tau_stays_through_idle_updates(idle):
    codec = Threshold(target_density=0.01, threads=1)
    sequence = list(updates("lognormal", 130))
    sequence[100:100] = [np.zeros(N, np.float32)] * idle
    got = densities(codec, sequence)
    assert got[100 + 20 :].max() < 3
    assert got[100 + idle :].mean() == pytest.approx(1, abs=0.3)


def test_tau_follows_accumulated_updates():
    """With gradient accumulation one update in eight is not zero; these updates have the target density."""
    sequence = [u if i % 8 == 7 else np.zeros(N, np.float32) for i, u in enumerate(updates("lognormal", 1600))]
    got = densities(Threshold(target_density=0.01, threads=1), sequence)
    assert got[800:].max() < 3
    assert got[807::8].mean() == pytest.approx(1, abs=0.3)


def test_tau_is_found_again_after_a_misleading_first_update():
    sequence = (u * np.float32(1e-14 if i == 0 else 1) for i, u in enumerate(updates("lognormal", 300)))
    got = densities(Threshold(target_density=0.01, threads=1), sequence)
    assert got[-50:].mean() == pytest.approx(1, abs=0.3)


def test_tau_is_found_again_if_updates_grow():
    """Two variables grow at once by far more than 2**30 times tau. They are sent and not refused."""
    codec = Threshold(target_density=0.1, threads=1)
    rng = np.random.default_rng(3)
    small = [rng.normal(0, 1e-12, 200).astype(np.float32) for _ in range(3)]
    _, state = codec.encode(small, codec.init([200] * 3))
    large = [small[0] * np.float32(1e15), small[1], small[2] * np.float32(1e15)]
    _, state = codec.encode(large, state)
    assert state.sent > 0
    large[2][5] = np.nan
    with pytest.raises(UpdateError, match=r"update\[2\]: element 5 is nan"):
        codec.encode(large, state)
