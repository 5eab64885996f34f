"""What the parameter server and the ordered route share: session numbers, one object a communicator, and polling."""

import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from hvdx.comm import Comm
from hvdx.comm.waiting import Backoff

T = TypeVar("T")

# The sessions of an exchange have the numbers (series << _SERIES_BITS) + 0, 1, 2, ...
_SERIES_BITS = 32
# Longest sleep between polls of a mailbox, in seconds: while a part of a message is in flight, and otherwise.
_BUSY_SLEEP, _IDLE_SLEEP = 1e-4, 1e-3
# Seconds without a message after which a thread polls less often, and the sleep between its polls from then on. Each
# poll interrupts the Python code of the main thread; with more polls, tracing a model took many times longer.
_NAP_AFTER, _NAP = 0.5, 0.02


class Series:
    """Numbers of sessions. Each exchange has a series of its own, because ranks may begin sessions in different orders.

    Example:
        >>> from hvdx.comm.local import LocalComm
        >>> series = Series()
        >>> [hex(series.agree(LocalComm())) for _ in range(2)]
        ['0x100000000', '0x200000000']
    """

    def __init__(self) -> None:
        self._last = 0

    def agree(self, comm: Comm, ranks: tuple[int, ...] = ()) -> int:
        """Return the number of the first session of a new series. Collective.

        Args:
            comm: ranks that have opened the same numbers of series, unless an exception ended an opening on some.
            ranks: ranks of the new exchange, if several exchanges of different ranks are opened at once: each gets a
                series of its own.
        """
        everyone = comm.all_gather_object((self._last, ranks), "opening an exchange")
        sets = sorted({theirs for _, theirs in everyone})
        first = max(last for last, _ in everyone) + 1
        self._last = first + len(sets) - 1
        return (first + sets.index(ranks)) << _SERIES_BITS


class PerComm(Generic[T]):
    """One object for each communicator, made at the first request.

    Args:
        make: function that makes it.
    """

    def __init__(self, make: Callable[[Comm], T]) -> None:
        self._make = make
        self._made: weakref.WeakKeyDictionary[Comm, T] = weakref.WeakKeyDictionary()

    def of(self, comm: Comm) -> T:
        """Return the object of a communicator. The first call makes it, which is collective if `make` is."""
        if comm not in self._made:
            self._made[comm] = self._make(comm)
        return self._made[comm]

    def take_all(self) -> list[T]:
        """Return all objects, and forget them."""
        found = list(self._made.values())
        self._made.clear()
        return found


class Polling:
    """Pace of a loop that polls a mailbox: often while messages come, and less often later."""

    def __init__(self) -> None:
        self._backoff, self._last = Backoff(), time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since the last message."""
        return time.monotonic() - self._last

    def found(self) -> None:
        """Begin anew after a message."""
        self._backoff.renew()
        self._last = time.monotonic()

    def sleep(self, receiving: bool, naps: bool = True) -> None:
        """Sleep until the next poll.

        Args:
            receiving: whether a part of a message is in flight.
            naps: whether the sleep may be long.
        """
        if naps and not receiving and self.idle > _NAP_AFTER:
            time.sleep(_NAP)
        self._backoff.sleep(_BUSY_SLEEP if receiving else _IDLE_SLEEP)
