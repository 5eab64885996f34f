"""Tests of the CUDA kernels in Numba's simulator against the reference, to the byte. They need no GPU.

The simulator must be chosen before numba.cuda is imported, so the cases run in a separate process.
"""

# Tests: kernels/cuda_decode.py, kernels/cuda_device.py, kernels/cuda_encode.py, kernels/cuda_tiles.py

import os

import numpy as np
import pytest

from hvdx.kernels import reference
from hvdx.kernels.tiles import LAYOUT, M_MAX, SWITCH, Layout, Malformed, Runs, limit, plan
from tests.kernels.counting import count_work
from tests.kernels.simulator import check_in_simulator

SIMULATED = os.environ.get("HVDX_CUDA_SIMULATOR") == "1"
#: Time limit in seconds; the tests take about a quarter of it on one core.
TIME_LIMIT = 240

# Regions have two chunks. Tiles and groups end in the middle of a region, at its end, and after several regions.
SMALL = Layout(region=128, tile_max=24, tile_min=8, group=12, group_regions=3)
# Tiles have enough entries to change their Rice parameter.
LONG = Layout(region=8192, tile_max=400, tile_min=100, group=300, group_regions=4)


@pytest.mark.long
def test_kernels_match_the_reference_in_the_simulator():
    """Run TestSimulator in a process with the simulator."""
    check_in_simulator(__file__, TIME_LIMIT)


# The started process must not start another one.
test_kernels_match_the_reference_in_the_simulator.__test__ = not SIMULATED


def make_runs(*pairs):
    """Return runs from pairs of (length, tau)."""
    return Runs(np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], np.float32))


def make_case(n, density, seed=0, tau=0.5, more=0.0):
    """Return an update and a residual below tau. About a share `density` crosses tau, `more` of it many times over."""
    rng = np.random.default_rng(seed)
    residual = (rng.uniform(-1, 1, n) * 0.99 * tau).astype(np.float32)
    update = (rng.uniform(-1, 1, n) * 0.001 * tau).astype(np.float32)
    chosen = rng.random(n) < density
    update[chosen] = (rng.choice([-1, 1], n) * rng.uniform(2, 2.9, n) * tau).astype(np.float32)[chosen]
    several = chosen & (rng.random(n) < more)
    update[several] *= (2.0 ** rng.integers(1, 20, n)).astype(np.float32)[several]
    return update, residual


def split(vector, *sizes):
    """Split a vector into arrays of these sizes and an array of the rest."""
    return np.split(vector, np.cumsum(sizes))


# name: (arrays of the update, residual, runs)
CASES = {}


def add_case(name, update, residual, *pairs):
    """Add a row to CASES."""
    update = update if isinstance(update, list) else [update]
    CASES[name] = update, residual, make_runs(*(pairs or [(len(residual), 0.5)]))


CASES["nothing"] = [], np.zeros(0, np.float32), make_runs()
for size in (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257):
    add_case(f"{size} elements", *make_case(size, 0.3, size, more=0.2))
add_case("sparse", *make_case(1200, 0.01, 1))
add_case("dense", *make_case(300, 0.8, 2, more=0.05))
add_case("none crosses", np.zeros(300, np.float32), np.zeros(300, np.float32))
add_case("all cross", np.full(200, -0.5, np.float32), np.zeros(200, np.float32))
update = np.r_[1, np.zeros(600), 1, 1, np.zeros(400), -1].astype(np.float32)
add_case("empty regions between", update, np.zeros_like(update))
update = np.r_[np.zeros(256), np.ones(128), np.zeros(128), np.ones(9), np.zeros(9)].astype(np.float32)
add_case("full regions between", update, np.zeros_like(update))
add_case("negative zeros", np.full(70, -0.0, np.float32), np.full(70, -0.0, np.float32))
add_case("nothing is left", np.array([0.5, -0.5, 1, -1] * 10, np.float32), np.full(40, -0.0, np.float32))
add_case("denormals", np.full(40, 3e-42, np.float32), np.full(40, -1e-42, np.float32), (40, 1.2e-38))
add_case("odd tau", *make_case(300, 0.3, 3, tau=0.3, more=0.5), (300, 0.3))
add_case("hardly representable", (np.arange(200) / 7).astype(np.float32), np.zeros(200, np.float32), (200, 1 / 3))
# The product rounds down so far that one more tau fits into the remainder.
add_case("one tau more", np.array([1269331.625, -1269331.625, 0], np.float32), np.zeros(3, np.float32), (3, 0.36974069))
add_case("huge multiples", np.array([2.0**29, -(2.0**29), 3, 2.0**20, 0.1], np.float32), np.zeros(5, np.float32))
add_case("largest multiples", np.full(9, 1024, np.float32), np.full(9, 5e-7, np.float32), (9, 9.5367431640625e-07))
update, residual = make_case(420, 0.2, 4, more=0.1)
add_case("arrays", split(update, 1, 62, 2, 0, 100, 31), residual)
add_case("runs", update, residual, (1, 0.5), (95, 0.7), (33, 0.5), (200, 0.61), (91, 0.5))
add_case("arrays and runs", split(update, 100, 28, 200), residual, (50, 0.7), (78, 0.5), (200, 0.6), (92, 1.5))
add_case("matrix", [update.reshape(7, 60)], residual)
# Cases that are also written with plain positions; only the payload differs.
PLAIN = ("nothing", "1 elements", "65 elements", "none crosses", "huge multiples", "empty regions between", "runs")
# Cases that are also encoded with a lookahead.
LOOKAHEAD = ("65 elements", "none crosses", "negative zeros", "nothing is left", "odd tau", "arrays and runs")


def craft(first, entries, multiple, skipped, payload):
    """Return a tile with these numbers in its header."""
    header = [reference.varint(v) for v in (first, entries << 1 | multiple, skipped, len(payload))]
    return np.frombuffer(b"".join(header) + bytes(payload), np.uint8)


def make_bits(*parts):
    """Return a payload of parts (number, bits) or (number, "code", parameter)."""
    bits = reference.Bits()
    for part in parts:
        bits.code(part[0], part[2]) if part[1] == "code" else bits.put(*part)
    return bits.to_bytes()


def make_words(*numbers):
    """Return a payload of 32-bit numbers."""
    return np.array(numbers, "<u4").tobytes()


MINUS, PLUS, KEEP = (1, 1), (0, 1), (0, 1)
ONE_MULTIPLE = (0, 5), (0, "code", 0), MINUS
# name: (tile, True if it is entropy-coded, True if it is valid)
CRAFTED = {
    "up to the last": (craft(0, 3, 0, 5, make_bits(PLUS, KEEP, (5, "code", 0), MINUS, PLUS)), True, True),
    "onto the last": (craft(0, 3, 0, 5, make_bits(PLUS, KEEP, (6, "code", 0), MINUS, PLUS)), True, False),
    "a last multiple": (craft(9, 1, 1, 0, make_bits(*ONE_MULTIPLE, (7, "code", 0), (0, "code", 0))), True, True),
    "a byte too many": (
        craft(9, 1, 1, 0, make_bits(*ONE_MULTIPLE, (7, "code", 0), (0, "code", 0)) + b"\0"), True, False
    ),
    "a bit too many": (craft(9, 1, 0, 0, b"\x02"), True, False),
    "the largest multiple": (
        craft(9, 1, 1, 0, make_bits(*ONE_MULTIPLE, (M_MAX - 2, "code", 0), (0, "code", 0))), True, True
    ),
    "too large a multiple": (
        craft(9, 1, 1, 0, make_bits(*ONE_MULTIPLE, (M_MAX - 1, "code", 0), (0, "code", 0))), True, False
    ),
    "no multiple": (craft(9, 2, 1, 0, make_bits((0, 5), (2, "code", 0), PLUS, PLUS)), True, False),
    "a multiple after the last": (
        craft(9, 1, 1, 0, make_bits(*ONE_MULTIPLE, (0, "code", 0), (1, "code", 0))), True, False
    ),
    "the end of a number is missing": (
        craft(9, 1, 1, 0, make_bits((5, 5), (0, "code", 5), PLUS, (0, "code", 0), (0, "code", 5))[:2]), True, False
    ),
    "an unfinished number": (craft(9, 3, 0, 50, b"\xfe"), True, False),
    "positions": (craft(9, 2, 0, 3, make_words(4 | 1 << 31, 0)), False, True),
    "positions, a word too many": (craft(9, 2, 0, 3, make_words(4, 0, 7)), False, False),
    "positions, another first": (craft(9, 2, 0, 3, make_words(3, 0)), False, False),
    "positions, a first before": (craft(9, 2, 0, 3, make_words(5, 0)), False, False),
    "positions, another last": (craft(9, 2, 0, 3, make_words(4, 1)), False, False),
    "positions, one twice": (craft(9, 3, 0, 3, make_words(5, 5, 0)), False, False),
    "positions, far before": (craft(9, 2, 0, 3, make_words(2**31 - 1, 0)), False, False),
    "positions, multiples": (craft(9, 2, 1, 3, make_words(4, 0, M_MAX, 1)), False, True),
    "positions, no multiple": (craft(9, 2, 1, 3, make_words(4, 0, 1, 1)), False, False),
    "positions, a multiple of none": (craft(9, 2, 1, 3, make_words(4, 0, 2, 0)), False, False),
    "positions, too large a multiple": (craft(9, 2, 1, 3, make_words(4, 0, 2, M_MAX + 1)), False, False),
    "positions, no multiples": (craft(9, 2, 1, 3, make_words(4, 0)), False, False),
}  # fmt: skip


class TestSimulator:
    """Tests that `test_kernels_match_the_reference_in_the_simulator` runs."""

    __test__ = SIMULATED

    @pytest.fixture(autouse=True)
    def _small_chunks(self, monkeypatch):
        """Give the regions of SMALL two chunks."""
        monkeypatch.setattr("hvdx.kernels.cuda.CHUNK", 64)

    @pytest.mark.parametrize("name", CASES)
    def test_encode_writes_the_bytes_of_the_reference(self, name):
        check_encode(*CASES[name], True, SMALL)

    @pytest.mark.parametrize("name", LOOKAHEAD)
    def test_encode_looks_ahead_as_the_reference(self, name):
        check_encode(*CASES[name], True, SMALL, lookahead=3.0)

    def test_multiples_are_those_of_a_division_in_float64(self):
        from numba import cuda

        from hvdx.kernels import cuda_encode

        rng = np.random.default_rng(0)
        taus = (2.0 ** rng.integers(-30, 30, 3000) * rng.uniform(1, 2, 3000)).astype(np.float32)
        sizes = (taus.astype(np.float64) * 2.0 ** rng.uniform(0, 31, 3000)).astype(np.float32)
        # Multiples of tau, and the numbers before them, whose quotient float32 may round up.
        sizes[:800] = (rng.integers(1, 2**22, 800) * taus[:800].astype(np.float64)).astype(np.float32)
        sizes[400:800] = np.nextafter(sizes[400:800], np.float32(0))
        # Quotients that lack 1 / tau of a whole number above 2**30: float64 rounds them up.
        for i in range(800, 900):
            odd = int(rng.integers(2**22, 2**22 + 2**20)) * 2 + 1
            missing = -pow(2**30, -1, odd) % odd + odd
            if missing < 2**24:
                sizes[i], taus[i] = missing * 2.0**30, odd
        sizes = np.maximum(sizes, taus)
        assert (np.float64(sizes) / np.float64(taus) % 1 == 0)[850:900].any()
        expected = np.minimum(np.trunc(sizes.astype(np.float64) / taus.astype(np.float64)), M_MAX).astype(np.int64)
        expected += sizes - reference.amount(expected, taus) >= taus

        @cuda.jit
        def run(sizes, taus, out):
            for i in range(out.size):
                out[i] = cuda_encode.multiples(sizes[i], taus[i])

        got = cuda.to_device(np.zeros(3000, np.int64))
        run[1, 1](cuda.to_device(sizes), cuda.to_device(taus), got)
        np.testing.assert_array_equal(got.copy_to_host(), expected)

    def test_plan_is_that_of_the_reference(self):
        from numba import cuda

        from hvdx.kernels import cuda_encode

        rng = np.random.default_rng(1)
        for _ in range(40):
            regions, tile_max, tile_min = (int(rng.integers(1, most)) for most in (20, 30, 20))
            layout = Layout(64, tile_max, tile_min, int(rng.integers(1, 40)), int(rng.integers(1, 6)))
            counts = rng.integers(0, rng.choice([3, 20, 60]), regions) * (rng.random(regions) < 0.7)
            prefixes = np.stack([np.zeros(regions, np.int64), counts], axis=1).reshape(-1)
            arrays = [cuda.to_device(np.zeros(regions, np.int64)) for _ in range(6)]
            tiles = cuda.to_device(np.zeros((int(counts.sum()) + 1, cuda_encode.COLUMNS), np.int64))
            summary = cuda.to_device(np.array([0, -1, cuda_encode.NO_FAULT, 0]))
            cuda_encode.plan_tiles[2, cuda_encode.THREADS](
                cuda.to_device(prefixes), *arrays, tiles, summary, 1, *layout[1:]
            )
            expected, got = plan(counts, layout), tiles.copy_to_host()[: summary.copy_to_host()[cuda_encode.TILES]]
            assert got[:, cuda_encode.ENTRIES].tolist() == expected.tolist(), (layout, counts)
            assert got[:, cuda_encode.RANK].tolist() == (np.cumsum(expected) - expected).tolist()
            ends = np.cumsum(counts)
            for rank, entries, first, last in got[:, : cuda_encode.TO + 1]:
                assert ends[first] > rank
                assert ends[last] >= rank + entries
            assert arrays[0].copy_to_host().tolist() == (ends - counts).tolist()

    def test_sample_is_that_of_the_host(self):
        from hvdx.kernels import cpu
        from hvdx.kernels import cuda as kernels

        update, residual = make_case(500, 0.2, 12, more=0.5)
        update[:3] = np.inf, np.nan, 1e-45
        arrays = split(update, 70, 0, 100)
        lines = np.array([0, 3, 4, 31])
        got = kernels.sample([on_device(a) for a in arrays], on_device(residual), lines)
        np.testing.assert_array_equal(got, cpu.sample(arrays, residual, lines))

    @pytest.mark.parametrize(("arrays", "runs", "messages"), [(1, 1, 1), (30, 5, 7)])
    def test_launches_and_copies_do_not_grow(self, monkeypatch, arrays, runs, messages):
        from hvdx.kernels import cuda as kernels

        n = 600
        update, residual = make_case(n, 0.1, 13, more=0.1)
        sizes = [n // arrays] * (arrays - 1)
        taus = make_runs(*[(n // runs, 0.5)] * runs)
        handed, left, scratch = [on_device(a) for a in split(update, *sizes)], on_device(residual), kernels.Scratch()
        counted = count_work(monkeypatch)
        tiles = kernels.encode(handed, left, taus, layout=SMALL, lookahead=3.0, scratch=scratch).tiles.copy_to_host()
        assert (counted["launches"], counted["to host"], counted["to device"]) == (8, 2, 2)
        out = [on_device(a) for a in split(update, *sizes)]
        counted.clear()
        kernels.decode([(tiles, taus)] * messages, 0.5, out, scratch=scratch)
        assert (counted["launches"], counted["to host"], counted["to device"]) == (3, 1, 3)

    @pytest.mark.parametrize("name", PLAIN)
    def test_encode_writes_plain_positions_as_the_reference(self, name):
        check_encode(*CASES[name], False, SMALL)

    def test_encode_changes_parameters_as_the_reference(self):
        # The gaps change from wide to none and back, beyond the parameters whose costs are computed in parallel.
        rng = np.random.default_rng(0)
        check_gaps(np.r_[rng.geometric(0.02, 66), np.zeros(150, int), rng.geometric(0.02, 70)], rng)

    @pytest.mark.parametrize("more", [0, 1])
    def test_encode_keeps_a_parameter_up_to_the_cost_of_a_change(self, more):
        seed, dearer = 0, None
        while dearer != SWITCH + more:
            rng = np.random.default_rng(seed)
            gaps, seed = np.r_[5, rng.geometric(0.08, 64), 400], seed + 1
            before = reference.first_parameter(int(gaps[1:].sum()), len(gaps))
            cost = [sum(reference.code_length(int(g), k) for g in gaps[1:-1]) for k in range(20)]
            dearer = cost[before] - min(cost)
        check_gaps(gaps, rng)

    def test_encode_with_the_default_layout(self, monkeypatch):
        monkeypatch.setattr("hvdx.kernels.cuda.CHUNK", 2048)
        update, residual = make_case(2000, 0.05, 6, more=0.01)
        check_encode([update], residual, make_runs((2000, 0.5)), True, LAYOUT)

    def test_codec_writes_the_messages_of_the_host(self, monkeypatch):
        from hvdx.codec import Threshold
        from hvdx.errors import UpdateError, WireError

        monkeypatch.setattr("hvdx.kernels.cuda.CHUNK", 2048)
        host, gpu = (Threshold(target_density=0.1, device=device) for device in ("cpu", "cuda"))
        states = [codec.init([30, 200]) for codec in (host, gpu)]
        rng = np.random.default_rng(9)
        for lookahead in (0.0, 3.0, 0.0):
            update = [rng.normal(size=n).astype(np.float32) for n in (30, 200)]
            message, states[0] = host.encode(update, states[0], lookahead)
            other, states[1] = gpu.encode([on_device(u) for u in update], states[1], lookahead)
            assert message.tobytes() == other.tobytes()
        saved, resumed = states[1].arrays(), gpu.restore(states[1].arrays(), [30, 200]).arrays()
        assert all(saved[k].tobytes() == resumed[k].tobytes() == v.tobytes() for k, v in states[0].arrays().items())
        outs = [np.zeros(30, np.float32), np.zeros(200, np.float32)]
        others = [on_device(o) for o in outs]
        host.decode([message, message], outs, 0.5)
        gpu.decode([message, message], others, 0.5)
        assert all(o.tobytes() == other.copy_to_host().tobytes() for o, other in zip(outs, others, strict=True))
        with pytest.raises(WireError, match="rank 1"):
            gpu.decode([message, message[:-1]], others, 0.5)
        update[1][7] = np.nan
        with pytest.raises(UpdateError) as caught:
            gpu.encode([on_device(u) for u in update], states[1])
        assert (caught.value.variable, caught.value.element) == (1, 7)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**31])
    def test_encode_finds_faults_and_leaves_the_residual(self, bad):
        from hvdx.kernels import cuda as kernels

        update, residual = make_case(300, 0.2, 7)
        update[[140, 77, 299]] = bad
        runs = make_runs((100, 0.5), (200, 0.25))
        for arrays in ([update], split(update, 70, 100)):
            assert kernels.check([on_device(a) for a in arrays], runs) == reference.check(arrays, runs) == 77
            got, left = encode(arrays, residual, runs, True, SMALL)
            assert (got.fault, got.tiles.size, got.sent.sum()) == (77, 0, 0)
            np.testing.assert_array_equal(left, residual)
        update[:] = limit(runs.taus)[1]
        assert kernels.check([on_device(update)], runs) == -1
        update[250] = np.nextafter(update[250], np.float32(np.inf))
        assert kernels.check([on_device(update)], runs) == 250

    @pytest.mark.parametrize("tau", [1.0, 0.3])
    def test_sums_beyond_the_largest_multiple(self, tau):
        runs, update = make_runs((70, tau)), np.zeros(70, np.float32)
        update[[5, 69]] = limit(runs.taus)[0] * np.array([1, -1], np.float32)
        check_encode([update], update, runs, True, SMALL)

    @pytest.mark.parametrize("layout", [SMALL, LAYOUT], ids=["small", "work"])
    @pytest.mark.parametrize("rice", [True, False], ids=["rice", "plain"])
    def test_decode_adds_what_the_reference_adds(self, rice, layout):
        messages = make_messages(rice, layout, 0.12 if layout == SMALL else 0.4)
        n = 700
        start = make_case(n, 0.1, 9)[0]
        for scale, sizes in ((0.25, []), (1 / 3, [100, 0, 1, 500])):
            expected = [a.copy() for a in split(start, *sizes)]
            reference.decode(messages, scale, expected, rice)
            got = decode(messages, scale, split(start, *sizes), rice)
            assert [g.tobytes() for g in got] == [e.tobytes() for e in expected]

    def test_decode_of_no_messages_or_empty_ones_changes_nothing(self):
        start, runs = np.ones(9, np.float32), make_runs((9, 0.5))
        for messages in ([], [(np.zeros(0, np.uint8), runs)] * 2):
            assert decode(messages, 1, [start], True)[0].tobytes() == start.tobytes()

    @pytest.mark.parametrize("rice", [True, False], ids=["rice", "plain"])
    def test_decode_refuses_what_the_reference_refuses(self, rice):
        good, runs = make_messages(rice)[0]
        start = np.zeros(700, np.float32)
        refused = 0
        for hostile in mutations(good, 80):
            message = [(good, runs), (hostile, runs)]
            expected = [start.copy()]
            try:
                reference.decode(message, 0.5, expected, rice)
            except Malformed:
                refused += 1
                with pytest.raises(Malformed) as caught:
                    decode(message, 0.5, [start], rice)
                assert caught.value.message == 1
            else:
                assert decode(message, 0.5, [start], rice)[0].tobytes() == expected[0].tobytes()
        assert 20 < refused < 80

    @pytest.mark.parametrize("name", CRAFTED)
    def test_decode_refuses_what_is_crafted(self, name):
        tiles, rice, good = CRAFTED[name]
        runs, expected = make_runs((60, 0.5), (40, 0.25)), [np.zeros(100, np.float32)]
        if good:
            reference.decode([(tiles, runs)], 1, expected, rice)
            assert decode([(tiles, runs)], 1, [np.zeros(100, np.float32)], rice)[0].tobytes() == expected[0].tobytes()
        else:
            for decoder in (reference.decode, decode):
                with pytest.raises(Malformed):
                    decoder([(tiles, runs)], 1, expected, rice)

    @pytest.mark.parametrize("payload", [b"", b"\xff" * 40, b"\xff" * 7 + b"\0" * 9, b"\x1f" + b"\xff" * 30, b"\0" * 3])
    @pytest.mark.parametrize("multiple", [0, 1])
    def test_decode_survives_payloads_of_far_jumps(self, payload, multiple):
        from hvdx.kernels import cuda as kernels

        n = 2**40
        tiles = craft(5, 100, multiple, 2**30, payload)
        with pytest.raises(Malformed):
            reference.read(tiles, n)
        # `decode` calls this. Here no array of n elements is needed.
        with pytest.raises(Malformed):
            kernels._decode(
                [tiles], [kernels.table(tiles, n)], [make_runs((n, 1))], np.float32(1), np.array([[0, n, 0, 0]]), n,
                True, 0, kernels.Scratch(),
            )  # fmt: skip

    def test_encode_and_decode_name_what_is_wrong(self):
        from hvdx.kernels import cuda as kernels

        one, runs = on_device(np.zeros(4, np.float32)), make_runs((4, 0.5))
        half = on_device(np.zeros(4, np.float64))
        cases = [
            (TypeError, r"update\[1\]: expected float32, got float64", lambda: kernels.encode([one, half], one, runs)),
            (TypeError, "residual: expected an array on a GPU, got numpy.ndarray",
             lambda: kernels.encode([one], np.zeros(4, np.float32), runs)),
            (ValueError, "residual: expected the 4 elements", lambda: kernels.encode([one], one[:3], runs)),
            (ValueError, r"update\[0\]: expected a C-contiguous", lambda: kernels.encode([one[::2]], one, runs)),
            (ValueError, "the 4 elements of update", lambda: kernels.check([one], make_runs((5, 1)))),
            (ValueError, "normal, positive", lambda: kernels.check([one], make_runs((4, 0)))),
            (ValueError, "runs: expected lengths int64",
             lambda: kernels.check([one], Runs(runs.lengths, runs.taus.astype(float)))),
            (ValueError, "layout: ", lambda: kernels.encode([one], one, runs, layout=Layout(region=100))),
            (ValueError, r"runs: .* 3 elements of out",
             lambda: kernels.decode([(np.zeros(0, np.uint8), runs)], 1, one[:3])),
            (TypeError, r"messages\[0\]: expected tiles as uint8",
             lambda: kernels.decode([(np.zeros(3, np.int8), runs)], 1, one)),
        ]  # fmt: skip
        for kind, text, call in cases:
            with pytest.raises(kind, match=text):
                call()

    def test_tensors_are_asked_for_a_stream_only_if_they_accept_one(self):
        from hvdx.kernels.cuda import Exporter

        class Array:
            def __init__(self, accepts):
                self.accepts, self.handed = accepts, []

            def __dlpack__(self, *, stream=None):
                if stream is not None and not self.accepts:
                    raise RuntimeError("no stream")
                self.handed.append(stream)

        for accepts, expected in ((True, [5, None]), (False, [None, None])):
            array = Array(accepts)
            Exporter(array).__dlpack__(stream=5, max_version=(1, 0))
            Exporter(array).__dlpack__(stream=-1)
            assert array.handed == expected


def on_device(array):
    """Return a copy on the simulated GPU."""
    from numba import cuda

    return cuda.to_device(array)


def encode(update, residual, runs, rice, layout, lookahead=0.0):
    """Return the result of cuda.encode with its tiles on the host, and the new residual."""
    from hvdx.kernels import cuda as kernels

    left = on_device(residual)
    got = kernels.encode([on_device(u) for u in update], left, runs, rice, layout, lookahead=lookahead)
    return got._replace(tiles=got.tiles.copy_to_host()), left.copy_to_host()


def check_encode(update, residual, runs, rice, layout, lookahead=0.0):
    """Compare cuda.encode with the reference."""
    left = residual.copy()
    expected = reference.encode(update, left, runs, rice, layout, lookahead)
    got, got_left = encode(update, residual, runs, rice, layout, lookahead)
    assert got.fault == expected.fault == -1
    assert got.tiles.tobytes() == expected.tiles.tobytes()
    np.testing.assert_array_equal(got_left.view(np.uint32), left.view(np.uint32))
    np.testing.assert_array_equal(got.sent, expected.sent)
    assert got.sent.dtype == np.int64


def check_gaps(gaps, rng):
    """Compare cuda.encode with the reference for entries with these gaps before them."""
    index = np.cumsum(np.asarray(gaps) + 1) - 1
    update = np.zeros(index[-1] + 1, np.float32)
    update[index] = rng.choice([-1, 1], index.size)
    check_encode([update], np.zeros_like(update), make_runs((len(update), 1)), True, LONG)


def decode(messages, scale, out, rice):
    """Return copies of arrays to which cuda.decode has added messages."""
    from hvdx.kernels import cuda as kernels

    arrays = [on_device(o) for o in out]
    kernels.decode(messages, scale, arrays if len(arrays) > 1 else arrays[0], rice)
    return [a.copy_to_host() for a in arrays]


def make_messages(rice, layout=SMALL, density=0.12):
    """Return three messages for 700 elements with different runs."""
    messages = []
    for seed, runs in ((8, make_runs((700, 0.5))), (9, make_runs((99, 0.5), (601, 0.6))), (10, make_runs((700, 0.4)))):
        update, residual = make_case(700, density, seed, tau=0.4, more=0.1)
        messages.append((reference.encode([update], residual, runs, rice, layout).tiles, runs))
    return messages


def mutations(good, number):
    """Yield copies of a message with a bit flipped, a byte changed, the end cut off, or a byte inserted."""
    rng = np.random.default_rng(11)
    for i in range(number):
        data, at = good.copy(), int(rng.integers(good.size))
        if i % 5 < 2:
            data[at] ^= np.uint8(1 << rng.integers(8))
        elif i % 5 == 2:
            data[at] = rng.integers(256)
        elif i % 5 == 3:
            data = data[:at]
        else:
            data = np.insert(data, at, np.uint8(rng.integers(256)))
        yield data
