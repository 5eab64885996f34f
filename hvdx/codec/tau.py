"""Search for the threshold tau that sends a given density of the elements.

tau moves on a grid of STEPS values per octave: (1 + i / STEPS) * 2**e. Such a value has few significant bits, so
m * tau is exact in float32 for every m below 2**23 / STEPS.
"""

import math

import numpy as np

from hvdx.kernels.tiles import SHARES

#: Number of values of the grid in an octave. With powers of two alone, each step down would send a large share of the
#: residuals at once.
STEPS = 32
#: Right shift from the bits of a float32 to its bin in the histogram. The exponent and three bits of the fraction
#: remain: eight bins per octave.
BIN_SHIFT = 20
#: Lower bound of tau, as a share of the largest element. A smaller tau would hardly send more elements, only larger m.
SPAN = 2.0**-12
#: Weight of the last count of entries in the running mean.
_MEMORY = 1 / 8
#: Ratio of the running mean to the wanted number of entries from which tau changes.
_SLACK = 1.1
#: Number of bins for finite values: those below this one.
_FINITE = 0x7F8
_LEAST, _MOST = 2.0**-126, 2.0**126


def on_grid(tau: float, up: bool = False) -> np.float32:
    """Return the largest value of the grid that is at most tau, or with `up` the smallest that is at least tau.

    Example:
        >>> float(on_grid(0.3)), float(on_grid(0.3, up=True))
        (0.296875, 0.3046875)
    """
    tau = min(max(tau, _LEAST), _MOST)
    fraction, exponent = math.frexp(tau)
    rounded = (math.ceil if up else math.floor)(fraction * 2 * STEPS) / STEPS
    return np.float32(math.ldexp(rounded, exponent - 1))


def first_tau(histogram: np.ndarray, density: float) -> np.float32 | None:
    """Return a tau that at most a share `density` of the elements, or one element, reaches.

    If all elements have the same absolute value, none reaches it.

    Args:
        histogram: int64[2048], number of elements by the bits of their absolute value as float32 >> BIN_SHIFT. NaN and
            infinity do not count.
        density: share of the elements to send.

    Returns:
        The smallest such tau that the histogram and the grid resolve, but at least SPAN times the largest element; None
        if all elements are zero.
    """
    histogram = histogram[:_FINITE]
    occupied = np.flatnonzero(histogram[1:]) + 1
    if not occupied.size:
        return None
    edges = (np.arange(len(histogram) + 1, dtype=np.uint32) << BIN_SHIFT).view(np.float32)
    reached = np.cumsum(histogram[::-1])[::-1]
    top = int(occupied[-1])
    few = np.flatnonzero(reached <= max(density * histogram.sum(), 1))
    edge = edges[int(few[0]) if few.size else top]
    return max(on_grid(float(edge), up=True), on_grid(float(edges[top]) * SPAN, up=True))


def largest(histogram: np.ndarray) -> np.float32:
    """Return the lower edge of the bin of the largest finite element; 0 if all elements are zero."""
    occupied = np.flatnonzero(histogram[1:_FINITE]) + 1
    top = np.array([occupied[-1] if occupied.size else 0], np.uint32)
    return (top << np.uint32(BIN_SHIFT)).view(np.float32)[0]


def next_tau(
    tau: np.float32, mean: float, sent: int, near: np.ndarray, elements: int, density: float
) -> tuple[np.float32, float]:
    """Return tau for the next update, and the running mean of the number of entries, after an update that is not zero.

    Too many entries raise tau by one step of the grid, or by a factor of up to 4 if this update has more than four
    times the wanted number. Too few entries lower tau by at least one step. The next update sends all residuals that
    reach the new tau, so tau falls no further than to the smallest of SHARES times tau that the wanted number of
    residuals or fewer reach.

    Args:
        tau: tau of this update.
        mean: running mean before this update; below 0 at the start.
        sent: number of entries of this update.
        near: int64[len(SHARES)], number of residuals that reach each of SHARES times tau.
        elements: number of elements of the update.
        density: share of the elements to send.
    """
    wanted = max(density * elements, 1.0)
    low = [share for share, count in zip(SHARES, near, strict=True) if count <= wanted]
    if sent == 0:
        # tau is too high by far, unless residuals are smaller still: then it is not known by how much.
        return (on_grid(float(tau) * min(low), up=True) if low and near[-1] else tau), mean
    mean = float(sent) if mean < 0 else mean + _MEMORY * (sent - mean)
    if sent > 4 * wanted:
        # The density falls at least with the square of tau. This is between the tails of a Gaussian and of a random
        # walk.
        raised = on_grid(float(tau) * min(math.sqrt(sent / wanted), 4.0), up=True)
        return raised, min(mean, wanted)
    if mean > _SLACK * wanted:
        return on_grid(float(tau) * (1 + 0.5 / STEPS), up=True), mean
    if mean * _SLACK < wanted:
        step = on_grid(float(tau) * (1 - 0.25 / STEPS))
        return (min(step, on_grid(float(tau) * min(low), up=True)) if low else step), mean
    return tau, mean
