"""Search for the threshold tau that sends a given density of the elements: the quantile of a sample of each update."""

from collections.abc import Iterator

import numpy as np

from hvdx.kernels.tiles import LINE

#: Lower bound of tau, as a share of the largest element. A smaller tau would hardly send more elements, only larger m.
SPAN = 2.0**-12
# Least number of elements of a sample, of those in it that reach tau, and most elements.
_ELEMENTS, _REACHING, _MOST_ELEMENTS = 4096, 32, 2**17
# Multiple of the wanted number of elements that may reach tau if many are equal.
_MOST_EQUAL = 1.5
# Bits of tau that are zero, so that its multiples are exact in float32 up to 16 times tau. With 8 such bits, the first
# updates of Adam, whose sizes differ by less than 2**-15, would be equal.
_UNUSED = np.uint32(0xF)
# Odd factors of a multiplicative hash: 2**32 times the golden ratio, and another.
_SCATTER = 0x9E3779B1, 0x85EBCA77
_LEAST, _MOST = np.float32(2.0**-126), np.float32(2.0**126)


def lines(n: int, density: float | None, step: int) -> np.ndarray:
    """Return the lines of a sample of n elements: one at a scattered place in each of some equal parts, all if few.

    Lines at equal distances would meet rows, layers or shards of such a length always at the same place.

    Args:
        n: number of elements.
        density: share of the elements to send; None if the sample is for the lag only.
        step: number of the update, each of which gets other lines.

    Returns:
        int64[lines], increasing.

    Example:
        >>> lines(100, 0.01, 0), len(lines(10**6, 0.01, 0)), len(lines(10**6, 0.001, 0))
        (array([0, 1, 2, 3, 4, 5, 6]), 256, 2000)
    """
    whole = -(-n // LINE)
    wanted = max(_ELEMENTS, min(_REACHING / density, _MOST_ELEMENTS)) if density else _ELEMENTS
    parts = int(wanted / LINE)
    if whole < 2 * parts:
        return np.arange(whole)
    borders = np.arange(parts + 1) * whole // parts
    places = (np.arange(parts) * _SCATTER[0] + step * _SCATTER[1]) % 2**32
    return np.asarray(borders[:-1] + (places * np.diff(borders) >> 32))


def all_lines(n: int) -> Iterator[np.ndarray]:
    """Yield the lines of n elements, in parts of at most 2**20 elements."""
    whole, each = -(-n // LINE), 2**20 // LINE
    for begin in range(0, whole, each):
        yield np.arange(begin, min(begin + each, whole))


def of_sample(sums: np.ndarray, density: float) -> np.float32 | None:
    """Return the tau that a share `density` of the elements reaches.

    If so many have the same absolute value that 1.5 times as many would reach it, those do not reach it: a message of
    them would be dense.

    Args:
        sums: float32[elements], sums of an update and the residual. NaN and infinity do not count.
        density: share of the elements to send.

    Returns:
        That tau, but at least SPAN times the largest element; None if all are zero.

    Example:
        >>> float(of_sample(np.arange(-50, 50, dtype=np.float32), 0.1))
        45.0
    """
    sizes = np.abs(sums)
    largest = float(sizes.max(initial=0))
    if not np.isfinite(largest):
        sizes = sizes[np.isfinite(sizes)]
        largest = float(sizes.max(initial=0))
    if largest == 0:
        return None
    wanted = max(round(density * sizes.size), 1)
    reached = float(np.partition(sizes, sizes.size - wanted)[sizes.size - wanted])
    bits = np.float32(min(max(reached, largest * SPAN, float(_LEAST)), float(_MOST))).view(np.uint32) & ~_UNUSED
    if np.count_nonzero(sizes >= bits.view(np.float32)) > _MOST_EQUAL * wanted and bits < _MOST.view(np.uint32):
        bits += _UNUSED + np.uint32(1)
    return bits.view(np.float32)
