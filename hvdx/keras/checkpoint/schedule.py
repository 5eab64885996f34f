"""When to save, and how the ranks find out that the job is about to end, without asking each other at every step."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdx.errors import ConfigError

# How long a signal may go unnoticed, beside the step during which it came.
_SECONDS_BETWEEN_POLLS = 1.0
# And at most so many steps: they may become slower.
_MOST_STEPS = 64

_UNITS = {"epoch": "epochs", "step": "steps", "minute": "minutes", "min": "minutes"}


@dataclass(frozen=True)
class Every:
    """How often a checkpoint is made; one of the three is above 0.

    Attributes:
        epochs, steps: so many.
        minutes: by rank 0's clock.
    """

    epochs: int = 0
    steps: int = 0
    minutes: float = 0.0


def parse(every: int | str) -> Every:
    """Read the option `every`.

    Args:
        every: a number of epochs, or such as "500 steps", "10 minutes", "2 epochs".

    Raises:
        ConfigError: it is neither.

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
        f"Checkpoint: every: expected 1 or more epochs, or such as '500 steps' or '10 minutes', got {every!r}."
    )


class Polls:
    """At which steps the ranks ask each other, about once a second: what they say is all that decides.

    Args:
        clock: seconds, from anywhere.

    Example:
        >>> polls = Polls()
        >>> polls.due()
        True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._calls, self._last, self._next, self._pause = clock, 0, 0, 1, 1
        self._since = clock()

    def due(self) -> bool:
        """A step is over: whether to ask now; the same on all ranks that have taken as many steps."""
        self._calls += 1
        return self._calls >= self._next

    @property
    def pace(self) -> float:
        """Seconds a step since the last poll."""
        return (self._clock() - self._since) / max(self._calls - self._last, 1)

    def adjust(self, paces: Sequence[float]) -> None:
        """The others have answered.

        Args:
            paces: of all ranks.
        """
        # At most twice as many as before: the first steps are slow, since they are traced and compiled.
        wanted = min(int(_SECONDS_BETWEEN_POLLS / max(*paces, 1e-9)), _MOST_STEPS)
        self._pause = max(1, min(2 * self._pause, wanted))
        self._last, self._next, self._since = self._calls, self._calls + self._pause, self._clock()
