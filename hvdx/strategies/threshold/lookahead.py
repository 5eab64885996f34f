"""How far `Threshold` extrapolates an update before it is sent, to make up for its wait in the residual."""

from dataclasses import dataclass

# Found by trial: ADR 7 for SGD with momentum, ADR 38 for the start with Adam and its relatives.
_OF_MOMENTUM, _MOST = 1 / 3, 5.0
# Lookahead at the start, in units of the square root of an element's wait in steps, and its limit.
_OF_WAIT, _MOST_AT_START = 2.0, 60.0


@dataclass(frozen=True)
class Lookahead:
    """Lookahead of an optimiser's updates: fixed, or derived from its momentum and, at the start, from the density.

    Attributes:
        momentum: share of an update that the optimiser carries over into the next.
        fixed: the lookahead, if the user gave one.

    Example:
        >>> Lookahead(momentum=0.9).at(step=0), Lookahead(fixed=1.0).at(step=0)
        (3.0, 1.0)
    """

    momentum: float = 0.0
    fixed: float | None = None

    @property
    def adapts(self) -> bool:
        """True if the lookahead depends on the density in the first steps."""
        return self.fixed is None and self.momentum > 0

    @property
    def usual(self) -> float:
        """Lookahead after the start."""
        if self.fixed is not None:
            return self.fixed
        return round(min(self.momentum / max(1 - self.momentum, 1e-9) * _OF_MOMENTUM, _MOST), 9)

    def at(self, step: int, density: float | None = None, steps: int = 0) -> float:
        """Return the lookahead of a step.

        With a start of some steps it rises by 1 in a step to 2 / sqrt(density), a limit that falls to nothing in these
        steps. So the first tau is that of small updates: tau rises faster than it falls.

        Args:
            step: number of the step, from 0.
            density: share of the elements that a message holds, in (0, 1]; None if tau is fixed.
            steps: length of the start; 0 for none.

        Example:
            >>> [Lookahead(momentum=0.9).at(step, density=0.01, steps=600) for step in (0, 10, 60, 300, 600)]
            [3.0, 13.0, 18.0, 10.0, 3.0]
        """
        if not self.adapts or density is None or step >= steps:
            return self.usual
        limit = min(_OF_WAIT * density**-0.5, _MOST_AT_START) * (1 - step / steps)
        return max(min(self.usual + step, limit), self.usual)
