"""Offsets between the clocks of the ranks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdx.comm.interfaces import Comm

# All-gathers of a measurement: at least and at most. The first ones are slow, because ranks arrive at different times,
# and so are many on hosts that do other work at that moment.
_LEAST, _MOST = 48, 192
# Nanoseconds after which a measurement ends.
_ENOUGH = 250_000_000
# The bounds have settled if the second half of the all-gathers has shortened none by a twentieth.
_SETTLED = 0.95


@dataclass(frozen=True)
class Offset:
    """Offset of a rank's clock.

    Attributes:
        seconds: what to add to a time of this rank, for the time of rank 0 at the same moment.
        error: the largest error of `seconds`.
    """

    seconds: float
    error: float


def measure(comm: Comm, now: Callable[[], float] = time.perf_counter) -> Offset:
    """Measure the offset between this rank's clock and that of rank 0. Collective; it takes 0.25 s at most, and less if
    the ranks answer at once.

    No rank leaves an all-gather before all ranks have entered it. So each all-gather bounds the offset from both sides,
    and the bounds of all of them leave an interval no longer than the fastest all-gather. The result is its middle.
    Cristian, "Probabilistic clock synchronization", 1989, does this with pairs of messages, and also repeats them until
    the bounds are near enough. The ranks go on until more all-gathers bring no rank's bounds closer together.

    Args:
        comm: the ranks.
        now: clock of this rank, in seconds; it may begin at any time, and must not be set back.

    Raises:
        ExchangeError: if ranks do not join within the time limit.

    Example:
        >>> from hvdx.comm.local import LocalComm
        >>> abs(measure(LocalComm()).seconds) < 1.0
        True
    """
    channel = comm.channel("the clocks")
    try:
        left = 0
        rounds: list[np.ndarray] = []
        while not _ended(rounds):
            entered = round(1e9 * now())
            # The time at which a rank left travels with the next round.
            rounds.append(channel.exchange([entered, left]).headers)
            left = round(1e9 * now())
    finally:
        channel.close()
    low, high = (int(bounds[comm.rank]) for bounds in _bounds(rounds))
    return Offset((low + high) / 2e9, abs(high - low) / 2e9)


def _bounds(rounds: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest offset of each rank's clock that the all-gathers leave, in nanoseconds."""
    times = np.array(rounds)
    entries, exits = times[:-1, :, 0], times[1:, :, 1]
    return (entries[:, :1] - exits).max(0), (exits[:, :1] - entries).min(0)


def _ended(rounds: Sequence[np.ndarray]) -> bool:
    """Return whether the measurement ends; the rounds, and so the answers, are the same on all ranks."""
    if len(rounds) <= _LEAST:
        return False
    if len(rounds) > _MOST or rounds[-1][0, 0] - rounds[0][0, 0] > _ENOUGH:
        return True
    (low, high), (before_low, before_high) = _bounds(rounds), _bounds(rounds[: len(rounds) // 2 + 1])
    return bool((high - low >= _SETTLED * (before_high - before_low)).all())
