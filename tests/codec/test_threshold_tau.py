"""Tests of the search for tau: the quantile of a sample of each update, and the density of messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdx.codec import Threshold
from hvdx.codec.threshold import lines_of, tau_of_sample
from hvdx.errors import UpdateError
from hvdx.kernels import reference
from hvdx.kernels.pieces import sampled
from tests.kernels.strategies import fixed

#: Number of elements: an update has 50 entries at the lowest density below.
N = 50_000


DISTRIBUTIONS = {
    "gauss": lambda rng: rng.normal(0, 1e-3, N),
    "laplace": lambda rng: rng.laplace(0, 1e-5, N),
    "lognormal": lambda rng: rng.normal(0, 1, N) * np.exp(rng.normal(0, 2, N)),
    "mostly zeros": lambda rng: rng.normal(0, 1, N) * (rng.random(N) < 0.2),
    "small": lambda rng: rng.normal(0, 1e-37, N),
}


@pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("density", [1e-3, 1e-2, 3e-2, 0.1])
def test_tau_is_the_quantile_of_a_sample(make, density):
    values = make(np.random.default_rng(0)).astype(np.float32)
    assert np.count_nonzero(np.abs(values) >= tau_of_sample(values, density)) == pytest.approx(density * N, rel=0.02)
    values[::7] = np.nan, np.inf, -np.inf, *[np.nan] * (len(values[::7]) - 3)
    assert np.count_nonzero(np.isfinite(values) & (np.abs(values) >= tau_of_sample(values, density))) == pytest.approx(
        density * N * 6 / 7, rel=0.03
    )


@fixed
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50))
def test_tau_is_near_the_largest_element(values):
    """tau is None if all elements are zero; else no element exceeds 2**12 times tau."""
    largest, tau = max(map(abs, values)), tau_of_sample(np.array(values, np.float32), 0.1)
    if largest == 0:
        assert tau is None
    else:
        assert largest / 2**12 * (1 - 2**-15) <= tau <= max(largest * (1 + 2**-15), 2.0**-126)
        m = np.arange(16)
        assert (reference.amount(m, tau) == m * np.float64(tau)).all()


def test_tau_of_equal_elements_sends_none():
    """The choice is between all and none. A message of all would be dense, so the elements stay in the residual."""
    assert 0.37 < tau_of_sample(np.full(1000, 0.37, np.float32), 0.01) < 0.37001
    assert tau_of_sample(np.array([0.5] * 12 + [0.1] * 988, np.float32), 0.01) == 0.5


@fixed
@given(st.integers(1, 10**9), st.floats(1e-6, 0.5), st.integers(0, 10**6))
def test_samples_hold_enough_of_the_elements(n, density, step):
    """They hold 16 elements that reach tau, unless that takes more than 2**17 elements, or than there are."""
    chosen = lines_of(n, density, step)
    assert sampled(n, chosen) >= min(n, max(2048, min(16 / density, 2**16))) - 16
    assert (np.diff(chosen) > 0).all()


@pytest.mark.parametrize("period", [977, 2048, 7812, 7824])
def test_samples_see_what_repeats(period):
    """Large elements at one place of each row are seen by their share, whatever the length of the rows."""
    n = 2_000_000
    sizes = np.where(np.arange(n) % period < period // 10, np.float32(2), np.float32(1))
    seen = [np.mean(reference.sample([sizes], sizes, lines_of(n, 0.01, step))[0] > 1) for step in range(12)]
    assert np.mean(seen) == pytest.approx(0.1, rel=0.15)
    assert max(seen) < 0.2


def test_first_updates_of_adam_are_sent():
    """Its first updates have elements of nearly one size, and later ones are smaller."""
    rng = np.random.default_rng(0)
    signs = rng.choice(np.float32([-1, 1]), N)
    sequence = [np.float32(1e-3) * signs * (1 - rng.uniform(0, 1e-3, N)).astype(np.float32) for _ in range(2)]
    sequence += [rng.normal(0, 3e-4 / (1 + i), N).astype(np.float32) for i in range(18)]
    assert densities(Threshold(target_density=0.01, threads=1), sequence) == pytest.approx(1, abs=0.4)


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
    """The mean of the last 100 of 300 steps is within a tenth of the target, and no step is far from it."""
    got = densities(Threshold(target_density=density, threads=1), updates(kind, 300))
    assert got[0] == pytest.approx(1, abs=0.35)
    assert got[-100:].mean() == pytest.approx(1, abs=0.1)
    # At 1e-3 the target is 50 entries, whose number has a standard deviation of 7.
    assert got.max() < 2


@pytest.mark.parametrize("density", [1e-3, 1e-2, 3e-2])
@pytest.mark.parametrize("factor", [0.1, 10])
def test_tau_follows_the_scale_of_updates(factor, density):
    """If updates grow or shrink by a factor of ten, no message is large or empty."""
    sequence = (
        update * np.float32(factor if step >= 100 else 1) for step, update in enumerate(updates("lognormal", 400))
    )
    got = densities(Threshold(target_density=density, threads=1), sequence)
    assert got[99:110].mean() == pytest.approx(1, abs=0.25)
    assert 0.3 < got.min() <= got.max() < 2


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
    # The sample may miss the largest element.
    assert state.tau > 1e-3 * 2.0**-13
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
    """With gradient accumulation one update in eight is not zero; these have the target density, the others none."""
    sequence = [u if i % 8 == 7 else np.zeros(N, np.float32) for i, u in enumerate(updates("lognormal", 1600))]
    got = densities(Threshold(target_density=0.01, threads=1), sequence)
    assert got[800:].reshape(-1, 8)[:, :7].max() == 0
    assert got[807::8].mean() == pytest.approx(1, abs=0.3)


def test_the_first_tau_is_that_of_all_variables():
    """The first of them may be a table, of which a batch changes few rows."""
    rng = np.random.default_rng(0)
    table, dense = np.zeros(2**21, np.float32), rng.normal(0, 1e-3, 2**21).astype(np.float32)
    table[:1000] = rng.normal(0, 1e-9, 1000)
    codec = Threshold(target_density=1 / 8)
    _, state = codec.encode([table, dense], codec.init([table.size, dense.size]))
    assert state.density == pytest.approx(1 / 8, rel=0.1)


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
