"""Tests of faults (NaN, infinity, elements above the limit): the update is taken back from the residual."""

# Tests: kernels/cpu_scan.py

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdx.kernels import cpu, reference
from hvdx.kernels.tiles import Layout, limit
from tests.kernels.agreement import check_restored, encode_like_reference, same_bits
from tests.kernels.strategies import Case, cases, fixed, make_runs, noise, split

BAD = [np.nan, -np.nan, np.inf, -np.inf, 2.0**29.5, -(2.0**30), np.float32(3e38)]
SMALL = Layout(256, 64, 8, 32, 4)


def check_fault(update, residual, runs, fault, threads=1, layout=SMALL):
    """Check that `cpu` and `reference` find the fault, and that the residual is as before, in `cpu` up to rounding."""
    for encoder, options in ((cpu, {"threads": threads}), (reference, {})):
        before, residual = residual, residual.copy()
        got = encoder.encode(update, residual, runs, True, layout, **options)
        assert got.fault == fault
        assert got.tiles.size == 0
        assert got.sent.tolist() == [0] * len(runs.taus)
        check_restored(residual, before, update)
        assert encoder is cpu or same_bits(residual, before)
        assert encoder.check(update, runs, **options) == fault


@pytest.mark.parametrize("value", BAD, ids=str)
def test_fault_at_every_kind_of_place(value):
    """The fault is the first or last element of a chunk, region, array or run, or in an incomplete block."""
    n = 1100
    runs = make_runs((700, 0.5), (n - 700, 0.25))
    cuts = [0, 100, 100, 165, 641]
    clean, residual = noise(n, np.repeat(runs.taus, runs.lengths), 0.1, 0)
    for at in (0, 1, 62, 63, 64, 65, 99, 100, 101, 164, 165, 228, 229, 255, 256, 640, 641, 699, 700, 701, 1098, 1099):
        update = clean.copy()
        update[at] = value
        check_fault(split(update, cuts), residual, runs, at)


def test_fault_is_the_first_one():
    n = 1000
    runs = make_runs((n, 0.5))
    clean, residual = noise(n, np.full(n, 0.5, np.float32), 0.1, 0)
    for first, later in ((0, 999), (3, 4), (63, 64), (130, 131), (500, 700), (998, 999)):
        update = clean.copy()
        update[[first, later]] = np.nan, np.inf
        check_fault([update], residual, runs, first)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_fault_is_the_first_one_of_all_threads(threads):
    n = 70_001
    runs = make_runs((n, 0.5))
    clean, residual = noise(n, np.full(n, 0.5, np.float32), 0.001, 0)
    borders = [n * i // threads for i in range(threads)]
    for first in {0, 65_535, 65_536, n - 1, *borders, *(b - 1 for b in borders[1:]), *(b + 1 for b in borders)}:
        update = clean.copy()
        update[first:] = np.nan
        check_fault(split(update, [1, n // 2]), residual, runs, first, threads, Layout())


@fixed
@given(cases(), st.data())
def test_fault_matches_reference(case, data):
    """Up to three faults are at random indices."""
    vector = case.vector.copy()
    if case.n:
        for at in data.draw(st.lists(st.integers(0, case.n - 1), max_size=3)):
            bad = np.nextafter(limit(case.tau[at : at + 1])[0], np.float32(np.inf))
            vector[at] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, bad, -bad]))
    update = split(vector, data.draw(st.lists(st.integers(0, case.n), max_size=3)))
    encode_like_reference(case._replace(update=update), 1, data.draw(st.sampled_from([0.0, 3.0])))


@pytest.mark.parametrize("lookahead", [0.0, 3.0])
def test_fault_leaves_a_residual_of_several_tau(lookahead):
    """The lookahead leaves residuals of several tau, which send multiples where the update has a fault."""
    n = 300
    runs = make_runs((n, 1.0))
    for at, value in ((0, np.nan), (63, np.inf), (64, -np.inf), (130, 1e12), (299, np.nan)):
        update, residual = np.full(n, 0.25, np.float32), np.zeros(n, np.float32)
        update[at] = value
        residual[[at, 1, 200]] = 3.5, -7.25, 2.5
        before = residual.copy()
        coded = cpu.encode([update], residual, runs, True, SMALL, threads=1, lookahead=lookahead)
        assert coded.fault == at
        np.testing.assert_allclose(residual, before, atol=1e-5)


def test_residual_after_a_fault_does_not_depend_on_threads():
    n = 5000
    clean, residual = noise(n, np.full(n, 0.3, np.float32), 0.1, 0)
    clean[777] = np.nan
    case, after = Case([clean / 8], residual, make_runs((n, 0.3)), SMALL, True), []
    for threads in (1, 2, 5):
        coded, got = encode_like_reference(case, threads, 3.0)
        assert coded.fault == 777
        after.append(got.tobytes())
    assert after[0] == after[1] == after[2]


def test_limit_is_a_multiple_of_tau():
    taus = np.array([1, 0.3, 2.0**-126, 2.0**126, 2.0**97], np.float32)
    assert limit(taus)[[0, 2, 3, 4]].tolist() == [2.0**30, 2.0**-96, 2.0**126, 2.0**126]
    assert limit(taus)[1] == np.float32(np.float64(taus[1]) * 2.0**30)
