"""Clock by which exchanges measure their parts: that of the machine; in a simulation, that of each virtual rank."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_local = threading.local()


def timer() -> Callable[[], float]:
    """Return the function that tells the time to this thread, in seconds of which only differences mean something.

    An exchange asks for it once, so it runs unchanged in `hvdx simulate`.

    Example:
        >>> now = timer()
        >>> begin = now()
        >>> now() >= begin
        True
    """
    found: Callable[[], float] = getattr(_local, "timer", time.perf_counter)
    return found


@contextlib.contextmanager
def measured(add: Callable[[float], object]) -> Iterator[None]:
    """Call a function with the seconds that a block takes, unless it raises.

    Example:
        >>> seconds = []
        >>> with measured(seconds.append):
        ...     pass
        >>> seconds[0] >= 0
        True
    """
    now = timer()
    begin = now()
    yield
    add(now() - begin)


def use(function: Callable[[], float] | None) -> None:
    """Set the timer of the calling thread.

    Args:
        function: the timer; None for that of the machine.
    """
    _local.timer = function or time.perf_counter
