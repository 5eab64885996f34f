"""Offsets between the clocks of the ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvdx.comm.base import Comm

# All-gathers of a measurement: the first ones are slow, because ranks arrive at different times.
_ROUNDS = 24


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
    """Measure the offset between this rank's clock and that of rank 0. Collective; it takes about 20 ms.

    No rank leaves an all-gather before all ranks have entered it. So each all-gather bounds the offset from both sides,
    and the bounds of all of them leave an interval no longer than the fastest all-gather. The result is its middle.
    Cristian, "Probabilistic clock synchronization", 1989, does this with pairs of messages.

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
        left, rounds = 0, []
        for _ in range(_ROUNDS + 1):
            entered = round(1e9 * now())
            # The time at which a rank left travels with the next round.
            rounds.append(channel.exchange([entered, left]).headers)
            left = round(1e9 * now())
    finally:
        channel.close()
    times = np.array(rounds)
    entries, exits = times[:-1, :, 0], times[1:, :, 1]
    low = int((entries[:, 0] - exits[:, comm.rank]).max())
    high = int((exits[:, 0] - entries[:, comm.rank]).min())
    return Offset((low + high) / 2e9, abs(high - low) / 2e9)
