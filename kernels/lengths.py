"""The lengths of a message's runs, as numbers in LEB128 at its front: read until they are wrong, and no further."""

import numpy as np

from hvdx.kernels.compiled import entry
from hvdx.kernels.pieces import frozen
from hvdx.kernels.table import get_varint
from hvdx.kernels.tiles import Malformed

#: Bytes of a run's tau, which follows the lengths.
_TAU = 4
_NUMBERS = ("", "a number that does not end", "a number with a superfluous byte")


@entry
def _count(data):
    """The number of runs, where it ends, and 0 or a number's error."""
    return get_varint(data, 0)


@entry
def _read(data, at, n, lengths):
    """Fill `lengths`: (how many were read, elements that they leave of n, where they end, 0 or a number's error).

    A run of no elements, or one that goes beyond n, is the last one read.
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


def read_lengths(data: np.ndarray, n: int) -> tuple[np.ndarray, int]:
    """Read how long the runs of a message are.

    Args:
        data: uint8[bytes], from anywhere: the number of runs, their lengths, and what follows.
        n: elements that they have to have together.

    Returns:
        The lengths, int64[R], and where they end.

    Raises:
        Malformed: they are no numbers, more than `data` has room for, or not those of n elements.

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
