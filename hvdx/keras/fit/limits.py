"""Limit of a `fit` from the environment, for short runs of unmodified scripts."""

import os
import time
from dataclasses import dataclass, field

from hvdx.errors import ConfigError

#: Environment variable: epochs:N, minutes:T or steps:N.
VARIABLE = "HVDX_LIMIT"
_EXAMPLE = f"Set {VARIABLE}=epochs:3, {VARIABLE}=minutes:2.5 or {VARIABLE}=steps:24."


@dataclass
class Limit:
    """Limit of each `fit` of a script; without a value, there is none.

    Epochs and minutes end the fit at the end of an epoch; the script goes on after it. Steps end the process.

    Attributes:
        text: the limit as the user wrote it; "" for none.
        epochs: number of epochs of the fit.
        minutes: minutes after which no other epoch begins.
        steps: number of steps after which the process ends.
        reached: True once the limit has ended the fit.

    Example:
        >>> limit = parse("epochs:1")
        >>> limit.begin()
        >>> limit.after_epoch(), limit.after_step(24)
        (True, False)
    """

    text: str = ""
    epochs: int | None = None
    minutes: float | None = None
    steps: int | None = None
    reached: bool = False
    _epochs_done: int = field(default=0, repr=False)
    _begin: float = field(default=0.0, repr=False)

    def begin(self) -> None:
        """Begin a fit."""
        self.reached, self._epochs_done, self._begin = False, 0, time.monotonic()

    def reach(self) -> None:
        """Record that the limit ends the fit."""
        self.reached = True

    def after_epoch(self) -> bool:
        """Count an epoch; return whether it is to be the last one of the fit."""
        self._epochs_done += 1
        if self.epochs is not None:
            return self._epochs_done >= self.epochs
        return self.minutes is not None and time.monotonic() - self._begin >= 60 * self.minutes

    def after_step(self, steps: int) -> bool:
        """Return whether the process is to end.

        Args:
            steps: steps of this fit so far.
        """
        return self.steps is not None and steps >= self.steps


def parse(text: str) -> Limit:
    """Parse a limit.

    Args:
        text: "epochs:N", "minutes:T", "steps:N", or "" for none.

    Raises:
        ConfigError: if the text is none of these.

    Example:
        >>> parse("minutes:0.5").minutes
        0.5
    """
    if not text.strip():
        return Limit()
    kind, _, number = text.strip().partition(":")
    try:
        if kind == "minutes" and 0 < float(number) < float("inf"):
            return Limit(text, minutes=float(number))
        if kind == "epochs" and int(number) > 0:
            return Limit(text, epochs=int(number))
        if kind == "steps" and int(number) > 0:
            return Limit(text, steps=int(number))
    except ValueError:
        pass
    raise ConfigError(
        f"{VARIABLE}: expected epochs:N, minutes:T or steps:N with a positive number, got {text!r}. {_EXAMPLE}"
    )


def from_environment() -> Limit:
    """Return the limit that the environment sets.

    Raises:
        ConfigError: see `parse`.
    """
    return parse(os.environ.get(VARIABLE, ""))
