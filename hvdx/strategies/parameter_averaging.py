"""Parameter averaging (local SGD): each worker trains alone, and every so many steps the weights become their mean."""

import itertools
import re
from collections.abc import Sequence
from typing import Any, get_args

from hvdx.comm import GraphComm
from hvdx.comm.base import Engine, Reduction
from hvdx.errors import ConfigError, ReplicaError
from hvdx.strategies.base import Exchange, Schedule, Strategy, TensorSpec, one_of, ring_bytes

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
        engine: what carries the weights: "horovod", "mpi" or "auto"; see `AllReduce`.

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
    placement = "weights"
    runs = "graph"

    def __init__(
        self,
        period: int | str | Sequence[tuple[int, int]] = 16,
        average_optimizer: bool = True,
        weighted: bool = False,
        engine: Engine = "auto",
    ):
        self.schedule = _schedule(period)
        self.period = self.schedule[0][1] if len(self.schedule) == 1 else self.schedule
        one_of("ParameterAveraging", "average_optimizer", average_optimizer, (True, False))
        one_of("ParameterAveraging", "weighted", weighted, (True, False))
        one_of("ParameterAveraging", "engine", engine, get_args(Engine))
        self.average_optimizer, self.weighted = bool(average_optimizer), bool(weighted)
        self.counts_samples = self.weighted
        self.engine = engine

    @property
    def rank_local_state(self) -> bool:
        """See `Strategy.rank_local_state`."""
        return not self.average_optimizer

    def open(
        self, comm: GraphComm, specs: Sequence[TensorSpec], momentum: float = 0.0, name: str = ""
    ) -> "AveragingExchange":
        """See `Strategy.open`."""
        return AveragingExchange(comm, specs, name)


class AveragingExchange(Exchange):
    """Averages what ranks have trained alone.

    Args:
        comm: the ranks.
        specs: everything that is averaged.
        name: pairs up what the ranks send.
    """

    def __init__(self, comm: GraphComm, specs: Sequence[TensorSpec], name: str):
        self._comm, self._name, self.specs = comm, name, list(specs)
        self.elements = sum(s.elements for s in specs)
        self.sent = ring_bytes(sum(s.elements * s.itemsize for s in specs), comm.size)

    def step(self, tensors: Sequence[Any], weights: Any = True) -> list[Any]:
        """Divide the sums over the ranks by the sum of their weights.

        Args:
            tensors: this rank's, times its weight; zeros where it does not count.
            weights: this rank's weight, by the dtypes of the tensors.

        Returns:
            The weighted means, the same bits on every rank; NaN on all of them, if no rank counts.
        """
        means: dict[int, Any] = {}
        # A grouped all-reduce is of one dtype, and all ranks have to come to them in one order.
        for dtype in sorted({t.dtype for t in tensors}, key=lambda d: d.name):
            members = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            shares = [weights[dtype], *(tensors[i] for i in members)]
            total, *sums = self._comm.all_reduce(shares, Reduction(average=False), f"{self._name}.average.{dtype.name}")
            means |= {i: s / total for i, s in zip(members, sums, strict=True)}
        return [means[i] for i in range(len(tensors))]

    def agree(self, since: int) -> int:
        """Stop unless all ranks have taken as many steps since the last average. Collective.

        Args:
            since: steps of this rank.

        Raises:
            ReplicaError: on all ranks, if they differ.
        """
        everyone = self._comm.all_gather_object(since, f"{self._name}.since")
        if len(set(everyone)) > 1:
            raise ReplicaError(
                f"the ranks have taken {everyone} steps since the weights were averaged. Every rank has to call its "
                "optimizer as often as the others: call it with zeros rather than not at all."
            )
        return since


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
