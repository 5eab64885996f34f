"""Kernels keep denormal numbers, also in threads that flush them to zero, as TensorFlow's do."""

import ctypes
import platform
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvdx.codec import Threshold
from hvdx.kernels import cpu, reference
from hvdx.kernels.tiles import Layout
from tests.kernels.agreement import same_bits
from tests.kernels.strategies import make_runs

#: Index of the register in glibc's fenv_t, in words of 32 bits, and its bits that flush denormals to zero.
REGISTERS = {"x86_64": (7, 1 << 15 | 1 << 6), "aarch64": (0, 1 << 24)}
TINY = 2.0**-126
SMALL = Layout(256, 64, 8, 32, 4)
N = 5000


def flush():
    """Let this thread flush denormals to zero."""
    word, bits = REGISTERS[platform.machine()]
    library, environment = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 16)()
    library.fegetenv(environment)
    environment[word] |= bits
    library.fesetenv(environment)


def flushes():
    """Return True if this thread flushes denormals to zero."""
    return np.float32(TINY) * np.float32(0.5) == 0


@pytest.fixture
def flushing():
    """Pool of one thread that flushes denormals to zero."""
    if platform.machine() not in REGISTERS:
        pytest.skip("the flags that flush denormals are not known for this processor")
    with ThreadPoolExecutor(1, initializer=flush) as pool:
        assert pool.submit(flushes).result()
        assert not flushes()
        yield pool
        assert pool.submit(flushes).result(), "the kernels did not restore the mode"


def tiny_noise(seed, n=N):
    """Return float32[n] around zero, of about the smallest normal number."""
    return (np.random.default_rng(seed).uniform(-1.5, 1.5, n) * TINY).astype(np.float32)


UPDATE, RESIDUAL, BEFORE = tiny_noise(1), tiny_noise(2) / np.float32(2), tiny_noise(3)


def encoded(encoder, **threads):
    """Return tiles, residual and decoded output with the smallest normal number as tau."""
    # The last 100 elements cross borders of pieces, which another loop handles.
    update, runs = np.split(UPDATE, [N - 100, N - 50]), make_runs((N - 100, TINY), (100, TINY))
    residual, out = RESIDUAL.copy(), BEFORE.copy()
    tiles = encoder.encode(update, residual, runs, True, SMALL, **threads).tiles
    encoder.decode([(tiles, runs), (tiles, runs)], 0.25, [out], **threads)
    return tiles, residual, out


@pytest.mark.parametrize("threads", [1, 3])
def test_kernels_keep_denormals_in_every_thread(flushing, threads):
    want = encoded(reference)
    for got in (encoded(cpu, threads=threads), flushing.submit(encoded, cpu, threads=threads).result()):
        assert [same_bits(g, w) for g, w in zip(got, want, strict=True)] == [True] * 3


@pytest.mark.parametrize("threads", [1, 2])
def test_codec_keeps_denormals_in_every_thread(flushing, threads):
    """A step in a flushing thread gives the same bits as one outside it, with the regions of the default layout."""
    n = 600_000
    update = tiny_noise(0, n) / np.float32(4)

    def step():
        codec = Threshold(tau=TINY, threads=threads)
        message, state = codec.encode([update], codec.init([n]))
        second, state = codec.encode([update], state)
        out = np.zeros(n, np.float32)
        codec.decode([message, second], [out], 0.5)
        return message, second, state.residual, out

    want, got = step(), flushing.submit(step).result()
    # Updates that are small compared with tau are kept and add up.
    assert np.count_nonzero(np.abs(want[2]) < TINY / 2) > n / 4
    assert [same_bits(g, w) for g, w in zip(got, want, strict=True)] == [True] * 4
