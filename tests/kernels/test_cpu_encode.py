"""Tests of `cpu.encode` against the specification, and of its promises."""

# Tests: kernels/cpu_scan.py, kernels/cpu_tiles.py, kernels/reference.py, kernels/simd.py

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdx.kernels import cpu, reference
from hvdx.kernels.tiles import LINE, Layout, Runs
from tests.kernels.agreement import check_encoded, encode_like_reference, same_bits, sent_by
from tests.kernels.strategies import (
    LAYOUTS,
    Case,
    any_tau,
    cases,
    fixed,
    make_runs,
    modest_powers,
    noise,
    powers,
    split,
)


@fixed
@given(cases())
def test_encode_matches_reference(case):
    encode_like_reference(case)


@fixed
@given(cases(), st.sampled_from([2, 3, 5]))
def test_encode_does_not_depend_on_threads(case, threads):
    encode_like_reference(case, threads)


@fixed
@given(cases(), st.sampled_from([0.5, 1, 3.0, 10]), st.sampled_from([1, 3]))
def test_encode_with_lookahead_matches_reference(case, lookahead, threads):
    """Where an element times 1 + lookahead is too large, both refuse the update."""
    encode_like_reference(case, threads, lookahead)


@pytest.mark.parametrize("lookahead", [0.0, 3.0])
def test_lookahead_adds_an_extrapolation_that_the_residual_gives_back(lookahead):
    """Residual and entries add up to the update, whatever the lookahead; the entries are those of the extrapolation."""
    runs, update = make_runs((4, 0.5)), np.array([0.2, -0.3, 0.05, 0], np.float32)
    residual = np.zeros(4, np.float32)
    coded = cpu.encode([update], residual, runs, threads=1, lookahead=lookahead)
    sent = np.zeros(4, np.float32)
    cpu.decode([(coded.tiles, runs)], 1.0, [sent], threads=1)
    np.testing.assert_array_equal(sent, np.trunc(update * (1 + lookahead) / 0.5) * np.float32(0.5))
    np.testing.assert_allclose(sent + residual, update, atol=1e-7)


def test_blocks_of_several_arrays_are_gathered_within_a_run():
    """Arrays of every length up to two blocks, in runs that end within blocks, with multiples and lookahead."""
    lengths = [*range(1, 131), 1, 1, 200, 1]
    n = sum(lengths)
    runs = make_runs((n // 3, 0.5), (n - n // 3, 0.3))
    update, residual = noise(n, np.repeat(runs.taus, runs.lengths), 0.2, 9)
    case = Case(split(update / 4, np.cumsum(lengths)[:-1].tolist()), residual, runs, LAYOUTS[3], True)
    for lookahead in (0.0, 3.0):
        coded, _ = encode_like_reference(case, 1, lookahead)
        assert coded.fault == -1
        assert coded.sent.all()


@fixed
@given(cases())
def test_encode_loses_nothing(case):
    """sent + residual == float32(update + residual before) as real numbers, for any tau and any m.

    An entry has the value float32(m * tau). Its subtraction from the sum is exact, however the value was rounded.
    """
    before = case.residual.copy()
    coded, after = encode_like_reference(case)
    total = case.vector + before
    sent = sent_by(case, coded.tiles)
    for t, s, r in zip(total, sent, after, strict=True):
        assert Fraction(float(s)) + Fraction(float(r)) == Fraction(float(t))
    assert (sent + after == total).all()


@fixed
@given(cases())
def test_encode_leaves_less_than_tau(case):
    _, after = encode_like_reference(case)
    assert (np.abs(after) < case.tau).all()


@fixed
@given(cases())
def test_encode_keeps_signs(case):
    """The new residual, also if it is zero, and the entry have the sign of the sum."""
    before = case.residual.copy()
    coded, after = encode_like_reference(case)
    total = case.vector + before
    np.testing.assert_array_equal(np.signbit(after), np.signbit(total))
    index, negative, _ = reference.read(coded.tiles, case.n, case.rice)
    np.testing.assert_array_equal(negative, np.signbit(total[index]))


@fixed
@given(cases(st.one_of(modest_powers, powers)))
def test_encode_of_powers_of_two_is_exact(case):
    """If tau is a power of two and m is below 2**24, m * tau is a float32, so nothing is rounded."""
    coded, _ = encode_like_reference(case)
    index, _, m = reference.read(coded.tiles, case.n, case.rice)
    tau = case.tau[index]
    exact = m.astype(np.float64) * tau
    few = m < 2**24
    np.testing.assert_array_equal(reference.amount(m, tau)[few].astype(np.float64), exact[few])


@fixed
@given(cases())
def test_decode_into_zeros_gives_what_was_sent(case):
    coded, _ = encode_like_reference(case)
    out = np.zeros(case.n, np.float32)
    cpu.decode([(coded.tiles, case.runs)], 1.0, [out], case.rice, threads=1)
    assert (out == sent_by(case, coded.tiles)).all()


@fixed
@given(cases())
def test_encode_counts_entries(case):
    """`sent` counts the entries of each run, and every sum that reaches tau is an entry."""
    before = case.residual.copy()
    coded, _ = encode_like_reference(case)
    reach = np.abs(case.vector + before) >= case.tau
    ends = np.cumsum(case.runs.lengths)
    np.testing.assert_array_equal(
        coded.sent, [np.count_nonzero(reach[e - n : e]) for e, n in zip(ends, case.runs.lengths, strict=True)]
    )


@fixed
@given(st.lists(cases(any_tau), min_size=1, max_size=3), st.sampled_from([1, 3]))
def test_workspace_carries_nothing_over(several, threads):
    """A workspace is reused for updates of the same form, and replaced if the form differs."""
    for case in several:
        work = cpu.Workspace(case.n, len(case.runs.taus), case.layout, threads)
        other = cpu.Workspace(case.n + 1, 1, case.layout, threads)
        for workspace in (work, work, other):
            residual, want = case.residual.copy(), case.residual.copy()
            got = cpu.encode(
                case.update, residual, case.runs, case.rice, case.layout, threads=threads, workspace=workspace
            )
            check_encoded(got, reference.encode(case.update, want, case.runs, case.rice, case.layout))
            assert same_bits(residual, want)


@pytest.mark.parametrize("rice", [True, False])
def test_encode_grows_its_buffers(rice, monkeypatch):
    """Tiles are written even if they fit neither a thread's buffer nor the estimated size of all tiles."""
    monkeypatch.setattr(cpu, "_BUFFER", 16)
    tau = np.full(6000, 0.5, np.float32)
    for density in (0.02, 1):
        update, residual = noise(6000, tau, density, 7)
        # The largest entries: a multiple takes many times the bits of its gap.
        huge = np.where(np.abs(update) >= 0.5, update * np.float32(2**25), update)
        for layout in LAYOUTS:
            for threads in (1, 3):
                for several in (update, np.clip(huge, -(2.0**29), 2.0**29)):
                    encode_like_reference(Case([several], residual, make_runs((6000, 0.5)), layout, rice), threads)


def test_encode_begins_with_a_header():
    update, residual = noise(500, np.full(500, 0.5, np.float32), 0.3, 1)
    runs = make_runs((500, 0.5))
    plain = cpu.encode([update], residual.copy(), runs, threads=1).tiles
    headed = cpu.encode([update], residual.copy(), runs, threads=1, header=b"x" * 21).tiles
    assert headed.tobytes() == b"x" * 21 + plain.tobytes()
    assert cpu.encode([], np.zeros(0, np.float32), make_runs(), threads=1, header=b"ab").tiles.tobytes() == b"ab"


def test_encode_takes_arrays_at_any_address():
    """Arrays are views that are not aligned to SIMD vectors."""
    base, left = noise(1200, np.full(1200, 0.5, np.float32), 0.2, 3)
    for first in range(1, 18):
        update = split(base[first : first + 1000].copy(), [3, 3, 500 + first])
        update = [np.concatenate([np.full(first, 9, np.float32), u])[first:] for u in update]
        room = np.full(1000 + 2 * first, 7, np.float32)
        residual = room[first : first + 1000]
        residual[:] = left[:1000]
        case = Case(update, residual, make_runs((first, 0.5), (1000 - first, 0.25)), LAYOUTS[2], True)
        residual[:] = np.where(np.abs(residual) < case.tau, residual, 0)
        want = residual.copy()
        got = cpu.encode(case.update, residual, case.runs, True, case.layout, threads=1)
        check_encoded(got, reference.encode(case.update, want, case.runs, True, case.layout))
        assert same_bits(residual, want)
        assert (room[:first] == 7).all()
        assert (room[first + 1000 :] == 7).all()


def test_encode_takes_arrays_of_any_shape():
    rng = np.random.default_rng(5)
    arrays = [rng.normal(0, 1, shape).astype(np.float32) for shape in ((3, 5), (), (2, 0, 4), (7,), (1, 1, 9))]
    flat = reference.vector(arrays)
    runs = make_runs((flat.size, 0.5))
    residual = np.zeros(flat.size, np.float32)
    got = cpu.encode(arrays, residual, runs, threads=1)
    want = np.zeros(flat.size, np.float32)
    check_encoded(got, reference.encode([flat], want, runs))
    assert same_bits(residual, want)


@fixed
@given(cases(), st.integers(1, 7), st.integers(0, 9))
def test_sample_copies_lines(case, every, at):
    n = case.vector.size
    residual, lines = np.arange(n, dtype=np.float32), np.arange(at % every, -(-n // LINE), every)
    got = cpu.sample(case.update, residual, lines)
    assert same_bits(got, reference.sample(case.update, residual, lines))
    with pytest.raises(ValueError, match="lines: expected numbers from 0 below"):
        cpu.sample(case.update, residual, np.array([n]))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_encode_matches_reference_with_work_for_every_thread(threads):
    """There are more regions than threads, and more elements than `check` processes on one thread."""
    n = 70_000
    runs = Runs(np.array([30_001, n - 30_001]), np.array([0.5, 0.3], np.float32))
    update, residual = noise(n, np.repeat(runs.taus, runs.lengths), 0.02, threads)
    for layout in (Layout(256, 64, 8, 32, 4), Layout(4096, 4096, 512, 2048, 3)):
        case = Case(split(update, [1, 777, 40_000, 65_536]), residual, runs, layout, True)
        encode_like_reference(case, threads)


@pytest.mark.parametrize("longest", [10, 14, 18])
def test_gaps_of_every_length_match_reference(longest):
    """Short and long gaps alternate, so that codes of two entries fit a word or not, with and without multiples."""
    rng = np.random.default_rng(longest)
    index = np.cumsum((2 ** rng.uniform(0, longest * (rng.random(900) < 0.3))).astype(np.int64))
    update = np.zeros(int(index[-1]) + 9, np.float32)
    m = np.where(np.arange(900) // 200 % 2, rng.integers(1, 400, 900) ** (rng.random(900) < 0.05), 1)
    update[index] = rng.choice([-1, 1], 900) * m
    case = Case([update], np.zeros_like(update), make_runs((update.size, 1.0)), Layout(1 << 16, 500, 20, 90, 64), True)
    got, _ = encode_like_reference(case)
    assert got.sent.tolist() == [900]


@pytest.mark.parametrize("lookahead", [0.0, 1.0])
def test_a_single_sum_of_two_tau_is_sent_whole(lookahead):
    """No other sum of its block reaches tau, and no remainder exceeds it."""
    update = np.full(64, 0.125, np.float32)
    update[5] = -2 / (1 + lookahead)
    case = Case([update], np.zeros_like(update), make_runs((64, 1.0)), Layout(), True)
    got, residual = encode_like_reference(case, lookahead=lookahead)
    assert got.sent.tolist() == [1]
    assert abs(residual[5]) <= lookahead
