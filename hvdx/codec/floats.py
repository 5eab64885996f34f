"""Dense codecs: every element of the update as float32, float16 or bfloat16."""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from hvdx.codec import frame
from hvdx.codec.base import Array, Codec, EmptyState
from hvdx.errors import UpdateError, WireError
from hvdx.kernels import varint
from hvdx.kernels.arrays import Float32Array
from hvdx.kernels.pieces import check_arrays

_SIGN, _INFINITY, _NAN = np.uint32(0x8000), np.uint32(0x7C00), np.uint32(0x7E00)
_SHIFT = np.uint32(13)
# Bits of float32 numbers: infinity, 2^-14, 0.5, and the smallest number that rounds to infinity in float16.
_INFINITE, _NORMAL, _HALF, _OVERFLOW = (np.uint32(bits) for bits in (0x7F800000, 0x38800000, 0x3F000000, 0x477FF000))
# Difference of the biases of the exponents, 112, in place; and less than one unit, to round.
_BIAS, _REBIAS = np.uint32(112 << 23), np.uint32(0xC8000FFF)
_EXPONENT = np.uint32(0x0F800000)


def to_float16(values: np.ndarray, out: np.ndarray) -> None:
    """Round float32 to float16: to the nearest, ties to even; too large numbers become infinity.

    NumPy converts a number below 6.1e-5, which is subnormal in float16, some thirty times more slowly than this, and
    most gradients and updates are that small.

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


#: Elements converted at a time, so that a conversion's temporary arrays stay in the cache.
_CHUNK = 1 << 15


class Dense(Codec[EmptyState]):
    """Base class of the dense codecs. The encoder has no residual, so rounding errors are lost."""

    _wire: type[np.generic]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def init(self, sizes: Sequence[int]) -> EmptyState:
        return EmptyState()

    def restore(self, arrays: Mapping[str, np.ndarray], sizes: Sequence[int]) -> EmptyState:
        return EmptyState()

    def encode(self, update: Sequence[Array], state: EmptyState) -> tuple[np.ndarray, EmptyState]:
        n = check_arrays(cast(Sequence[Float32Array], update), "update")
        header = bytes(frame.SIZE) + varint.put(n)
        message = np.empty(len(header) + n * np.dtype(self._wire).itemsize, np.uint8)
        message[: len(header)] = np.frombuffer(header, np.uint8)
        body = message[len(header) :].view(self._wire)
        for variable, first, at, values in _chunks(update):
            coded = body[at : at + values.size]
            self._pack(values, coded)
            bad = ~np.isfinite(self._unpack(coded))
            if bad.any():
                element = int(np.argmax(bad))
                raise UpdateError(
                    f"is {values[element]}, which {self.name} cannot send.{self._remedy(values[element])}",
                    variable,
                    first + element,
                )
        return frame.seal(message, self.number), state

    def decode(self, messages: Sequence[np.ndarray], out: Sequence[Array], scale: float = 1.0) -> None:
        n = check_arrays(cast(Sequence[Float32Array], out), "out", writable=True)
        bodies = []
        for rank, message in enumerate(messages):
            body = frame.unseal(message, self.number, self.name, rank)
            try:
                elements, at = varint.get(body[:9].tobytes(), 0)
            except ValueError as error:
                raise WireError(f"{error}.", rank) from None
            if elements != n or body.size - at != n * np.dtype(self._wire).itemsize:
                raise WireError(
                    f"expected {n} elements, got {elements} in {body.size - at} bytes. Give every rank the same model.",
                    rank,
                )
            bodies.append(body[at:].view(self._wire))
        for _, _, at, values in _chunks(out):
            # Encoders refuse NaN and infinity. A message that holds them must not raise a NumPy warning halfway.
            with np.errstate(all="ignore"):
                for body in bodies:
                    np.add(values, self._unpack(body[at : at + values.size]) * np.float32(scale), out=values)

    @abc.abstractmethod
    def _pack(self, values: np.ndarray, coded: np.ndarray) -> None:
        """Convert float32 `values` to the wire's format, into `coded`."""

    @abc.abstractmethod
    def _unpack(self, coded: np.ndarray) -> np.ndarray:
        """Return `coded` as float32."""

    def _remedy(self, value: np.float32) -> str:
        return ""


class Raw(Dense):
    """Each element as a float32, unchanged.

    Example:
        >>> out = [np.ones(2, np.float32)]
        >>> message, _ = Raw().encode([np.array([1, 2], np.float32)], Raw().init([2]))
        >>> Raw().decode([message], out)
        >>> out[0]
        array([2., 3.], dtype=float32)
    """

    name, number, _wire = "none", 0, np.dtype("<f4").type

    def _pack(self, values: np.ndarray, coded: np.ndarray) -> None:
        coded[:] = values

    def _unpack(self, coded: np.ndarray) -> np.ndarray:
        return coded


class Float16(Dense):
    """Each element rounded to float16: 11 bits of precision, absolute values from 6e-8 to 65504."""

    name, number, _wire = "fp16", 1, np.dtype("<f2").type

    def _pack(self, values: np.ndarray, coded: np.ndarray) -> None:
        to_float16(values, coded)

    def _unpack(self, coded: np.ndarray) -> np.ndarray:
        return to_float32(coded)

    def _remedy(self, value: np.float32) -> str:
        return " Its largest number is 65504; bf16 has the range of float32." if np.isfinite(value) else ""


class Bfloat16(Dense):
    """Each element rounded to bfloat16 (to nearest, ties to even): 8 bits of precision, the range of float32."""

    name, number, _wire = "bf16", 2, np.dtype("<u2").type

    def _pack(self, values: np.ndarray, coded: np.ndarray) -> None:
        bits = values.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
        # The largest float32 values round up to infinity, which `encode` refuses. The rounding could turn NaN into a
        # number, so values that are not finite become infinity.
        np.copyto(coded, np.where(np.isfinite(values), rounded, np.uint32(0x7F800000)) >> np.uint32(16), "unsafe")

    def _unpack(self, coded: np.ndarray) -> np.ndarray:
        return (coded.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _chunks(arrays: Sequence[Array]) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Yield chunks of all arrays as (array number, offset in the array, offset in all elements, float32 view)."""
    at = 0
    for i, array in enumerate(arrays):
        flat = np.asarray(array).reshape(-1)
        for first in range(0, flat.size, _CHUNK):
            yield i, first, at + first, flat[first : first + _CHUNK]
        at += flat.size
