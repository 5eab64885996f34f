"""Waiting without taking cores from others, and with an end."""

import os
import time
from collections.abc import Callable

from hvdx.errors import ConfigError

#: Seconds after which a rank gives up waiting for another.
LIMIT_VARIABLE = "HVDX_TIMEOUT"
_LIMIT_SECONDS = 600.0
# Asked so often in a row before sleeping, and for so long between two questions.
_EAGER = 50
_LEAST_SLEEP, _MOST_SLEEP = 20e-6, 1e-3


class Backoff:
    """Ever longer sleeps between questions that are answered no.

    Example:
        >>> backoff = Backoff()
        >>> backoff.sleep()  # the first times it does not sleep at all
        >>> backoff.renew()
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Something happened: more may follow at once."""
        self._asked, self._next = 0, _LEAST_SLEEP

    def sleep(self, most: float = _MOST_SLEEP) -> None:
        """Nothing happened: wait a while.

        Args:
            most: seconds, at most.
        """
        self._asked += 1
        if self._asked > _EAGER:
            time.sleep(min(self._next, most))
            self._next = min(self._next * 1.1, _MOST_SLEEP)


def until(done: Callable[[], bool], limit: float) -> bool:
    """Ask until the answer is yes, or a time is over: whether it was.

    Args:
        done: asked ever less often.
        limit: seconds.

    Example:
        >>> until(lambda: True, 1.0)
        True
    """
    backoff, end = Backoff(), time.monotonic() + limit
    while not done():
        if time.monotonic() > end:
            return False
        backoff.sleep()
    return True


def time_limit() -> float:
    """Seconds after which a rank gives up waiting for another.

    Raises:
        ConfigError: `HVDX_TIMEOUT` is not a number above 0.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        limit = float(text or _LIMIT_SECONDS)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise ConfigError(f"{LIMIT_VARIABLE}: expected seconds above 0, got {text!r}.")
    return limit
