"""Finding the threshold tau that sends a given share of the elements.

tau moves on a grid of `steps` values an octave, (1 + i / steps) * 2**e: so few bits that m * tau is exact in float32
for every m below 2**23 / steps, as it is for the powers of two that `steps=1` leaves.
"""

import math

import numpy as np

from hvdx.kernels.tiles import SHARES

#: Bits of a float32 that a bin of the histogram keeps: the exponent and three of the fraction, eight bins an octave.
BIN_SHIFT = 20
#: tau stays above the largest element times this: lower ones send no more elements, only larger m.
SPAN = 2.0**-12
#: How much of the last sent count the running mean takes in.
_MEMORY = 1 / 8
#: Bins below this one are of finite numbers.
_FINITE = 0x7F8
_LEAST, _MOST = 2.0**-126, 2.0**126


def on_grid(tau: float, steps: int, up: bool = False) -> np.float32:
    """The largest value of the grid that is not above tau, or with `up` the smallest that is not below it.

    Example:
        >>> float(on_grid(0.3, 1)), float(on_grid(0.3, 8)), float(on_grid(0.3, 8, up=True))
        (0.25, 0.28125, 0.3125)
    """
    tau = min(max(tau, _LEAST), _MOST)
    fraction, exponent = math.frexp(tau)
    rounded = (math.ceil if up else math.floor)(fraction * 2 * steps) / steps
    return np.float32(math.ldexp(rounded, exponent - 1))


def first_tau(histogram: np.ndarray, density: float, steps: int) -> np.float32 | None:
    """The tau at which `density` of the elements reach it, or fewer: none where all are of one size.

    Args:
        histogram: int64[2048], elements whose size, as the bits of a float32 >> BIN_SHIFT, is the index. NaN and
            infinity do not count.
        density: the share of elements to send.
        steps: values of the grid in an octave.

    Returns:
        The smallest such tau on the grid, or None where all elements are zero.
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
    return max(on_grid(float(edge), steps, up=True), on_grid(float(edges[top]) * SPAN, steps, up=True))


def largest(histogram: np.ndarray) -> np.float32:
    """A size that the largest finite element reaches: the lower edge of its bin; 0 where all are zero."""
    occupied = np.flatnonzero(histogram[1:_FINITE]) + 1
    top = np.array([occupied[-1] if occupied.size else 0], np.uint32)
    return (top << np.uint32(BIN_SHIFT)).view(np.float32)[0]


def next_tau(
    tau: np.float32, mean: float, sent: int, near: np.ndarray, elements: int, density: float, steps: int
) -> tuple[np.float32, float]:
    """tau for the next update, and the running mean of what was sent.

    Too many entries raise tau, at once by as much as it takes when they are many times too many; too few lower it. How
    far is read off how many residuals lie just below tau: all of those are sent at once by a tau that they reach.

    Args:
        tau: the one of this update.
        mean: the running mean before it; below 0 at the start.
        sent: entries of this update.
        near: int64[len(SHARES)], residuals that reach each of SHARES of tau.
        elements: of the update.
        density: the share of elements to send.
        steps: values of the grid in an octave.
    """
    if sent == 0:
        # Nothing new: an idle phase, or a step that only accumulates. Lowering tau now would send all at once later.
        return tau, mean
    wanted = max(density * elements, 1.0)
    mean = float(sent) if mean < 0 else mean + _MEMORY * (sent - mean)
    slack = max(1.1, 2 ** (0.75 / steps))
    if sent > 4 * wanted:
        # Between the tails of a Gaussian and of a random walk: density falls at least with the square of tau.
        raised = on_grid(float(tau) * min(math.sqrt(sent / wanted), 4.0), steps, up=True)
        return raised, min(mean, wanted)
    if mean > slack * wanted:
        return on_grid(float(tau) * (1 + 0.5 / steps), steps, up=True), mean
    if mean * slack < wanted:
        low = [share for share, count in zip(SHARES, near, strict=True) if count <= wanted]
        step = on_grid(float(tau) * (1 - 0.25 / steps), steps)
        return (min(step, on_grid(float(tau) * min(low), steps, up=True)) if low else step), mean
    return tau, mean
