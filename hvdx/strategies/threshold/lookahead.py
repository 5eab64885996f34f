"""How far `Threshold` extrapolates an update before it is sent, to make up for its wait in the residual."""

import math

# Found by trial on the half of `jobs/benchmarks/defaults.py` that is for choosing; ADR 54.
_RATE, _SHRINK, _MOST = 0.2, 0.5, 60.0


class Lookahead:
    """Lookahead of an encoder: fixed, or such that what a rank has sent is neither behind its updates nor ahead.

    The residual is the sum of a rank's updates less what it has sent. Its projection on an update is the lag: the
    delay of the messages, in units of this update. The lookahead rises with the lag, and falls where updates turn
    round, before it could amplify them. No property of the optimiser enters, and ranks may have different lookaheads.

    Args:
        fixed: the lookahead, if the user gave one.

    Attributes:
        value: lookahead of the last update.

    Example:
        >>> lookahead = Lookahead()
        >>> for _ in range(100):
        ...     value = lookahead.follow(3.0 - lookahead.value)  # three updates behind without a lookahead
        >>> round(value, 2)
        2.0
    """

    def __init__(self, fixed: float | None = None):
        self.fixed, self.value = fixed, fixed or 0.0

    def follow(self, lag: float) -> float:
        """Return the lookahead of an update with this lag; a lag of NaN says nothing."""
        if self.fixed is None and math.isfinite(lag):
            self.value = min(max(self.value + _RATE * (lag - _SHRINK * self.value), 0.0), _MOST)
        return self.value

    def restore(self, value: float) -> None:
        """Go on with a saved value."""
        if self.fixed is None:
            self.value = value
