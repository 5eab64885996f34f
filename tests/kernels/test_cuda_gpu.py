"""Tests of the CUDA kernels on a GPU against the reference, to the byte, with large updates."""

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed: pip install 'hvdx[cuda]'", allow_module_level=True)

from numba import cuda

from hvdx.kernels import cpu, reference
from hvdx.kernels import cuda as kernels
from hvdx.kernels.tiles import LAYOUT, Layout, Malformed, Runs

pytestmark = pytest.mark.skipif(not cuda.is_available(), reason="no GPU that numba.cuda finds")

SMALL = Layout(region=1024, tile_max=300, tile_min=40, group=100, group_regions=5)
#: Free GPU memory in bytes for the test with more than 2**31 elements, with a reserve.
LARGE = 26 * 2**30


def make_case(n, density, seed, several=0.02):
    """Return an update and a residual below tau = 0.5. About a share `density` crosses tau, some many times over."""
    rng = np.random.default_rng(seed)
    residual = rng.uniform(-0.49, 0.49, n).astype(np.float32)
    update = rng.uniform(-1e-3, 1e-3, n).astype(np.float32)
    chosen = np.flatnonzero(rng.random(n) < density)
    sizes = rng.uniform(1, 1.4, chosen.size) * np.where(rng.random(chosen.size) < several, 1000, 1)
    update[chosen] = sizes * rng.choice([-1, 1], chosen.size)
    return update, residual


def make_runs(n, number=1):
    """Return runs of uneven lengths for n elements, with taus from 0.5 on in steps of 0.01."""
    borders = np.unique(np.r_[0, np.random.default_rng(n).integers(0, n, number - 1), n])
    taus = 0.5 + 0.01 * np.arange(len(borders) - 1)
    return Runs(np.diff(borders).astype(np.int64), taus.astype(np.float32))


def check_encode(arrays, residual, runs, rice=True, layout=LAYOUT, lookahead=0.0, **options):
    """Compare kernels.encode with the reference; return the tiles."""
    left = residual.copy()
    expected = reference.encode(arrays, left, runs, rice, layout, lookahead)
    on_device = cuda.to_device(residual)
    inputs = [cuda.to_device(a) for a in arrays]
    got = kernels.encode(inputs, on_device, runs, rice, layout, lookahead=lookahead, **options)
    np.testing.assert_array_equal(got.tiles.copy_to_host(), expected.tiles)
    np.testing.assert_array_equal(on_device.copy_to_host().view(np.uint32), left.view(np.uint32))
    np.testing.assert_array_equal(got.sent, expected.sent)
    assert got.fault == expected.fault == -1
    return expected.tiles


@pytest.mark.parametrize("rice", [True, False], ids=["rice", "plain"])
@pytest.mark.parametrize(
    ("n", "density"),
    [(1, 1), (65, 0.5), (2047, 0.1), (2049, 0.5), (262_145, 0.5), (1_000_003, 0.1), (4_000_000, 1e-2),
     (4_000_000, 1e-3), (4_000_001, 1e-4), (3_000_000, 0)],
)  # fmt: skip
def test_encode_and_decode_match_the_reference(n, density, rice):
    update, residual = make_case(n, density, n)
    runs = make_runs(n)
    tiles = check_encode([update], residual, runs, rice)
    expected, got = residual.copy(), cuda.to_device(residual)
    messages = [(tiles, runs), (tiles, make_runs(n, min(n, 5)))]
    reference.decode(messages, 1 / 3, [expected], rice)
    kernels.decode(messages, 1 / 3, got, rice)
    np.testing.assert_array_equal(got.copy_to_host().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("layout", [LAYOUT, SMALL], ids=["work", "small"])
def test_arrays_and_runs_that_begin_anywhere(layout):
    n = 300_000
    update, residual = make_case(n, 0.03, 1)
    arrays = np.split(update, [1, 33, 1000, 1000, 70_001, 250_003])
    runs = make_runs(n, 7)
    tiles = check_encode(arrays, residual, runs, layout=layout)
    expected = [a.copy() for a in arrays]
    reference.decode([(tiles, runs)] * 3, 0.25, expected)
    got = [cuda.to_device(a) for a in arrays]
    kernels.decode([(cuda.to_device(tiles), runs)] * 3, 0.25, got)
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_array_equal(g.copy_to_host().view(np.uint32), e.view(np.uint32))


@pytest.mark.parametrize("lookahead", [0.0, 3.0])
def test_thousands_of_arrays_with_a_lookahead(lookahead):
    update, residual = make_case(400_000, 0.02, 8)
    borders = np.sort(np.random.default_rng(8).integers(0, 400_000, 3000))
    check_encode(np.split(update, borders), residual, make_runs(400_000, 50), lookahead=lookahead)


def test_sample_is_that_of_the_host():
    update, residual = make_case(300_000, 0.1, 9)
    arrays = np.split(update, [7, 7, 100_000])
    lines = np.arange(3, 300_000 // 16, 7)
    got = kernels.sample([cuda.to_device(a) for a in arrays], cuda.to_device(residual), lines)
    np.testing.assert_array_equal(got, cpu.sample(arrays, residual, lines))


def test_work_on_a_stream_waits_for_the_work_before():
    n, stream = 30_000_000, cuda.stream()
    update, residual = make_case(n, 0.01, 10)
    runs, left = make_runs(n), residual.copy()
    expected = reference.encode([update], left, runs)
    pinned, filled = cuda.pinned_array(n, np.float32), cuda.to_device(np.zeros(n, np.float32))
    pinned[:] = update
    for _ in range(5):
        kernels.cuda_encode.clear[4096, 256, stream](filled.view(np.uint32))
        filled.copy_to_device(pinned, stream=stream)
        got = kernels.encode([filled], cuda.to_device(residual), runs, stream=stream)
        assert kernels.to_host(got.tiles, stream).tobytes() == expected.tiles.tobytes()


def test_tensors_of_tensorflow_are_used_in_place():
    tf = pytest.importorskip("tensorflow")
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow finds no GPU")
    tf.config.experimental.set_memory_growth(tf.config.list_physical_devices("GPU")[0], True)
    update, residual = make_case(1_000_000, 0.02, 11)
    runs, left, on_device = make_runs(1_000_000), residual.copy(), cuda.to_device(residual)
    for _ in range(5):
        expected = reference.encode([update], left, runs)
        with tf.device("GPU:0"):
            inputs = tf.constant(update) * 1.0
            out = tf.raw_ops.Empty(shape=[1_000_000], dtype=tf.float32, init=True)
        got = kernels.encode([inputs], on_device, runs)
        kernels.decode([(got.tiles, runs)], 0.5, out)
        total = np.zeros(1_000_000, np.float32)
        reference.decode([(expected.tiles, runs)], 0.5, [total])
        assert (out + 0.0).numpy().tobytes() == (total + 0).tobytes()


def test_scratch_and_streams_serve_many_calls():
    scratch, stream = kernels.Scratch(), cuda.stream()
    for seed, n in enumerate((500_000, 500_000, 70_000, 500_000)):
        update, residual = make_case(n, 0.02, seed)
        check_encode([update], residual, make_runs(n, 3), stream=stream, scratch=scratch)


def test_the_same_bytes_every_time():
    update, residual = make_case(2_000_000, 0.05, 3)
    runs, on_device, first = make_runs(2_000_000, 4), cuda.to_device(update), None
    for _ in range(20):
        tiles = kernels.encode([on_device], cuda.to_device(residual), runs).tiles.copy_to_host().tobytes()
        first = first or tiles
        assert tiles == first


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 2.0**31])
def test_faults_leave_the_residual(bad):
    update, residual = make_case(1_000_000, 0.01, 4)
    update[[765_432, 900_000, 999_999]] = bad
    runs, on_device = make_runs(1_000_000, 3), cuda.to_device(residual)
    arrays = [cuda.to_device(a) for a in np.split(update, [123_457])]
    assert kernels.check(arrays, runs) == 765_432
    got = kernels.encode(arrays, on_device, runs)
    assert (got.fault, got.tiles.size, got.sent.sum()) == (765_432, 0, 0)
    np.testing.assert_array_equal(on_device.copy_to_host(), residual)


@pytest.mark.parametrize("rice", [True, False], ids=["rice", "plain"])
def test_hostile_messages_are_refused_and_change_nothing(rice):
    n = 20_000
    update, residual = make_case(n, 0.1, 5)
    runs = make_runs(n, 2)
    good = reference.encode([update], residual.copy(), runs, rice, SMALL).tiles
    rng, refused = np.random.default_rng(6), 0
    for i in range(600):
        hostile, at = good.copy(), int(rng.integers(good.size))
        if i % 3 == 0:
            hostile[at] ^= np.uint8(1 << rng.integers(8))
        elif i % 3 == 1:
            hostile[at : at + 9] = rng.integers(256, size=hostile[at : at + 9].size)
        else:
            hostile = hostile[:at]
        expected, got = residual.copy(), cuda.to_device(residual)
        try:
            reference.decode([(hostile, runs)], 0.5, [expected], rice)
        except Malformed:
            refused += 1
            with pytest.raises(Malformed):
                kernels.decode([(good, runs), (hostile, runs)], 0.5, got, rice)
        else:
            kernels.decode([(hostile, runs)], 0.5, got, rice)
        np.testing.assert_array_equal(got.copy_to_host().view(np.uint32), expected.view(np.uint32))
    assert 100 < refused < 600


class ByDLPack:
    """Array that offers only DLPack, without a stream, like TensorFlow's."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self):
        return self.x.__dlpack__()

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("by_dlpack", [False, True], ids=["interface", "dlpack"])
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_arrays_of_other_libraries_are_used_in_place(library, by_dlpack):
    module = pytest.importorskip(library)
    to_device = (lambda a: module.from_numpy(a).cuda()) if library == "torch" else module.asarray
    update, residual = make_case(100_000, 0.05, 7)
    runs = make_runs(100_000, 3)
    left = residual.copy()
    expected = reference.encode([update], left, runs)
    theirs = [to_device(a) for a in (update.reshape(100, 1000), residual.copy())]
    if library == "torch":
        module.cuda.synchronize()
    ours = [ByDLPack(t) for t in theirs] if by_dlpack else theirs
    got = kernels.encode([ours[0]], ours[1], runs)
    np.testing.assert_array_equal(got.tiles.copy_to_host(), expected.tiles)
    np.testing.assert_array_equal(kernels.as_device(theirs[1]).copy_to_host(), left)
    kernels.decode([(got.tiles, runs)], 1, ours[1])
    reference.decode([(expected.tiles, runs)], 1, [left])
    np.testing.assert_array_equal(kernels.as_device(theirs[1]).copy_to_host(), left)


def test_more_elements_than_32_bits_count():
    free = cuda.current_context().get_memory_info().free
    if free < LARGE:
        pytest.skip(f"{free / 2**30:.0f} GiB of the GPU's memory are free; {LARGE / 2**30:.0f} are needed")
    n = 2**31 + 2**20 + 5
    update, residual = (cuda.device_array(n, np.float32) for _ in range(2))
    for array in (update, residual):
        kernels.cuda_encode.clear[4096, 256](array.view(np.uint32))
    index = np.array([3, 2**31 - 1, 2**31, 2**31 + 7, n - 1])
    for i in index.tolist():
        update[i : i + 1].copy_to_device(np.float32([-1.75]))
    runs = Runs(np.array([2**31, n - 2**31]), np.array([1, 0.5], np.float32))
    m, negative = np.array([1, 1, 3, 3, 3]), np.ones(5, bool)
    expected = reference.write(index, negative, m, n)
    got = kernels.encode([update], residual, runs)
    np.testing.assert_array_equal(got.tiles.copy_to_host(), expected)
    np.testing.assert_array_equal(got.sent, [2, 3])
    kernels.decode([(expected, runs)], 1, residual)
    for i in index.tolist():
        np.testing.assert_array_equal(residual[i : i + 1].copy_to_host(), np.float32([-1.75]))
    update[n - 2 : n - 1].copy_to_device(np.float32([np.nan]))
    assert kernels.check([update], runs) == n - 2
