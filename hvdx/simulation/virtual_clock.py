"""Virtual clocks of ranks that are threads of one process, of which one runs at a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hvdx.comm.waiting import LIMIT_VARIABLE, time_limit
from hvdx.errors import ExchangeError


class Turn:
    """Lock of the rank that runs, and the first error of any rank, which ends the others.

    A rank that waits gives up the lock, so the measured time of a rank is its own.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.limit = time_limit()
        self._conditions: list[threading.Condition] = []

    def condition(self) -> threading.Condition:
        """Return a new condition of the lock."""
        condition = threading.Condition(self.lock)
        self._conditions.append(condition)
        return condition

    def wait(self, condition: threading.Condition, done: Callable[[], bool]) -> None:
        """Let other ranks run until a condition is met.

        Raises:
            ExchangeError: if another rank has failed, or the time limit has passed.
        """
        if not condition.wait_for(lambda: self.error is not None or done(), self.limit):
            raise ExchangeError(
                f"simulate: not all ranks joined an exchange within {self.limit:.0f} s. Simulate fewer workers, or "
                f"raise {LIMIT_VARIABLE}."
            )
        if self.error is not None:
            raise ExchangeError("simulate: another rank has failed.") from self.error

    def fail(self, error: BaseException) -> None:
        """Record the first error, and wake all ranks. The caller holds the lock."""
        if self.error is None:
            self.error = error
        for condition in self._conditions:
            condition.notify_all()


@dataclass
class Costs:
    """Virtual seconds of a rank.

    Attributes:
        computing: training steps.
        work: work of the exchange on this rank's core, such as encoding.
        waiting: for ranks that came later to an exchange.
        network: transfers.
    """

    computing: float = 0.0
    work: float = 0.0
    waiting: float = 0.0
    network: float = 0.0


class RankClock:
    """Virtual clock of a rank that runs, and of the ranks that repeat its work.

    Args:
        factors: float64[members], virtual seconds for each second of work, of the rank and those that repeat it.
        timer: returns the seconds of work of the calling thread.

    Attributes:
        times: float64[members], virtual seconds; the first is that of the rank that runs.
        costs: parts of the time of the rank that runs.

    Example:
        >>> ticks = iter([0.0, 2.0, 2.0, 2.0])
        >>> mine = RankClock(np.array([1.0, 10.0]), lambda: next(ticks))
        >>> mine.count_work()
        >>> mine.times
        array([ 2., 20.])
    """

    def __init__(self, factors: np.ndarray, timer: Callable[[], float]) -> None:
        self.times, self.costs = np.zeros(len(factors)), Costs()
        self._factors, self._timer, self._mark = factors, timer, timer()
        self._paused = False

    def now(self) -> float:
        """Return the virtual seconds of the rank that runs."""
        running = 0.0 if self._paused else self._timer() - self._mark
        return float(self.times[0] + self._factors[0] * running)

    def __call__(self) -> float:
        """Return the time, as `hvdx.comm.clock` wants it."""
        return self.now()

    def resume(self) -> None:
        """Measure work from here on; work since the last `count_work` is not counted."""
        self._mark = self._timer()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the work up to here, and leave out the work within the block."""
        outermost = not self._paused
        if outermost:
            self.count_work()
        self._paused = True
        try:
            yield
        finally:
            self._paused = not outermost
            self.resume()

    def count_work(self) -> None:
        """Add the work since `resume`, or since the last call, to the times."""
        work, self._mark = self._timer() - self._mark, self._timer()
        self.times += work * self._factors
        self.costs.work += float(work * self._factors[0])

    def compute(self, seconds: np.ndarray) -> None:
        """Add a training step, float64[members], and measure work from here on."""
        self.times += seconds
        self.costs.computing += float(seconds[0])
        self.resume()

    def meet(self, begin: float, seconds: float) -> None:
        """Wait for other ranks until `begin`, then take part in a transfer of some seconds."""
        self.costs.waiting += begin - float(self.times[0])
        self.costs.network += seconds
        self.times[:] = begin + seconds
        self.resume()

    def reset(self) -> None:
        """Set times and costs to zero."""
        self.times[:] = 0.0
        self.costs = Costs()
        self.resume()
