"""Hypothesis strategies and settings of the kernels' property tests. Every run has the same cases."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hvdx.kernels import reference
from hvdx.kernels.tiles import LAYOUT, Layout, Runs

#: Settings with the same cases on every run; a failure prints how to reproduce it.
fixed = settings(
    derandomize=True, deadline=None, max_examples=150, print_blob=True, suppress_health_check=list(HealthCheck)
)

#: Layouts whose borders a few hundred elements reach, and the default layout.
LAYOUTS = [
    Layout(region=64, tile_max=16, tile_min=4, group=6, group_regions=3),
    Layout(region=128, tile_max=200, tile_min=130, group=140, group_regions=2),
    Layout(region=256, tile_max=64, tile_min=8, group=32, group_regions=4),
    LAYOUT,
]


class Case(NamedTuple):
    """Input of an encoder."""

    update: list[np.ndarray]
    residual: np.ndarray
    runs: Runs
    layout: Layout
    rice: bool

    @property
    def n(self) -> int:
        return self.residual.size

    @property
    def tau(self) -> np.ndarray:
        """Tau of each element, float32[n]."""
        return np.repeat(self.runs.taus, self.runs.lengths)

    @property
    def vector(self) -> np.ndarray:
        """Update as one vector, float32[n]."""
        return reference.vector(self.update)


def make_runs(*pairs: tuple[int, float]) -> Runs:
    """Return runs from pairs of (length, tau)."""
    return Runs(np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], np.float32))


def split(vector: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    """Split a vector at `cuts`; equal cuts make empty arrays."""
    borders = [0, *sorted(cuts), len(vector)]
    return [vector[a:b] for a, b in pairwise(borders)]


def lengths_of(n: int, cuts: list[int]) -> list[int]:
    """Return the lengths, at least 1 each, of the runs that end at `cuts` and at n."""
    borders = sorted({0, n, *(c for c in cuts if c < n)})
    return [b - a for a, b in pairwise(borders)]


powers = st.integers(-126, 126).map(lambda e: 2.0**e)
modest_powers = st.integers(-20, 20).map(lambda e: 2.0**e)
any_tau = st.floats(2.0**-126, 2.0**126, width=32)
modest_tau = st.floats(2.0**-20, 2.0**20, width=32)
taus = st.one_of(modest_powers, modest_tau, powers, any_tau)
sizes = st.one_of(st.integers(0, 700), st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]))
seeds = st.integers(0, 2**32 - 1)
#: Elements as multiples of tau: at and just below whole numbers, small ones, and up to the limit of an update.
shares = st.one_of(
    st.floats(-3, 3),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1 - 2.0**-24, 1 + 2.0**-23, 2 - 2.0**-23, 3 + 2.0**-22, 2.0**30]),
    st.floats(-(2.0**30), 2.0**30),
    st.integers(1, 2**24).map(float),
)


def noise(n: int, tau: np.ndarray, density: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an update and a residual below tau. About a share `density` crosses tau, some many times over."""
    rng = np.random.default_rng(seed)
    wide = tau.astype(np.float64)
    residual = (rng.uniform(-1, 1, n) * wide * (rng.random(n) < 0.9)).astype(np.float32)
    residual = np.where(np.abs(residual) < tau, residual, np.float32(0))
    update = rng.uniform(-0.01, 0.01, n) * wide
    chosen = rng.random(n) < density
    update = np.where(chosen, rng.choice([-1, 1], n) * rng.uniform(1, 3, n) * wide, update)
    several = chosen & (rng.random(n) < 0.05)
    update = np.where(several, update * 2.0 ** rng.integers(1, 28, n), update)
    most = np.minimum(wide * 2.0**30, 2.0**126)
    return np.clip(update, -most, most).astype(np.float32), residual


@st.composite
def cases(draw: st.DrawFn, tau: st.SearchStrategy[float] = taus) -> Case:
    """Draw several arrays, also empty ones, several runs, and elements near multiples of tau."""
    n = draw(sizes)
    cuts = st.lists(st.integers(0, n), max_size=4)
    lengths = lengths_of(n, draw(cuts))
    runs = Runs(np.array(lengths, np.int64), np.array([draw(tau) for _ in lengths], np.float32))
    each = np.repeat(runs.taus, runs.lengths)
    vector, residual = noise(n, each, draw(st.sampled_from([0, 0.01, 0.1, 0.5, 1])), draw(seeds))
    if n:
        for at, share in draw(st.lists(st.tuples(st.integers(0, n - 1), shares), max_size=6)):
            most = min(float(each[at]) * 2.0**30, 2.0**126)
            vector[at] = np.clip(share * float(each[at]), -most, most)
            residual[at] = draw(st.sampled_from([0.0, -0.0, residual[at]]))
    return Case(split(vector, draw(cuts)), residual, runs, draw(st.sampled_from(LAYOUTS)), draw(st.booleans()))
