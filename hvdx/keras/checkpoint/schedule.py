"""Times of checkpoints, and of the polls by which the ranks learn of a preemption signal."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdx.errors import ConfigError

# Seconds between two polls, which delay the response to a signal, in addition to the current step.
_SECONDS_BETWEEN_POLLS = 1.0
# Largest number of steps between two polls: if steps become slower, the next poll is still not far away.
_MOST_STEPS = 64

_UNITS = {"epoch": "epochs", "step": "steps", "minute": "minutes", "min": "minutes"}


@dataclass(frozen=True)
class Every:
    """Interval between checkpoints; exactly one of the attributes is above 0.

    Attributes:
        epochs, steps: numbers of epochs and steps.
        minutes: minutes by the clock of rank 0.
    """

    epochs: int = 0
    steps: int = 0
    minutes: float = 0.0


def parse(every: int | str) -> Every:
    """Read the option `every`.

    Args:
        every: a number of epochs, or a text such as "500 steps", "10 minutes" or "2 epochs".

    Raises:
        ConfigError: if it is neither.

    Example:
        >>> parse(2).epochs, parse("500 steps").steps, parse("2.5 minutes").minutes
        (2, 500, 2.5)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", every) if isinstance(every, str) else None
    unit = _UNITS.get(match[2]) if match else None
    if match and unit == "minutes" and float(match[1]) > 0:
        return Every(minutes=float(match[1]))
    if match and unit and match[1].isdigit() and int(match[1]) > 0:
        return Every(**{unit: int(match[1])})
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return Every(epochs=every)
    raise ConfigError(
        f"Checkpoint: every: expected 1 or more epochs, or a text such as '500 steps' or '10 minutes', got {every!r}."
    )


class Polls:
    """Steps at which the ranks poll each other, about once a second; the same steps on all ranks.

    Args:
        clock: function that returns seconds since any fixed time.

    Example:
        >>> polls = Polls()
        >>> polls.due()
        True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._calls, self._last, self._next, self._pause = clock, 0, 0, 1, 1
        self._since = clock()

    def now(self) -> tuple[int, int, int, int]:
        """Return the state, for `begin_late` on another rank."""
        return self._calls, self._last, self._next, self._pause

    def begin_late(self, theirs: tuple[int, int, int, int]) -> None:
        """Poll at the steps of the others.

        Args:
            theirs: result of `now` on another rank.
        """
        self._calls, self._last, self._next, self._pause = theirs

    def due(self) -> bool:
        """Count a step, and return whether to poll now; the same on all ranks after the same number of steps."""
        self._calls += 1
        return self._calls >= self._next

    @property
    def pace(self) -> float:
        """Mean seconds a step since the last poll."""
        return (self._clock() - self._since) / max(self._calls - self._last, 1)

    def adjust(self, paces: Sequence[float]) -> None:
        """Choose the step of the next poll.

        Args:
            paces: `pace` of each rank.
        """
        # The interval at most doubles: the first steps, which are traced and compiled, say little about later steps.
        wanted = min(int(_SECONDS_BETWEEN_POLLS / max(*paces, 1e-9)), _MOST_STEPS)
        self._pause = max(1, min(2 * self._pause, wanted))
        self._last, self._next, self._since = self._calls, self._calls + self._pause, self._clock()
