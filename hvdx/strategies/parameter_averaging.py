"""Parameter averaging, also known as local SGD."""

import itertools
import re
from collections.abc import Sequence
from typing import Any, cast, get_args

from hvdx.comm import Comm, GraphComm
from hvdx.comm.interfaces import Engine, Reduction, Tensor
from hvdx.costs.model import Situation
from hvdx.costs.sizes import ring_bytes
from hvdx.costs.types import Prediction
from hvdx.errors import ConfigError
from hvdx.strategies.contract import Exchange, Schedule, Strategy, TensorSpec, Weights, agree_on_steps, one_of

_SPELLING = re.compile(r"(\d+)(?:@(\d+))?")
# Most bytes of a worker's shares of the mean at a time: variables of up to 4 MB together, 0.11 GB in BERT-base.
_SHARES = 2**27


class ParameterAveraging(Strategy):
    """Local SGD: every rank trains alone, and every `period` steps the weights become their mean.

    The ranks exchange the weights and the optimiser's state: twice the weights for SGD with momentum, three times for
    Adam. A rank sends about `1 / period` of that in a step. The weights are also averaged at the end of each epoch, so
    that one network is validated and saved; the period restarts there.

    Args:
        period: number of steps between averages; or a schedule: pairs of a first step and a period, usually short first
            and longer later, such as ((0, 1), (500, 4), (2000, 16)) or "1@0/4@500/16@2000".
        average_optimizer: average momenta and moments with the weights. If False, each rank keeps its own, and half to
            two thirds fewer bytes travel. Counters (steps) are never averaged.
        weighted: weight each rank by the number of samples that it trained on since the last average. If False, all
            ranks count the same.
        engine: library that carries the weights: "horovod", "mpi" or "auto"; see `AllReduce`.

    Raises:
        ConfigError: if a period is not positive, or the steps of a schedule do not increase from 0.

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
    survives = True

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
        return not self.average_optimizer

    def predict(self, situation: Situation) -> Prediction:
        """Divide the costs of an average by the last period of the schedule."""
        situation, period = situation.with_engine(self.engine), self.schedule[-1][1]
        elements = situation.elements * (1 + situation.slots * self.average_optimizer)
        # The share of a worker is multiplied in, divided out, and the means are assigned.
        terms = situation.reduction(4, elements, rarely=period > 1)
        if terms:
            terms["copying"] += situation.passes(3 * 8, elements)
        # The times of several steps differ less between workers than those of one step.
        terms = {name: value / period for name, value in terms.items()}
        terms |= {"waiting": situation.slowest / period**0.5, "polling": situation.polling(rarely=period > 1)}
        shares = min(4 * elements, _SHARES) * (situation.workers > 1)
        buffers = {"buffers": situation.reduction_memory(4, elements) + shares}
        sent = ring_bytes(4 * elements, situation.workers) / period
        return situation.prediction(terms, sent, buffers, period=period, note=f"averages every {period} steps")

    def open(self, comm: Comm, specs: Sequence[TensorSpec], name: str = "") -> "AveragingExchange":
        return AveragingExchange(cast(GraphComm, comm), specs, name)  # strategies in the graph are given one


class AveragingExchange(Exchange[Tensor]):
    """Exchange of one optimiser under `ParameterAveraging`.

    Args:
        comm: the ranks.
        specs: all tensors that are averaged.
        name: prefix of the names of the collectives.
    """

    def __init__(self, comm: GraphComm, specs: Sequence[TensorSpec], name: str):
        self._comm, self._name, self.specs = comm, name, list(specs)
        self.elements = sum(s.elements for s in specs)
        self.sent = ring_bytes(sum(s.elements * s.itemsize for s in specs), comm.size)

    def step(self, tensors: Sequence[Tensor], finite: bool = True) -> list[Tensor]:
        """Return the means over the ranks, all of one weight."""
        return self._comm.all_reduce(tensors, Reduction(), f"{self._name}.average")

    def mean(self, tensors: Sequence[Tensor], weights: Weights, name: str = "") -> list[Tensor]:
        """Return the weighted means over the ranks, of all tensors or of some. Collective.

        Args:
            tensors: tensors of this rank times its weight; zeros if the rank is left out.
            weights: weight of this rank, by dtype of the tensors.
            name: addition to the names of the collectives.

        Returns:
            The weighted means, the same bits on every rank; NaN on all ranks if all are left out.
        """
        means: dict[int, Tensor] = {}
        # Each dtype needs an all-reduce of its own; all ranks must call these all-reduces in the same order.
        for dtype in sorted({t.dtype for t in tensors}, key=lambda d: d.name):
            members = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            shares = [weights[dtype], *(tensors[i] for i in members)]
            called = f"{self._name}.average{name}.{dtype.name}"
            total, *sums = self._comm.all_reduce(shares, Reduction(average=False), called)
            means |= {i: s / total for i, s in zip(members, sums, strict=True)}
        return [means[i] for i in range(len(tensors))]

    def agree(self, since: int) -> int:
        """Return the steps since the last average, if all ranks have taken the same number. Collective.

        Args:
            since: steps of this rank.

        Raises:
            ReplicaError: on all ranks, if they differ.
        """
        return agree_on_steps(since, "the weights were averaged", self._comm)


def _schedule(period: object) -> Schedule:
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
