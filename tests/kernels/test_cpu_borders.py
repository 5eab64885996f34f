"""Tests of sizes, counts and numbers at every border of the encoder, against the specification."""

import numpy as np
import pytest

from hvdx.kernels import cpu, reference
from hvdx.kernels.table import ENTRIES
from hvdx.kernels.tiles import LAYOUT, M_MAX, Layout, limit, plan
from tests.kernels.agreement import encode_like_reference, same_bits
from tests.kernels.strategies import Case, make_runs, noise, split

SMALL = Layout(256, 64, 8, 32, 4)
TINY, HUGE = 2.0**-126, 2.0**126


def check_case(case, threads=1):
    """Check encoder and decoder against the specification; return the encoder's result."""
    coded, _ = encode_like_reference(case, threads)
    got, want = np.ones(case.n, np.float32), np.ones(case.n, np.float32)
    cpu.decode([(coded.tiles, case.runs)], 0.5, [got], case.rice, threads=threads)
    reference.decode([(coded.tiles, case.runs)], 0.5, [want], case.rice)
    assert same_bits(got, want)
    return coded


def spread_entries(*counts, region, tau=0.5):
    """Return an update with these numbers of entries in its regions."""
    update = np.zeros(region * len(counts), np.float32)
    rng = np.random.default_rng(sum(counts))
    for i, count in enumerate(counts):
        where = i * region + rng.choice(region, count, replace=False)
        update[where] = rng.choice([-1, 1], count) * tau
    return update


@pytest.mark.parametrize("rice", [True, False])
@pytest.mark.parametrize("density", [0, 0.1, 1])
def test_sizes_about_chunks_and_regions(density, rice):
    for n in (0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 767, 768, 769, 1023, 1024, 1025, 1281):
        update, residual = noise(n, np.full(n, 0.5, np.float32), density, n)
        runs = make_runs((n, 0.5)) if n else make_runs()
        check_case(Case([update], residual, runs, SMALL, rice))
        check_case(Case([update], residual, runs, LAYOUT, rice))


@pytest.mark.parametrize("rice", [True, False])
def test_all_and_none_above_tau(rice):
    for n in (64, 65, 1000):
        runs = make_runs((n, 0.5))
        for value in (0.0, -0.0, 0.5, -0.5, 1.0, np.nextafter(np.float32(0.5), np.float32(0)), -3.75):
            update = np.full(n, value, np.float32)
            coded = check_case(Case([update], np.zeros(n, np.float32), runs, SMALL, rice))
            assert coded.sent.sum() == (n if abs(value) >= 0.5 else 0)


def test_nothing_to_send_takes_no_bytes():
    n = 1000
    coded = check_case(Case([np.zeros(n, np.float32)], np.zeros(n, np.float32), make_runs((n, 0.5)), LAYOUT, True))
    assert coded.tiles.size == 0


@pytest.mark.parametrize("rice", [True, False])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64, 65, 71, 72, 73, 127, 128, 129, 135, 136, 256])
def test_entries_of_one_region(count, rice):
    """Counts near tile_min and tile_max: alone, after a region with waiting entries, and before one."""
    for others in ((), (3,)):
        for counts in ((count, *others), (*others, count), (*others, count, 0, 0, 0, 0, 5)):
            update = spread_entries(*counts, region=256)
            runs = make_runs((update.size, 0.5))
            coded = check_case(Case([update], np.zeros_like(update), runs, SMALL, rice))
            tiles = cpu.inspect(coded.tiles, update.size, rice)[:, ENTRIES]
            np.testing.assert_array_equal(tiles, plan(np.array(counts), SMALL))


@pytest.mark.parametrize(
    "counts",
    [
        (7, 7, 7, 7, 7, 7, 7, 7, 7),
        (7, 7, 7, 7, 3, 7, 7),
        (7, 7, 7, 7, 4, 1),
        (1, 0, 0, 0, 1, 0, 0, 1, 0, 1),
        (0, 0, 1, 0, 0, 0, 0, 0, 1),
        (0, 0, 0, 0, 0, 0, 0, 0, 0),
        (7, 8, 7, 0, 8, 1, 1, 1, 1, 1),
        (64, 0, 0, 0, 0, 0, 64),
        (7, 71, 7, 200, 7),
    ],
)
@pytest.mark.parametrize("layout", [SMALL, Layout(256, 64, 8, 14, 5), Layout(256, 64, 8, 15, 1)])
def test_shared_tiles(counts, layout):
    """Shared tiles end at `group` entries, at `group_regions` regions, and before a region with tiles."""
    update = spread_entries(*counts, region=256)
    runs = make_runs((update.size, 0.5))
    for rice in (True, False):
        for threads in (1, 3):
            coded = check_case(Case([update], np.zeros_like(update), runs, layout, rice), threads)
            tiles = cpu.inspect(coded.tiles, update.size, rice)[:, ENTRIES]
            np.testing.assert_array_equal(tiles, plan(np.array(counts), layout))


@pytest.mark.parametrize("count", [511, 512, 513, 4095, 4096, 4097, 4096 + 511, 4096 + 512, 2 * 4096 + 1])
def test_tiles_of_the_default_layout(count):
    update = spread_entries(count, 1, region=LAYOUT.region)
    coded = check_case(Case([update], np.zeros_like(update), make_runs((update.size, 0.5)), LAYOUT, True), 2)
    tiles = cpu.inspect(coded.tiles, update.size)[:, ENTRIES]
    np.testing.assert_array_equal(tiles, plan(np.array([count, 1])))
    assert tiles.sum() == count + 1


@pytest.mark.parametrize("last", [2047 - 4 * 511, 2048 - 4 * 511, 2049 - 4 * 511, 511])
def test_shared_tiles_of_the_default_layout(last):
    counts = (511, 511, 511, 511, last, 2)
    update = spread_entries(*counts, region=LAYOUT.region)
    coded = check_case(Case([update], np.zeros_like(update), make_runs((update.size, 0.5)), LAYOUT, False), 2)
    tiles = cpu.inspect(coded.tiles, update.size, False)[:, ENTRIES]
    np.testing.assert_array_equal(tiles, plan(np.array(counts)))
    assert tiles[0] == 4 * 511 + last + 2 * (last < 4)


@pytest.mark.parametrize("rice", [True, False])
def test_runs_and_arrays_end_within_chunks(rice):
    """Runs and arrays end at every index of the first two blocks, together or separately."""
    n = 200
    for border in range(1, 135):
        runs = make_runs((border, 0.5), (n - border, 0.3))
        update, residual = noise(n, np.repeat(runs.taus, runs.lengths), 0.5, border)
        for cuts in ([border], [border - 1, border], [n - border], [0, 0, 64, 128, n, n]):
            encode_like_reference(Case(split(update, cuts), residual, runs, SMALL, rice))


def test_runs_of_one_element_each():
    n = 300
    taus = np.float32(2.0) ** np.arange(-126, 126, 0.84, np.float32)[:n]
    runs = make_runs(*[(1, tau) for tau in taus])
    update, residual = noise(n, runs.taus, 0.5, 4)
    check_case(Case(split(update, list(range(n))), residual, runs, SMALL, True))


@pytest.mark.parametrize("tau", [TINY, 1.1754945e-38, 3.3e-38, 1e-37, 1.0])
def test_denormal_numbers(tau):
    """Updates, residuals and remainders are below the smallest normal number."""
    rng = np.random.default_rng(0)
    n = 1000
    bits = rng.integers(0, 1 << 24, n, np.uint32) | rng.integers(0, 2, n, np.uint32) << np.uint32(31)
    update = bits.view(np.float32)
    residual = (rng.integers(0, 1 << 22, n, np.uint32)).view(np.float32)
    coded = check_case(Case([update], residual, make_runs((n, tau)), SMALL, True))
    assert (coded.sent.sum() > 0) == (tau < 2e-38)


@pytest.mark.parametrize("rice", [True, False])
@pytest.mark.parametrize("tau", [1.0, 0.3, 2.0**-10, TINY, 1.9999999 * TINY, 2.0**96, 1.7 * 2.0**95, HUGE])
def test_largest_multiples_of_tau(tau, rice):
    """2**30 times tau is sent, with a residual of nearly tau; the next float32 is a fault."""
    most = limit(np.array([tau], np.float32))[0]
    n = 130
    runs = make_runs((n, tau))
    for at in (0, 63, 64, 129):
        for sign in (1, -1):
            update, residual = np.zeros(n, np.float32), np.zeros(n, np.float32)
            update[at] = sign * most
            residual[at] = sign * np.nextafter(np.float32(tau), np.float32(0))
            coded = check_case(Case([update], residual, runs, SMALL, rice))
            assert coded.fault == -1
            _, _, m = reference.read(coded.tiles, n, rice)
            assert m.tolist() != []
            assert m.max() <= M_MAX
            update[at] = sign * np.nextafter(most, np.float32(np.inf))
            assert check_case(Case([update], residual, runs, SMALL, rice)).fault == at


@pytest.mark.parametrize("tau", [1.0, 0.3, TINY, 2.0**96, HUGE])
def test_sums_beyond_the_largest_multiple_keep_the_rest(tau):
    """An update and a residual at the limit: the sum of 2**31 tau is more than an entry carries."""
    most = limit(np.array([tau], np.float32))[0]
    update, residual = np.zeros(70, np.float32), np.zeros(70, np.float32)
    update[5], update[69] = most, -most
    residual[:] = update
    coded = check_case(Case([update], residual, make_runs((70, tau)), SMALL, True))
    _, _, m = reference.read(coded.tiles, 70, True)
    assert m.tolist() == [min(M_MAX, int(2 * np.float64(most) / np.float64(np.float32(tau))))] * 2


@pytest.mark.parametrize("tau", [1.0, 0.3, 1e-6, 1.1754945e-38])
def test_multiples_about_whole_numbers(tau):
    """Sums are within two steps of float32 of m * tau, for m below 2**30."""
    tau = np.float32(tau)
    m = np.unique(np.concatenate([np.arange(1, 70), 2 ** np.arange(30)[:, None] + [-1, 0, 1]], axis=None))
    m = m[(m > 0) & (m < 2**30)]
    exact = reference.amount(m, tau)
    steps = [exact]
    for towards in (np.float32(np.inf), np.float32(0)):
        for _ in range(2):
            steps.append(np.nextafter(steps[-1] if len(steps) % 2 == 0 else exact, towards))
    update = np.concatenate(steps)
    update = update[np.abs(update) <= limit(np.array([tau]))[0]]
    for signed in (update, -update):
        residual = np.zeros_like(signed)
        check_case(Case([signed], residual, make_runs((signed.size, tau)), SMALL, True))
