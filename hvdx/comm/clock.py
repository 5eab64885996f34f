"""Clock by which exchanges measure their parts: that of the machine; in a simulation, that of each virtual rank.

An exchange that reads the time here runs unchanged in `hvdx simulate`.
"""

import threading
import time


class Clock:
    """Clock of the machine."""

    def now(self) -> float:
        """Return a time in seconds, of which only differences mean something."""
        return time.perf_counter()


_MACHINE = Clock()
_local = threading.local()


def current() -> Clock:
    """Return the clock of the calling thread: that of the machine, unless `use` has set another one."""
    clock: Clock = getattr(_local, "clock", _MACHINE)
    return clock


def use(clock: Clock | None) -> None:
    """Set the clock of the calling thread.

    Args:
        clock: the clock; None for that of the machine.
    """
    _local.clock = _MACHINE if clock is None else clock


def now() -> float:
    """Return the time of the calling thread's clock, in seconds.

    Example:
        >>> begin = now()
        >>> now() >= begin
        True
    """
    return current().now()
