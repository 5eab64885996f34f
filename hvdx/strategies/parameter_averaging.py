"""Parameter averaging (local SGD): each worker trains alone, and every so many steps the weights become their mean."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

from hvdx.comm import GraphComm
from hvdx.comm.base import Reduction
from hvdx.errors import ConfigError
from hvdx.strategies.base import Strategy, TensorSpec, one_of, ring_bytes

#: Pairs (first step, period), in the order of the steps; the first begins at step 0.
Schedule = tuple[tuple[int, int], ...]

_SPELLING = re.compile(r"(\d+)(?:@(\d+))?")


class ParameterAveraging(Strategy):
    """Let every rank train alone, and average the weights every `period` steps.

    What travels is the weights, and with them the optimiser's state: twice the weights for SGD with momentum, three
    times for Adam. A rank sends about `1 / period` of that in a step. Weights are averaged at the end of each epoch as
    well, so that what is validated and saved is one network; the period begins anew there.

    Args:
        period: steps from one average to the next, as a number; or a schedule, short first and longer later: pairs of
            a step and the period from there on, such as ((0, 1), (500, 4), (2000, 16)), or "1@0/4@500/16@2000".
        average_optimizer: average momenta and moments with the weights. Without, each rank keeps its own, and half to
            two thirds fewer bytes travel. Counters (steps) are never averaged.
        weighted: count each rank by the samples that it saw since the last average. Without, all count alike.

    Raises:
        ConfigError: a period that is not positive, or steps that do not increase from 0.

    Example:
        >>> ParameterAveraging(period=32)
        ParameterAveraging(period=32)
        >>> ParameterAveraging("1@0/16@1000").schedule
        ((0, 1), (1000, 16))

    Source: McDonald et al. 2010, "Distributed training strategies for the structured perceptron"; Stich 2019, "Local
    SGD converges fast and communicates little"; the averaged optimiser is that of Deeplearning4j's `saveUpdater`.
    """

    name = "parameter_averaging"
    own_spelling = frozenset({"period"})

    def __init__(
        self,
        period: int | str | Sequence[tuple[int, int]] = 16,
        average_optimizer: bool = True,
        weighted: bool = False,
    ):
        self.schedule = _schedule(period)
        self.period = self.schedule[0][1] if len(self.schedule) == 1 else self.schedule
        one_of("ParameterAveraging", "average_optimizer", average_optimizer, (True, False))
        one_of("ParameterAveraging", "weighted", weighted, (True, False))
        self.average_optimizer, self.weighted = bool(average_optimizer), bool(weighted)

    def add(self, comm: GraphComm, shares: Sequence[Any], name: str) -> list[Any]:
        """Add up what the ranks contribute to a mean. Collective.

        Args:
            comm: reaches the other ranks.
            shares: this rank's weight, and its tensors times that weight; shapes and dtypes alike on all ranks.
            name: alike on all ranks.

        Returns:
            The sums, in the same order: the same bits on every rank.
        """
        return comm.all_reduce(shares, Reduction(average=False), name)

    def bytes_per_average(self, specs: Sequence[TensorSpec], size: int) -> int:
        """Bytes that one rank sends in one average.

        Args:
            specs: everything that is averaged.
            size: number of ranks.
        """
        return ring_bytes(sum(s.elements * s.itemsize for s in specs), size)

    def bytes_per_step(self, specs: Sequence[TensorSpec], size: int) -> int:
        """See `Strategy.bytes_per_step`; of the last period of a schedule."""
        return round(self.bytes_per_average(specs, size) / self.schedule[-1][1])


def _schedule(period: Any) -> Schedule:
    wrong = ConfigError(
        f"ParameterAveraging: period: expected a positive number, or pairs of a step and a period that begin with step "
        f"0, such as ((0, 1), (500, 16)) or '1@0/16@500'; got {period!r}."
    )
    if isinstance(period, str):
        parts = [_SPELLING.fullmatch(part.strip()) for part in period.split("/")]
        if not all(parts):
            raise wrong
        pairs: list[Any] = [(int(part[2] or 0), int(part[1])) for part in parts if part]
    else:
        pairs = list(period) if isinstance(period, Sequence) else [(0, period)]
    if not pairs or not all(isinstance(p, Sequence) and len(p) == 2 and type(p[0]) is type(p[1]) is int for p in pairs):
        raise wrong
    steps = [first for first, _ in pairs]
    if steps[0] != 0 or any(b <= a for a, b in itertools.pairwise(steps)) or any(p < 1 for _, p in pairs):
        raise wrong
    return tuple((first, p) for first, p in pairs)
