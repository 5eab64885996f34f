"""Choice of the number of steps between two exchanges."""

import math

#: Largest period that is chosen.
MAX_PERIOD = 32
# Another period is chosen if the fixed part of the cost is not between the first and the last of these shares of the
# budget; then it is to be the second.
_SHORT, _AIM, _LONG = 0.2, 0.5, 0.6
# Number of reviews in a row that must agree, and largest factor of a change.
_AGREEING, _LARGEST = 2, 4.0


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
        self.period = self._within(before * min(max(share / _AIM, 0.5), _LARGEST))
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
