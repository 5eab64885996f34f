"""Conversion between float32 and float16, compared with NumPy's."""

import numpy as np
import pytest

from hvdx.codec.floats import to_float16, to_float32


def bits(values):
    """Return the bits of numbers, with one pattern for every NaN."""
    return np.where(np.isnan(values), 1, values.view(f"u{values.itemsize}"))


def test_every_float16_is_converted():
    everything = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(bits(to_float32(everything)), bits(everything.astype(np.float32)))


EDGES = [65504, 65519.99, 65520, 65536, 2**-14, 2**-15, 2**-24, 2**-25, 1.0001 * 2**-25, 1e-40, 0.0, np.inf, np.nan]


@pytest.mark.parametrize("scale", [None, 1e-8, 1e-6, 1e-4, 1.0, 1e5])
def test_float32_is_rounded_as_numpy_rounds_it(scale):
    random = np.random.default_rng(0)
    if scale is None:
        values = random.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    else:
        values = (random.normal(size=1 << 18) * scale).astype(np.float32)
    values = np.concatenate([values, np.array(EDGES, np.float32), -np.array(EDGES, np.float32)])
    # Numbers between two of float16.
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    values = np.concatenate([values, ((halves[1:] + halves[:-1]) / 2).astype(np.float32)])
    got = np.empty(values.size, np.float16)
    to_float16(values, got)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(bits(got), bits(values.astype(np.float16)))
