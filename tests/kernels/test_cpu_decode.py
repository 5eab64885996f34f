"""Tests of `cpu.decode` and `cpu.inspect` against the specification."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdx.kernels import cpu, reference
from hvdx.kernels.table import ENTRIES, FIRST, LAST, LENGTH, START
from hvdx.kernels.tiles import TILE_MAX, Layout, Malformed, Runs
from tests.kernels.agreement import same_bits
from tests.kernels.strategies import cases, fixed, lengths_of, make_runs, noise, seeds, split, taus

# What an output holds before, for each way in which it becomes a sum, or has it added.
WAYS = {cpu.ADD_EACH: 0, cpu.SET_SUM: 5, cpu.ADD_SUM: 1 / 3}

scales = st.one_of(st.sampled_from([1 / 3, 0.7, 1.0, 0.5, -1.0, 0.0, 2.0**-30]), st.floats(-4, 4, width=32))


@st.composite
def several_messages(draw):
    """Draw (messages, n, rice, cuts of the output). Each message has its own runs and taus, like those of ranks."""
    n = draw(st.sampled_from([300, 0, 1, 64, 65, 4097, 5000]))
    rice, messages = draw(st.booleans()), []
    for _ in range(draw(st.integers(1, 3))):
        lengths = lengths_of(n, draw(st.lists(st.integers(0, n), max_size=3)))
        runs = Runs(np.array(lengths, np.int64), np.array([draw(taus) for _ in lengths], np.float32))
        density = draw(st.sampled_from([0.05, 0.6, 0, 0.001]))
        update, residual = noise(n, np.repeat(runs.taus, runs.lengths), density, draw(seeds))
        tiles = cpu.encode([update], residual, runs, rice, Layout(256, 64, 8, 32, 4), threads=1).tiles
        messages.append((tiles, runs))
    return messages, n, rice, draw(st.lists(st.integers(0, n), max_size=4))


@fixed
@given(several_messages(), scales, seeds, st.sampled_from([1, 2, 3, 5]))
def test_decode_matches_reference(given_messages, scale, seed, threads):
    """Messages are added in their order, for any number of threads."""
    messages, n, rice, cuts = given_messages
    start = np.random.default_rng(seed).normal(0, 1, n).astype(np.float32)
    for clear in (cpu.ADD_EACH, cpu.SET_SUM):
        got, want = split(start.copy(), cuts), split(np.zeros(n, np.float32) if clear else start.copy(), cuts)
        with np.errstate(over="ignore", invalid="ignore"):
            cpu.decode(messages, scale, got, rice, threads, clear)
            reference.decode(messages, scale, want, rice)
        for a, b in zip(got, want, strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("rice", [True, False])
def test_decode_adds_in_order(rice):
    """float32 sums depend on their order. It is that of the messages, for any number of threads."""
    n = 20_000
    messages = []
    for rank, tau in enumerate((1.0, 2.0**-24, 3e-8, 0.7)):
        runs = make_runs((n, tau))
        update, residual = noise(n, np.full(n, tau, np.float32), 0.5, rank)
        messages.append((cpu.encode([update], residual, runs, rice, threads=1).tiles, runs))
    results = []
    for order in (messages, messages[::-1]):
        want = np.zeros(n, np.float32)
        reference.decode(order, 1 / 3, [want], rice)
        for threads in (1, 2, 3, 5):
            for clear in (cpu.ADD_EACH, cpu.SET_SUM):
                got = np.full(n, np.nan if clear else 0, np.float32)
                cpu.decode(order, 1 / 3, [got], rice, threads, clear)
                assert same_bits(got, want)
        results.append(want)
    assert not same_bits(*results)


@pytest.mark.parametrize(
    ("way", "cached"), [(cpu.ADD_EACH, 0), (cpu.SET_SUM, 0), (cpu.SET_SUM, 10**6), (cpu.ADD_SUM, 0)]
)
def test_decode_keeps_to_its_output(way, cached, monkeypatch):
    """The output consists of unaligned views of a larger array, and nothing beside them changes."""
    monkeypatch.setattr(cpu, "_CACHED", cached)
    n = 1000
    runs = make_runs((n, 0.5))
    update, residual = noise(n, np.full(n, 0.5, np.float32), 0.3, 2)
    tiles = cpu.encode([update], residual, runs, threads=1).tiles
    want = np.zeros(n, np.float32)
    reference.decode([(tiles, runs)], 1.0, [want])
    for first in range(1, 18):
        room = np.full(n + 60, 7, np.float32)
        halves = room[first : first + 300], room[first + 310 : first + 1010]
        for half in halves:
            half[:] = WAYS[way]
        sums = np.concatenate(halves) + want if way == cpu.ADD_SUM else want
        cpu.decode([(tiles, runs)], 1.0, halves, threads=1, way=way)
        assert same_bits(np.concatenate(halves), sums)
        assert (room[:first] == 7).all()
        assert (room[first + 300 : first + 310] == 7).all()
        assert (room[first + 1010 :] == 7).all()


@pytest.mark.parametrize("shift", [0, 1])
def test_decode_to_every_other_block_of_an_array(shift):
    """Blocks that begin at the same distance from a line of the caches are filled together."""
    space = np.full(2 * 80 * 512 + 16, 9, np.float32)
    first = (-space.ctypes.data & 63) // 4
    rows = space[first : first + 2 * 80 * 512].reshape(80, 2, 512)
    blocks = [row[shift * (i % 3) :] for i, row in enumerate(rows[:, 0])]
    n = sum(block.size for block in blocks)
    update = np.random.default_rng(8).normal(size=n).astype(np.float32)
    runs, want = Runs(np.array([n]), np.ones(1, np.float32)), np.zeros(n, np.float32)
    tiles = cpu.encode([update], np.zeros_like(update), runs, threads=1).tiles
    cpu.decode([(tiles, runs)], 1.0, [want], threads=1)
    cpu.decode([(tiles, runs)], 1.0, blocks, threads=1, way=cpu.SET_SUM)
    assert np.concatenate(blocks).tobytes() == want.tobytes()
    cpu.decode([(tiles, runs)], 1.0, blocks, threads=1, way=cpu.ADD_SUM)
    assert np.concatenate(blocks).tobytes() == (want + want).tobytes()
    assert (rows[:, 1] == 9).all()


@pytest.mark.parametrize("way", WAYS)
def test_many_messages_are_decoded_in_parts(way, monkeypatch):
    """The entries of a few messages are listed at a time; the order of additions stays."""
    runs, messages = make_runs((700, 0.3)), []
    for seed in range(5):
        update, residual = noise(700, np.full(700, 0.3, np.float32), 0.4, seed)
        messages.append((cpu.encode([update], residual, runs, threads=1).tiles, runs))
    want, got = np.zeros(700, np.float32), np.full(700, WAYS[way], np.float32)
    reference.decode(messages, 1 / 3, [want])
    want = got + want if way == cpu.ADD_SUM else want
    monkeypatch.setattr(cpu.dec, "TOGETHER", 2)
    cpu.decode(messages, 1 / 3, [got], threads=1, way=way)
    assert same_bits(got, want)


#: Mean gap of each part of a message, and share of entries with m above 1: small and large parameters, escapes, which
#: three entries of a word hold or not, and changes within a tile.
PARTS = [(0.1, 0), (3, 0), (100, 0), (100, 0.02), (100, 0.5), (500, 0), (3000, 0.01)]


@pytest.mark.parametrize("parts", [*([part] for part in PARTS), PARTS[:5]], ids=str)
def test_tiles_of_one_message_are_read_together(parts):
    """Groups of 8 tiles of different lengths, their last one incomplete. Some gaps are far above the mean."""
    rng = np.random.default_rng(len(parts))
    gaps, m = [], []
    for mean, share in parts:
        chosen = rng.exponential(mean, 900).astype(np.int64)
        gaps.append(np.where(rng.random(900) < 0.05, chosen * rng.integers(1, 2 + 60_000 // (1 + mean), 900), chosen))
        m.append(np.where(rng.random(900) < share, rng.integers(2, 400, 900), 1))
    index, times = np.cumsum(1 + np.concatenate(gaps)), np.concatenate(m)
    n, signs, layout = int(index[-1]) + 5, rng.random(len(index)) < 0.5, Layout(1 << 12, 200, 20, 90, 64)
    runs = make_runs((n // 2, 0.5), (n - n // 2, 0.25))
    tiles = reference.write(index, signs, times, n, True, layout)
    assert len(cpu.inspect(tiles, n, threads=1)) > 4
    want = np.zeros(n, np.float32)
    value = reference.amount(times, np.repeat(runs.taus, runs.lengths)[index])
    want[index] += np.where(signs, -value, value)
    for way, before in WAYS.items():
        got = np.full(n, before, np.float32)
        sums = got + want if way == cpu.ADD_SUM else want
        cpu.decode([(tiles, runs)], 1.0, [got], threads=1, way=way)
        assert same_bits(got, sums)


def test_damage_to_any_tile_of_a_group_is_found():
    rng = np.random.default_rng(5)
    index, refused = np.flatnonzero(rng.random(40_000) < 0.03), 0
    tiles = reference.write(index, index % 3 == 0, 1 + index % 50 // 49, 40_000, True, Layout(1 << 12, 100, 20, 90, 8))
    rows = cpu.inspect(tiles, 40_000, threads=1)
    assert len(rows) > 9
    for start, length in rows[:, [START, LENGTH]]:
        # The last bit of the payload is a sign, or must be 0.
        wrong = tiles.copy()
        wrong[start + length - 1] ^= 0x80
        right = []
        for look in (lambda t=wrong: cpu.inspect(t, 40_000, threads=1), lambda t=wrong: reference.read(t, 40_000)):
            try:
                look()
                right.append(True)
            except Malformed:
                right.append(False)
        assert right[0] == right[1]
        refused += not right[0]
    assert refused > 9


def test_decode_takes_no_messages():
    out = np.ones(3, np.float32)
    cpu.decode([], 1.0, [out])
    assert (out == 1).all()
    cpu.decode([], 1.0, [out], way=cpu.SET_SUM)
    assert (out == 0).all()


def test_decode_names_the_bad_message_and_changes_nothing():
    runs = make_runs((100, 0.5))
    update = np.zeros(100, np.float32)
    update[[3, 40, 50]] = 0.5
    tiles = cpu.encode([update], np.zeros_like(update), runs, threads=1).tiles
    out = np.ones(100, np.float32)
    with pytest.raises(Malformed) as caught:
        cpu.decode([(tiles, runs), (tiles, runs), (tiles[:-1], runs)], 1.0, [out], threads=1)
    assert caught.value.message == 2
    assert (out == 1).all()
    # The payload is damaged, which only the loop that adds notices.
    wrong = tiles.copy()
    wrong[-1] |= 0x80
    for way in WAYS:
        with pytest.raises(Malformed, match="after the last entry") as caught:
            cpu.decode([(tiles, runs), (wrong, runs), (wrong, runs)], 1.0, [out], threads=1, way=way)
        assert caught.value.message == 1
        assert way != cpu.ADD_EACH or (out == 1).all()


@fixed
@given(cases(), st.sampled_from([1, 3]))
def test_inspect_finds_what_reference_reads(case, threads):
    tiles = reference.encode(case.update, case.residual.copy(), case.runs, case.rice, case.layout).tiles
    index, _, _ = reference.read(tiles, case.n, case.rice)
    rows = cpu.inspect(tiles, case.n, case.rice, threads)
    assert np.isin(rows[:, FIRST], index).all()
    assert np.isin(rows[:, LAST], index).all()
    assert rows[:, ENTRIES].sum() == len(index)
    if len(index):
        with pytest.raises(Malformed):
            cpu.inspect(tiles, int(index[-1]), case.rice, threads)


#: n, and indices near the limits of 32 bits and near n.
FAR = [
    (2**33, [0, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**33 - 1]),
    (2**40, [2**40 - 1]),
    (2**40, [5, 2**32 + 7, 2**39, 2**39 + 1, 2**40 - 2, 2**40 - 1]),
    (2**40, list(range(2**36, 2**36 + 700))),
]


@pytest.mark.parametrize(("n", "index"), FAR, ids=range(len(FAR)))
@pytest.mark.parametrize("rice", [True, False])
def test_inspect_reads_gaps_beyond_32_bits(n, index, rice):
    """Messages are for more elements than fit in memory, and are written by the specification."""
    where = np.array(index, np.int64)
    negative, m = where % 3 == 0, 1 + where % 2 * 5
    # With long regions the specification's list of them is short.
    layout = Layout(region=2**26, tile_max=128, tile_min=16, group=32, group_regions=8)
    tiles = reference.write(where, negative, m, n, rice, layout)
    got = reference.read(tiles, n, rice)
    for a, b in zip(got, (where, negative, m), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = cpu.inspect(tiles, n, rice, threads=1)
    assert rows[0, FIRST] == index[0]
    assert rows[-1, LAST] == index[-1]
    with pytest.raises(Malformed, match="outside"):
        cpu.inspect(tiles, index[-1], rice, threads=1)


@pytest.mark.parametrize("rice", [True, False])
def test_inspect_reads_far_entries_of_one_tile(rice):
    """A tile spans 2**31 elements, the most for plain positions, and has an escape of that length."""
    where = np.array([3, 4, 2**31 + 1, 2**31 + 2])
    signs, m = np.array([True, False, True, False]), np.array([1, 2**31 - 1, 1, 2])
    tiles = np.frombuffer(reference.tile(where, signs, m, -1, rice), np.uint8)
    for a, b in zip(reference.read(tiles, 2**32, rice), (where, signs, m), strict=True):
        np.testing.assert_array_equal(a, b)
    assert cpu.inspect(tiles, 2**32, rice, threads=1)[0, LAST] == 2**31 + 2


def test_inspect_checks_the_limit_of_a_tile():
    for entries, right in ((TILE_MAX, True), (TILE_MAX + 1, False)):
        where = np.arange(entries)
        tile = reference.tile(where, np.zeros(entries, bool), np.ones(entries, np.int64), -1, True)
        tiles = np.frombuffer(tile, np.uint8)
        if right:
            assert len(cpu.inspect(tiles, entries, threads=1)) == 1
        else:
            with pytest.raises(Malformed, match="4096"):
                cpu.inspect(tiles, entries, threads=1)


_IN_FREED_MEMORY = """
import numpy as np
from hvdx.kernels import cpu
from hvdx.kernels.tiles import Runs

update = np.random.default_rng(0).normal(size=6000).astype(np.float32)
runs = Runs(np.array([update.size]), np.array([1.5], np.float32))
tiles = cpu.encode([update], np.zeros_like(update), runs).tiles
expected = 3 * np.where(np.abs(update) < 1.5, 0, np.trunc(update / 1.5) * 1.5).astype(np.float32)
for way in cpu.ADD_EACH, cpu.SET_SUM:
    out = np.zeros_like(update)
    cpu.decode([(tiles, runs)] * 3, 1.0, [out], threads=2, way=way)
    np.testing.assert_array_equal(out, expected)
"""


@pytest.mark.long
def test_memory_of_the_decoder_is_not_freed_while_it_works():
    """glibc overwrites what is freed, so that a use of it shows."""
    subprocess.run([sys.executable, "-c", _IN_FREED_MEMORY], env=os.environ | {"MALLOC_PERTURB_": "165"}, check=True)


@pytest.mark.parametrize("rice", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_decode_adds_far_entries_of_one_tile(rice, threads):
    """The tile is longer than the distances that a list of 32 bits holds."""
    where = np.array([3, 2**30 - 2, 2**30 + 1, 2**30 + 2, 2**30 + 3, 2**30 + 90])
    signs, m = where % 2 == 0, np.array([1, 1, 5, 1, 1, 2])
    tiles = np.frombuffer(reference.tile(where, signs, m, -1, rice), np.uint8)
    out = np.zeros(2**30 + 100, np.float32)  # Only the touched pages take memory.
    cpu.decode([(tiles, make_runs((2**30 + 2, 0.5), (98, 0.25)))], 1.0, [out], rice, threads)
    tau = np.where(where < 2**30 + 2, 0.5, 0.25)
    assert same_bits(out[where], (np.where(signs, -m, m) * tau).astype(np.float32))
    assert np.count_nonzero(out[:100]) == 1
    assert np.count_nonzero(out[2**30 - 100 :]) == 5
