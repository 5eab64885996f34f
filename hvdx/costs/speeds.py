"""Speeds of the ranks, and the rows with which all of them compute equally long.

A rank's computing takes `fixed + per_row * rows` seconds a step. The ranks tell each other these numbers every few
steps, and all come to the same decision.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdx.errors import ConfigError

# Calls of the training function between two decisions, and seconds, at least. Of fewer than half no median is taken.
_WINDOW, _INTERVAL = 5, 0.2
# A line through two points needs rows that differ by this share.
_APART = 0.1
# Share of a step's seconds that a division has to save: the first one, which all ranks trace anew, and later ones.
_FIRST_GAIN, _GAIN = 0.1, 0.04
# A division of one window has to save as much in the next window too, where noise has moved on, unless it saves three
# times the least gain. A gain is at least two standard errors of the slowest rank's seconds.
_PLAIN, _ERRORS = 3.0, 2.0
# Standard error of the median of normal numbers, times the root of their count: a multiple of the quartiles' distance.
_ERROR_OF_MEDIAN = 0.93
# Seconds of computing in a step, at least.
_SHORTEST = 1e-6
# Calls after a tracing that are not measured.
_WARM_UP = 2


class Speed(NamedTuple):
    """Seconds of computing of a rank in a step: `fixed + per_row * rows`."""

    fixed: float
    per_row: float

    def seconds(self, rows: float) -> float:
        """Return the seconds of a step with some rows."""
        return self.fixed + self.per_row * rows


class Measured:
    """Speed of this rank, from the seconds of its steps.

    Attributes:
        error: standard error of the seconds in the last window.

    Example:
        >>> measured = Measured()
        >>> for rows in [10] * 5 + [20] * 5:
        ...     measured.add(rows, 1.0 + 0.1 * rows)
        >>> speed = measured.speed()
        >>> round(speed.fixed, 6), round(speed.per_row, 6)
        (1.0, 0.1)
    """

    def __init__(self) -> None:
        self.error = 0.0
        self._rows: float | None = None
        self._window: list[float] = []
        self._speed: Speed | None = None
        # Rows and seconds on which the speed rests.
        self._point: tuple[float, float] | None = None

    def add(self, rows: float, seconds: float) -> None:
        """Add a step; one that is the first with its rows closes the window of those before."""
        if rows != self._rows:
            self.speed()
            self._rows = rows
            self._window = []
        self._window.append(seconds)

    def speed(self) -> Speed | None:
        """Close the window if it has enough steps, and return the speed; None if it is unknown."""
        # The median: a pause in one step, such as that of a checkpoint, says nothing of the next steps.
        if self._rows and 2 * len(self._window) > _WINDOW:
            low, middle, high = np.percentile(self._window, [25, 50, 75]).tolist()
            self.error = _ERROR_OF_MEDIAN * (high - low) / math.sqrt(len(self._window))
            self._learn(self._rows, middle)
            self._window = []
        return self._speed

    def _learn(self, rows: float, seconds: float) -> None:
        before, self._point = self._point, (rows, seconds)
        if self._speed is None or before is None:
            self._speed = Speed(0.0, seconds / rows)
        elif abs(rows - before[0]) > _APART * before[0]:
            # Both points may be from different times: a speed that changed in between must not turn the line over.
            slope = (seconds - before[1]) / (rows - before[0])
            per_row = min(max(slope, 0.1 * seconds / rows), seconds / rows)
            self._speed = Speed(seconds - per_row * rows, per_row)
        else:
            times = seconds / self._speed.seconds(rows)
            self._speed = Speed(self._speed.fixed * times, self._speed.per_row * times)


def divided(total: int, speeds: Sequence[Speed], least: int = 1, most: Sequence[int] = ()) -> list[int]:
    """Return the rows of each rank with which all end their computing together, as far as whole rows allow.

    Args:
        total: rows of all ranks.
        speeds: speed of each rank.
        least: fewest rows of a rank, at most its even share.
        most: most rows of each rank, by default all; with fewer than `least`, a rank has these.

    Raises:
        ConfigError: on all ranks, if they may not have so many rows together.

    Example:
        >>> divided(90, [Speed(0.0, 1.0), Speed(0.0, 2.0)]), divided(90, [Speed(0.0, 1.0)] * 2, most=[90, 30])
        ([60, 30], [60, 30])
    """
    most = most or [total] * len(speeds)
    if sum(most) < total:
        raise ConfigError.on_all_ranks(
            f"fit: the ranks may take {', '.join(map(str, most))} rows, and a step has {total} (max_batch, "
            "global_batch_size of hvdx.shard). Do: more ranks, a smaller global_batch_size, or gradient accumulation."
        )

    # Python's numbers: NumPy may add up in another order on another processor, and all ranks must come to one result.
    def rows_in(seconds: float) -> list[int]:
        of_each = zip(speeds, most, strict=True)
        return [math.floor(min(max((seconds - s.fixed) / s.per_row, least), m) + 1e-9) for s, m in of_each]

    # Between these seconds of a step, bisection finds those in which the ranks do all rows.
    low, high = 0.0, max(s.seconds(total) for s in speeds)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(rows_in(middle)) < total else (low, middle)
    # What is left of the rows below goes, row by row, to the rank that would end it first.
    rows = rows_in(low)
    while sum(rows) < total:
        free = [rank for rank, n in enumerate(rows) if n < most[rank]]
        rows[min(free, key=lambda rank: (speeds[rank].seconds(rows[rank] + 1), rank))] += 1
    return rows


def slowest(speeds: Sequence[Speed], rows: Sequence[int]) -> float:
    """Return the seconds of computing of the rank that takes longest."""
    return max(s.seconds(r) for s, r in zip(speeds, rows, strict=True))


class Told(NamedTuple):
    """Speed and step time that a rank sends to the others.

    Attributes:
        speed: its speed if it is known.
        error: standard error of its seconds of computing.
        step: seconds of a step with its exchange.
        most: most rows that it may have.
    """

    speed: Speed | None
    error: float
    step: float
    most: int


class Balancer:
    """Decides on the rows of each rank; all ranks decide alike.

    Args:
        total: rows of a step on all ranks.
        least: fewest rows of a rank.
        compiles: whether each new number of rows is compiled: later divisions then have to save as much as the first.

    Attributes:
        is_due: True if the ranks are to tell each other their speeds after this call.
        speeds: speeds of the ranks at the last decision.

    Example:
        >>> fast, slow = Balancer(12), Balancer(12)
        >>> for _ in range(7):
        ...     fast.add(6, 0.06, 0.12)
        ...     slow.add(6, 0.12, 0.12)
        >>> fast.is_due, fast.decide([fast.tell(), slow.tell()], [6, 6], first=True)
        (True, [8, 4])
    """

    def __init__(self, total: int, least: int = 1, compiles: bool = False):
        self._total, self._least, self._gain = total, least, _FIRST_GAIN if compiles else _GAIN
        self._measured = Measured()
        self._calls, self._due, self._cold = 0, _WARM_UP + _WINDOW, _WARM_UP
        self._steps: list[float] = []
        self._before: list[int] | None = None
        self.speeds: list[Speed] = []

    @property
    def is_due(self) -> bool:
        return self._calls >= self._due

    def add(self, rows: float, computing: float, step: float) -> None:
        """Add a call of the training function.

        Args:
            rows: rows of a step of this rank.
            computing: seconds of computing of a step.
            step: seconds of a step with its exchange.
        """
        self._calls += 1
        if self._cold:
            self._cold -= 1
            return
        self._steps.append(step)
        # Two clocks may differ by more than a step that computes nearly nothing.
        self._measured.add(rows, max(computing, _SHORTEST))

    def skip(self) -> None:
        """Count a call that was not measured."""
        self._calls += 1

    def tell(self, most: int | None = None) -> Told:
        """Return what this rank tells the others; it may have all rows unless `most` is given."""
        step = statistics.median(self._steps) if self._steps else 0.0
        self._steps = []
        speed = self._measured.speed()
        return Told(speed, self._measured.error, step, self._total if most is None else most)

    def decide(self, everyone: Sequence[Told], rows: Sequence[int], first: bool) -> list[int] | None:
        """Return new rows of each rank, if they save enough of the seconds of a step, or if the present ones cannot be.

        Args:
            everyone: what the ranks have told, in rank order.
            rows: rows of each rank so far; those of a rank that has died are missing.
            first: whether the ranks are to trace their steps anew with it.
        """
        step = max(told.step for told in everyone)
        self._due = self._calls + max(_WINDOW, math.ceil(_INTERVAL / step) if step else 0)
        self.speeds = [told.speed for told in everyone if told.speed is not None]
        most = [told.most for told in everyone]
        if sum(rows) < self._total or any(r > m for r, m in zip(rows, most, strict=True)):
            self._before = None
            return divided(self._total, [Speed(0.0, 1 / r) for r in rows], most=most)
        if len(self.speeds) < len(everyone) or not step:
            return None
        wanted = divided(self._total, self.speeds, self._least, most)
        seconds = [speed.seconds(r) for speed, r in zip(self.speeds, rows, strict=True)]
        gain = max(seconds) - slowest(self.speeds, wanted)
        confirmed = 0.0 if self._before is None else max(seconds) - slowest(self.speeds, self._before)
        error = everyone[seconds.index(max(seconds))].error
        least = max((_FIRST_GAIN if first else self._gain) * step, _ERRORS * error)
        self._before = wanted
        if min(gain, confirmed) <= least and gain < _PLAIN * least:
            return None
        self._before = None
        if first:
            self._cold = _WARM_UP
        return wanted
