"""Reader of the lengths of a message's runs, LEB128 numbers at its front. It stops at the first invalid length."""

import numpy as np

from hvdx.kernels.arrays import Int64Array, UInt8Array
from hvdx.kernels.compiled import entry
from hvdx.kernels.pieces import frozen
from hvdx.kernels.table import get_varint
from hvdx.kernels.tiles import Malformed

#: Bytes of the tau of a run. The taus follow the lengths.
_TAU = 4
_NUMBERS = ("", "a number that does not end", "a number with a superfluous byte")


@entry
def _count(data: UInt8Array) -> tuple[int, int, int]:
    """Read the number of runs: (number, offset of its end, 0 or an error code)."""
    return get_varint(data, 0)


@entry
def _read(data: UInt8Array, at: int, n: int, lengths: Int64Array) -> tuple[int, int, int, int]:
    """Fill `lengths`: (number of lengths read, elements of n without a run, offset of the end, 0 or an error code).

    Reading stops after a run of no elements, and after one that exceeds n.
    """
    left = n
    for i in range(lengths.size):
        length, at, error = get_varint(data, at)
        if error:
            return i, left, at, error
        lengths[i] = length
        left -= length
        if length == 0 or left < 0:
            return i + 1, left, at, 0
    return lengths.size, left, at, 0


def read_lengths(data: UInt8Array, n: int) -> tuple[Int64Array, int]:
    """Read the lengths of a message's runs.

    Args:
        data: uint8[bytes], untrusted: the number of runs, their lengths, and the rest of the message.
        n: expected sum of the lengths.

    Returns:
        The lengths, int64[R], and the offset of their end.

    Raises:
        Malformed: if a number is invalid, if `data` is too short for all runs, or if the lengths do not add up to n.

    Example:
        >>> lengths, end = read_lengths(np.array([2, 1, 3, *[0] * 8], np.uint8), 4)
        >>> lengths.tolist(), end
        ([1, 3], 3)
    """
    data = frozen(data)
    count, at, error = _count(data)
    if error:
        raise Malformed(f"the lengths of its runs: {_NUMBERS[error]}")
    if count > data.size // (1 + _TAU):
        raise Malformed(f"the lengths of its runs: {count} runs in {data.size} bytes")
    lengths = np.empty(count, np.int64)
    found, left, at, error = _read(data, at, n, lengths)
    if error:
        raise Malformed(f"the lengths of its runs: {_NUMBERS[error]}")
    if found and lengths[found - 1] == 0:
        raise Malformed("a run of no elements")
    if left:
        more = " or more" if found < count else ""
        raise Malformed(
            f"expected an update of {n} elements, got one of {n - left}{more}. Give every rank the same model"
        )
    return lengths, at
