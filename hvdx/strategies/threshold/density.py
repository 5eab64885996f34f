"""Control of an automatic density, whose exchange costs a share of a step's computing, and of an automatic period."""

import math
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from hvdx.costs.sizes import message_bytes
from hvdx.costs.types import Link

#: Range of automatic densities. Below 1e-4 an element would wait for thousands of steps in the residual.
MIN_DENSITY, MAX_DENSITY = 1e-4, 1 / 8
#: Density up to which the workers hardly learn from each other.
STARVED = 2e-4
#: Density before the first review.
INITIAL_DENSITY = 1 / 32
# Steps of a review. The first steps after a change are left out: they still carry messages of the old density.
_WINDOW, _LEFT_OUT = 10, 2
# The same for the first review. The first steps of a process are slow: caches are cold, and memory is new.
_FIRST_WINDOW, _FIRST_LEFT_OUT = 4, 8
# Quantile of a rank's costs that counts: other programs on the machine make single steps slower, and none faster.
_QUANTILE = 0.25
# Steps before the probe of the link may lower the density.
_PROBED = 2
# Largest factor of a change in the first review and after it, and smallest factor that is worth a change.
_LARGEST_FIRST, _LARGEST, _SMALLEST = 8.0, 2.0, 1.2
# A decrease that leaves more than this share of the cost saves too little, and is taken back.
_SAVES_NOTHING = 0.9
# A cost is too high above this multiple of the budget, and leaves room below the other one.
_HIGH, _LOW = 1.1, 0.8
# Number of reviews in a row that must agree before a settled density is changed.
_PATIENCE = 4
# Number of reviews in which the density is found.
_SETTLING = 8
# Smallest ratio of two costs that is taken for the effect of their densities, and not for noise.
_CLEAR = 1.5
# Share of the budget that the part of the cost that grows with the density may take in any case.
_LEAST_SHARE = 0.25
#: Largest period that is chosen.
MAX_PERIOD = 32
# Another period is chosen if the fixed part of the cost is not between the first and the last of these shares of the
# budget; then it is to be the second.
_SHORT, _AIM, _LONG = 0.2, 0.5, 0.6
# Number of reviews in a row that must agree, and largest factor of a change.
_AGREEING, _LARGEST_OF_PERIOD = 2, 4.0


class PeriodControl:
    """Closed loop from the cost of an exchange that does not depend on the density to the period.

    This part of the cost (latency, reading the whole update) is the same whether an exchange holds one step or ten, so
    a longer period divides it. But ranks that train alone for longer learn less from each other, so the period is the
    shortest one in which this part takes half of the budget.

    Args:
        longest: largest period.

    Attributes:
        period: number of steps until the next exchange.

    Example:
        >>> control = PeriodControl(longest=32)
        >>> for _ in range(10):
        ...     _ = control.review(fixed=0.002, budget=0.001 * control.period)
        >>> control.period
        4
    """

    def __init__(self, longest: int = MAX_PERIOD):
        self.period, self._longest = 1, longest
        self._too_short = self._too_long = 0

    def guess(self, fixed: float, budget: float) -> bool:
        """Choose the first period; return whether it is longer than one step.

        Args:
            fixed: known seconds of an exchange that do not depend on the density, such as the latency.
            budget: seconds that the exchange of one step may take.
        """
        self.period = self._within(fixed / (_AIM * budget) if budget > 0 else 1.0)
        return self.period > 1

    def restore(self, period: int) -> None:
        """Begin with a period."""
        self.period = self._within(period)

    def review(self, fixed: float, budget: float) -> bool:
        """Return whether the period has changed.

        Args:
            fixed: seconds of an exchange that do not depend on the density.
            budget: seconds that the exchange of a period may take.
        """
        share = fixed / budget if budget > 0 else _AIM
        self._too_short = self._too_short + 1 if share > _LONG else 0
        self._too_long = self._too_long + 1 if share < _SHORT else 0
        if max(self._too_short, self._too_long) < _AGREEING:
            return False
        before, self._too_short, self._too_long = self.period, 0, 0
        self.period = self._within(before * min(max(share / _AIM, 0.5), _LARGEST_OF_PERIOD))
        return self.period != before

    def _within(self, period: float) -> int:
        return min(max(math.ceil(period - 1e-6), 1), self._longest)


def period_for(fixed: float, budget: float) -> int:
    """Return the period that `PeriodControl` chooses.

    Args:
        fixed: seconds of an exchange that do not depend on the density.
        budget: seconds that the exchange of one step may take.

    Example:
        >>> period_for(fixed=0.002, budget=0.001), period_for(fixed=0.0002, budget=0.001)
        (4, 1)
    """
    control = PeriodControl()
    control.guess(fixed, budget)
    return control.period


class DensityControl:
    """Closed loop from the measured cost of an exchange to the density. Its input must be the same on all ranks.

    The cost of a step is all that the step pays for the exchange: encoding, the transfer, decoding. A part of it does
    not depend on the density (latency, reading the whole update). If this part alone exceeds the budget, a lower
    density would only lose accuracy, so the density falls no further once its own part of the cost is small. The
    largest clear slope of the cost says when that is in any case: noise alone would let the density fall on. For the
    same reason a rank's cost is the lower quartile of some steps, and a decrease that saves next to nothing is taken
    back.

    Args:
        overhead: budget, as a share of a step's computing time.
        network: result of `hvdx.costs.link.probe`, for the first review only.
        messages: number of messages of whole updates that a rank receives in a step.
        elements: number of elements of an update.
        longest: largest number of steps between two exchanges; 1 to exchange in every step.

    Attributes:
        density: density of the next exchange.

    Example:
        >>> control = DensityControl(0.1, Link(1e-4, 12.5e6), 1, 1_000_000)
        >>> for _ in range(200):
        ...     control.observe(computing=0.01, costs=[5e-4 + 0.1 * control.density])
        >>> 0.8e-3 < 5e-4 + 0.1 * control.density < 1.1e-3
        True
    """

    def __init__(self, overhead: float, network: Link, messages: float, elements: int, longest: int = 1):
        self.density, self._period = INITIAL_DENSITY, PeriodControl(longest)
        self._overhead, self._network, self._messages, self._elements = overhead, network, messages, elements
        self._computing: list[float] = []
        self._costs: list[Sequence[float]] = []
        self._left_out, self._steps = _FIRST_LEFT_OUT, 0
        self._restored = False
        self._reviews = 0
        # Last review at another density: (density, cost).
        self._before: tuple[float, float] | None = None
        self._fixed = 0.0
        # Largest clear slope of the cost.
        self._slope = 0.0
        self._too_high = self._too_low = 0

    @property
    def period(self) -> int:
        """Number of steps until the next exchange."""
        return self._period.period

    def restore(self, density: float, period: int = 1) -> None:
        """Begin with a density and a period, before the first step, in place of those that the probe suggests."""
        self.density, self._restored = density, True
        self._period.restore(period)

    def observe(self, computing: float, costs: Sequence[float]) -> None:
        """Add one exchange, and change `density` or `period` if a review is due.

        Args:
            computing: seconds of computing since the exchange before.
            costs: seconds that the exchange took on each rank.
        """
        self._steps += 1
        self._computing = [*self._computing, computing][-4 * _WINDOW :]
        if self._steps == _PROBED and not self._restored:
            # The computing time is that of the last step: none was measured before the first one.
            budget = self._overhead * computing
            if self._period.guess(self._network.latency, budget):
                self._computing = []
            self.density = min(self.density, affordable_density(self._transfer, budget * self.period))
        if self._left_out:
            self._left_out -= 1
            return
        if self._costs and len(self._costs[-1]) != len(costs):
            self._costs = []  # a rank has died, and the others go on
        self._costs.append(costs)
        if len(self._costs) == (_WINDOW if self._reviews else _FIRST_WINDOW):
            cost = float(np.quantile(self._costs, _QUANTILE, axis=0).max())
            self._review(self._overhead * median(self._computing), cost)
            self._costs = []

    def _review(self, budget: float, cost: float) -> None:
        self._reviews += 1
        share = _LEAST_SHARE * budget
        if self._reviews == 1:
            # The first guess trusts the probe, and may be far off; what follows is measured.
            guess = affordable_density(self._transfer, budget)
            self._change(max(min(guess, self._proposal(budget, cost, share)), self.density / _LARGEST_FIRST), cost)
            return
        if self._taken_back(cost):
            return
        self._learn_fixed(cost)
        if self._period.review(self._fixed or (cost if self.density == MIN_DENSITY else 0.0), budget):
            # Another period has another computing time, and so another budget.
            self._computing, self._left_out = [], _LEFT_OUT
            self._too_high = self._too_low = 0
            return
        budget = budget_with(self._fixed, budget)
        self._too_high = self._too_high + 1 if cost > _HIGH * budget else 0
        self._too_low = self._too_low + 1 if cost < _LOW * budget else 0
        if max(self._too_high, self._too_low) < (1 if self._reviews < _SETTLING else _PATIENCE):
            return
        wanted = self._proposal(budget, cost, share)
        self._change(min(max(wanted, self.density / _LARGEST), self.density * _LARGEST), cost)

    def _transfer(self, density: float) -> float:
        """Return the seconds of the transfer on the network that was probed."""
        received = self._messages * message_bytes(self._elements, density)
        return self._network.latency + received / self._network.bandwidth

    def _taken_back(self, cost: float) -> bool:
        """Take a decrease of the density back if it saved next to nothing, and return whether it did."""
        if self._before is None:
            return False
        density, other = self._before
        if self.density > density / _SMALLEST or cost < _SAVES_NOTHING * other:
            return False
        self._before, self._fixed = None, max(cost, other)
        self.density, self._left_out = density, _LEFT_OUT
        self._too_high = self._too_low = 0
        return True

    def _learn_fixed(self, cost: float) -> None:
        """Update the part of the cost that does not depend on the density, from the last two densities."""
        if self._before is None:
            return
        (density, other), self._before = self._before, None
        slope = max(0.0, (cost - other) / (self.density - density))
        if max(cost, other) > _CLEAR * min(cost, other):
            self._slope = max(self._slope, slope)
        fixed = max(0.0, cost - slope * self.density)
        self._fixed = fixed if not self._fixed else (self._fixed + fixed) / 2

    def _proposal(self, budget: float, cost: float, share: float) -> float:
        """Return the density whose cost is the budget, but at least the one whose own part of the cost is `share`."""
        wanted = self.density * max(budget - self._fixed, 0.0) / max(cost - self._fixed, 0.05 * budget)
        # The cost is a convex function of the density, so this density's own part of the cost is no larger.
        least = share / self._slope if self._slope else 0.0
        return min(max(wanted, least, MIN_DENSITY), MAX_DENSITY)

    def _change(self, density: float, cost: float) -> None:
        if 1 / _SMALLEST < density / self.density < _SMALLEST:
            return
        self._before = self.density, cost
        self.density, self._left_out = density, _LEFT_OUT
        self._too_high = self._too_low = 0


def affordable_density(cost: Callable[[float], float], seconds: float) -> float:
    """Return the largest density in [MIN_DENSITY, MAX_DENSITY] whose exchange costs at most some seconds.

    Args:
        cost: seconds of an exchange by its density, increasing.
        seconds: limit.

    Example:
        >>> round(affordable_density(lambda density: 0.001 + 0.1 * density, 0.002), 4)
        0.01
    """
    low, high = MIN_DENSITY, MAX_DENSITY
    if cost(high) <= seconds:
        return high
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if cost(middle) <= seconds else (low, middle)
    return low


def budget_with(fixed: float, budget: float) -> float:
    """Return the seconds that an exchange may cost: the budget, or more if the fixed part leaves too little of it.

    Args:
        fixed: seconds that do not depend on the density.
        budget: seconds that the exchange should cost.

    Example:
        >>> budget_with(0.5, 1.0), budget_with(2.0, 1.0)
        (1.0, 2.25)
    """
    return max(budget, fixed + _LEAST_SHARE * budget)
