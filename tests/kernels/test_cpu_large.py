"""Tests with more than 2**31 elements: indices, sums of gaps and borders of threads need more than 32 bits."""

import ctypes
import mmap
import os

import numpy as np
import pytest

from hvdx.kernels import cpu, reference
from hvdx.kernels.tiles import LAYOUT
from tests.kernels.agreement import same_bits
from tests.kernels.strategies import make_runs, noise

#: Elements of the small arrays that make up the large ones.
PART = 1 << 24
REGION = LAYOUT.region
TAIL = 4 * REGION
N = 2**31 + PART + TAIL + 37
_READ_WRITE, _SHARED_FIXED = 3, 0x11


def repeated(elements, first, end):
    """Return zeros whose PARTs from `first` to `end` share the memory of one PART."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    memory = mmap.mmap(-1, 4 * elements)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    file = os.memfd_create("part")
    os.ftruncate(file, 4 * PART)
    for part in range(first, end, PART):
        place = start + 4 * part
        assert libc.mmap(place, 4 * PART, _READ_WRITE, _SHARED_FIXED, file, 0) == place, os.strerror(ctypes.get_errno())
    os.close(file)
    return np.frombuffer(memory, np.float32)


@pytest.fixture(scope="module")
def large():
    """Update and residual, which are zero except for some elements at the start, near 2**31 and at the end."""
    if not hasattr(os, "memfd_create"):
        pytest.skip("needs Linux, to map the same memory many times")
    nothing = np.zeros(PART, np.float32)
    # Regions with tiles of their own alternate with regions that share one.
    tau = np.full(REGION, 0.5, np.float32)
    parts = [noise(REGION, tau, density, 8)[0] for density in (0.001, 0.004, 0.0005, 0.02)]
    tail = np.concatenate([*parts, noise(37, tau[:37], 1, 8)[0]])
    head, middle = np.zeros(100, np.float32), np.zeros(PART - 100, np.float32)
    head[[3, 99]] = 1.25, -0.5
    middle[[0, PART // 2, PART - 101]] = 1, -2, 3
    # The two ends have memory of their own, so an index cut to 32 bits would change the wrong end.
    residual = repeated(N, PART, 2**31 - PART)
    return [head, *[nothing] * (2**31 // PART - 1), middle, nothing, tail], residual


@pytest.mark.parametrize("rice", [True, False])
def test_encode_and_decode_beyond_31_bits(large, rice):
    update, residual = large
    assert sum(u.size for u in update) == N
    residual[: 2 * PART] = residual[2**31 - PART :] = 0
    runs = make_runs((2**31 - 5, 0.5), (N - 2**31 + 5, 0.25))
    coded = cpu.encode(update, residual, runs, rice, threads=2)

    borders = np.cumsum([u.size for u in update])
    where = np.concatenate([b - u.size + np.flatnonzero(u) for u, b in zip(update, borders, strict=True) if u.any()])
    total = np.concatenate([u[u != 0] for u in update if u.any()])
    tau = np.where(where < 2**31 - 5, np.float32(0.5), np.float32(0.25))
    reached = np.abs(total) >= tau
    m = (np.abs(total) / tau).astype(np.int64)[reached]
    index, negative, times = reference.read(coded.tiles, N, rice)
    np.testing.assert_array_equal(index, where[reached])
    np.testing.assert_array_equal(negative, total[reached] < 0)
    np.testing.assert_array_equal(times, m)
    assert coded.sent.tolist() == [np.count_nonzero(index < 2**31 - 5), np.count_nonzero(index >= 2**31 - 5)]
    assert np.flatnonzero(residual[: 2 * PART]).tolist() == [3]
    assert same_bits(residual[-TAIL - 37 :], np.copysign(np.abs(update[-1]) % np.float32(0.25), update[-1]))

    # Entries lie in the first array and in the last three, so the arrays between may be the same one.
    out = [np.zeros_like(u) for u in update[:1]] + update[1:-3] + [np.zeros_like(u) for u in update[-3:]]
    cpu.decode([(coded.tiles, runs)], 1.0, out, rice, threads=2)
    got = np.concatenate([b - o.size + np.flatnonzero(o) for o, b in zip(out, borders, strict=True) if o.any()])
    np.testing.assert_array_equal(got, index)
    np.testing.assert_array_equal(
        np.concatenate([o[o != 0] for o in out if o.any()]), np.where(negative, -1, 1) * times * tau[reached]
    )


def test_check_beyond_31_bits(large):
    update, _ = large
    bad = [*update[:-1], update[-1].copy()]
    bad[-1][-2] = np.nan
    assert cpu.check(bad, make_runs((N, 0.5)), threads=2) == N - 2
