"""Polling with back-off and a time limit, so that waiting ranks leave the cores to others, and a record of what waits.

`hvdx.comm.progress` reads the record.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from hvdx.errors import ConfigError, ExchangeError

#: Seconds after which a rank gives up waiting for another.
LIMIT_VARIABLE = "HVDX_TIMEOUT"
_LIMIT_SECONDS = 600.0
# Number of polls without sleep, then the shortest and longest sleep in seconds.
_EAGER = 50
_MIN_SLEEP, _MAX_SLEEP = 20e-6, 1e-3
# Name of the collective, and whether it needs every rank; by thread, since several threads may wait at once.
_waits: dict[int, tuple[str, bool]] = {}
_changed = time.monotonic()


class Backoff:
    """Exponential back-off for polling.

    Example:
        >>> backoff = Backoff()
        >>> backoff.sleep()  # the first 50 calls do not sleep
        >>> backoff.renew()
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Reset the back-off after a successful poll."""
        self._polls, self._next = 0, _MIN_SLEEP

    def sleep(self, most: float = _MAX_SLEEP) -> None:
        """Sleep after an unsuccessful poll.

        Args:
            most: maximum duration in seconds.
        """
        self._polls += 1
        if self._polls > _EAGER:
            time.sleep(min(self._next, most))
            self._next = min(self._next * 1.1, _MAX_SLEEP)


def until(done: Callable[[], bool], limit: float, what: str = "") -> bool:
    """Poll until done or timed out; return whether it finished.

    Args:
        done: polled with back-off.
        limit: seconds.
        what: name of the collective, if this is a wait for every other rank.

    Example:
        >>> until(lambda: True, 1.0)
        True
    """
    if not what:
        return _poll(done, limit)
    enter(what)
    try:
        return _poll(done, limit)
    finally:
        leave()


def _poll(done: Callable[[], bool], limit: float) -> bool:
    backoff, end = Backoff(), time.monotonic() + limit
    while not done():
        if time.monotonic() > end:
            return False
        backoff.sleep()
    return True


def wait_for_all(done: Callable[[], bool], what: str) -> None:
    """Poll until done; raise ExchangeError if not all ranks join within the time limit."""
    if not until(done, time_limit()):
        raise ExchangeError(f"{what}: not all ranks joined within {time_limit():.0f} s ({LIMIT_VARIABLE}).")


def enter(what: str, for_all: bool = True) -> None:
    """Record that this thread starts to wait for other ranks.

    Args:
        what: name of the collective.
        for_all: True if it cannot end without every rank.
    """
    global _changed
    _waits[threading.get_ident()] = what, for_all
    _changed = time.monotonic()


def leave() -> None:
    """Record that this thread no longer waits."""
    global _changed
    _waits.pop(threading.get_ident(), None)
    _changed = time.monotonic()


@contextlib.contextmanager
def recorded(what: str, for_all: bool = True) -> Iterator[None]:
    """Record that this thread waits for other ranks until the block ends; see `enter`."""
    enter(what, for_all)
    try:
        yield
    finally:
        leave()


def present() -> list[tuple[str, bool]]:
    """Return the name of each wait of this process, and whether it needs every rank."""
    return list(_waits.values())


def changed() -> float:
    """Return the time of the last record, in seconds of `time.monotonic`."""
    return _changed


def overshoot(seconds: float) -> float:
    """Return the mean time by which `until` returns after the event that it waits for.

    A sleep is about a tenth of the time that has passed, so the wait ends half a sleep late.

    Args:
        seconds: time until the event.

    Example:
        >>> f"{overshoot(0.0):.0e} {overshoot(0.001):.0e} {overshoot(1.0):.0e}"
        '1e-05 6e-05 5e-04'
    """
    return min(_MIN_SLEEP + 0.1 * max(seconds, 0.0), _MAX_SLEEP) / 2


def time_limit() -> float:
    """Return the seconds after which a rank gives up waiting for another.

    Raises:
        ConfigError: if `HVDX_TIMEOUT` is not a finite number above 0.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        limit = float(text or _LIMIT_SECONDS)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise ConfigError(f"{LIMIT_VARIABLE}: expected seconds above 0, got {text!r}.")
    return limit
