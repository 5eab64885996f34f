"""Exchange of an optimiser that trains whole weights and parts of split layers.

All ranks share the whole weights. A part is shared by the ranks that hold the same part, one in each group: its peers.
So an optimiser has two exchanges of the same strategy, with different ranks, which this module presents as one.
"""

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from hvdx.comm import Comm
from hvdx.comm.interfaces import Tensor
from hvdx.errors import ConfigError
from hvdx.strategies.contract import Exchange, Strategy, TensorSpec, Weights
from hvdx.strategies.host_exchange import HostExchange, StepInput
from hvdx.strategies.telemetry import Telemetry, merged

if TYPE_CHECKING:
    from hvdx.codec.base import Array

E = TypeVar("E", bound="Exchange[Tensor] | Exchange[Array]")
V = TypeVar("V")


class Subset(NamedTuple, Generic[E]):
    """Subset of an optimiser's tensors, with an exchange of its own.

    Attributes:
        exchange: the exchange.
        where: indices of its tensors among all tensors.
        is_parts: whether the tensors are parts of split layers.
    """

    exchange: E
    where: list[int]
    is_parts: bool

    def of(self, tensors: Sequence[V]) -> list[V]:
        """Return the tensors of this exchange."""
        return [tensors[i] for i in self.where]


def open_split(
    strategy: Strategy,
    comm: Comm,
    peers: Comm,
    specs: Sequence[TensorSpec],
    is_part: Sequence[bool],
    name: str = "",
) -> "Exchange[Tensor] | Exchange[Array]":
    """Open the exchange of whole weights and parts. Collective on the host.

    Args:
        strategy: strategy of both exchanges.
        comm: all ranks.
        peers: ranks that hold the same parts; a `GraphComm` if the strategy runs in the graph.
        specs: the tensors, in their order.
        is_part: whether each tensor is a part.
        name: see `Strategy.open`.

    Raises:
        ConfigError: if the strategy or one of its options does not support split layers.
        ReplicaError: if the ranks were given different strategies.
    """
    _refuse_options(strategy)
    strategy = strategy.in_each_step("a model with split layers, whose ranks take each step together")
    # The tensors of both exchanges are on the host.
    specs = [replace(s, device="CPU") for s in specs]
    whole, parts = ([i for i, part in enumerate(is_part) if part == which] for which in (False, True))
    if whole and parts and peers.size > 1:
        # Both exchanges together stay within the overhead that the user allows.
        strategy = strategy.with_overhead(0.5)
    in_graph = strategy.runs == "graph"
    subsets: list[Subset[Any]] = []
    if whole:
        subsets.append(Subset(strategy.open(comm, [specs[i] for i in whole], name), whole, False))
    if parts:
        of_parts = [specs[i] for i in parts]
        if peers.size > 1:
            subsets.append(Subset(strategy.open(peers, of_parts, f"{name}.parts"), parts, True))
        else:
            alone = _LocalGraphExchange() if in_graph else _LocalExchange(of_parts, strategy.placement == "weights")
            subsets.append(Subset(alone, parts, True))
    if in_graph:
        # The sum over all ranks of the parts' gradients, each of which is the mean over a group.
        return SplitGraphExchange(specs, subsets, 1.0 if strategy.weighs else comm.size / peers.size)
    return (strategy.split_exchange or SplitHostExchange)(comm, specs, subsets)


def _refuse_options(strategy: Strategy) -> None:
    """Raise ConfigError if the strategy or one of its options does not support split layers."""
    problem = strategy.problem_with_split()
    if strategy.provisional:
        problem = (
            "it measures whole gradients, and this model has split layers. Choose one: AllReduce, Threshold, "
            "ParameterAveraging or ParameterServer."
        )
    elif strategy.asynchronous and strategy.split_exchange is None:
        problem = (
            "it is asynchronous, and the ranks of a group take the steps of split layers together. Choose another "
            "strategy, or give this one a split_exchange."
        )
    if problem:
        raise ConfigError.on_all_ranks(f"{strategy!r}: {problem}")


class _Averaging(Protocol):
    """Exchange of averages in the graph."""

    def mean(self, tensors: Sequence[Tensor], weights: Weights) -> Sequence[Tensor]:
        """Return the weighted means of tensors over the ranks, as `AveragingExchange.mean` does."""

    def agree(self, since: int) -> int:
        """See `AveragingExchange.agree`."""


class SplitGraphExchange(Exchange[Tensor]):
    """Exchange in the graph, made of one for whole weights and one for parts.

    Args:
        specs: all tensors.
        subsets: the subsets of the tensors, each with its exchange.
        factor: factor on the results of the exchange of parts.
    """

    def __init__(self, specs: Sequence[TensorSpec], subsets: Sequence[Subset[Exchange[Tensor]]], factor: float):
        self.specs, self._subsets, self._factor = list(specs), list(subsets), factor
        self.elements = sum(s.elements for s in specs)

    @property
    def row_itemsize(self) -> int | None:  # type: ignore[override]
        return self._subsets[0].exchange.row_itemsize

    @property
    def sent(self) -> int:  # type: ignore[override]
        return sum(subset.exchange.sent for subset in self._subsets)

    def step(self, tensors: Sequence[Tensor], finite: bool = True) -> list[Tensor]:
        result = list(tensors)
        for subset in self._subsets:
            for i, tensor in zip(subset.where, subset.exchange.step(subset.of(tensors), finite), strict=True):
                result[i] = _times(tensor, self._factor) if subset.is_parts and self._factor != 1.0 else tensor
        return result

    def mean(self, tensors: Sequence[Tensor], weights: Weights, weights_of_parts: Weights) -> list[Tensor]:
        """Return the weighted means over the ranks. Collective.

        Args:
            tensors, weights: see `AveragingExchange.mean`.
            weights_of_parts: weight of this rank in the means of parts.
        """
        result = list(tensors)
        for subset in self._subsets:
            its_weights = weights_of_parts if subset.is_parts else weights
            means = cast(_Averaging, subset.exchange).mean(subset.of(tensors), its_weights)
            for i, tensor in zip(subset.where, means, strict=True):
                result[i] = tensor
        return result

    def agree(self, since: int) -> int:
        """Return the steps since the last average; see `AveragingExchange.agree`. Collective."""
        return cast(_Averaging, self._subsets[0].exchange).agree(since)


def _times(tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor times a factor; of gathered rows, the rows times the factor."""
    if hasattr(tensor, "indices"):
        rows: Any = tensor  # `tf.IndexedSlices`, of a library that this room does not import
        return type(rows)(rows.values * factor, rows.indices, rows.dense_shape)
    return tensor * factor


class SplitStep(abc.ABC):
    """Step of the two exchanges of a `SplitHostExchange`.

    Args:
        comm: all ranks.
    """

    def __init__(self, comm: Comm):
        self._comm = comm

    @abc.abstractmethod
    def combine(self, subsets: Sequence[Subset[HostExchange]], step_input: StepInput) -> "list[Sequence[Array]]":
        """Return the results of `HostExchange.combine` of each exchange.

        Args:
            subsets: the subsets of the tensors, each with its exchange.
            step_input: input of the step, for all tensors.
        """

    def flush(self, subsets: Sequence[Subset[HostExchange]]) -> "list[Sequence[Array | None] | None]":
        """Return the results of `Exchange.flush` of each exchange."""
        return [subset.exchange.flush() for subset in subsets]


class CommonStep(SplitStep):
    """Step that all ranks take together in both exchanges, or skip in both."""

    def combine(self, subsets: Sequence[Subset[HostExchange]], step_input: StepInput) -> "list[Sequence[Array]]":
        outgoing = [subset.exchange.prepare(step_input.subset(subset.where)) for subset in subsets]
        mine = all(one.is_fine for one in outgoing)
        if self._comm.any_true(not mine):
            # A rank that skips one of the exchanges skips the other, and all ranks with it. The first one reports.
            outgoing = [one.skipped(blamed=k == 0 and not mine) for k, one in enumerate(outgoing)]
        return [subset.exchange.deliver(one) for subset, one in zip(subsets, outgoing, strict=True)]


class SplitHostExchange(HostExchange):
    """Exchange on the host, made of one for whole weights and one for parts.

    Args:
        comm: all ranks.
        specs: all tensors.
        subsets: the subsets of the tensors, each with its exchange.
        step: the step of both; `CommonStep` by default.
    """

    def __init__(
        self,
        comm: Comm,
        specs: Sequence[TensorSpec],
        subsets: Sequence[Subset[HostExchange]],
        step: SplitStep | None = None,
    ):
        self._subsets, self._step = list(subsets), step or CommonStep(comm)
        super().__init__(specs, None)
        # Whole weights are exchanged by all ranks, so their link comes first.
        self.network = next((s.exchange.network for s in subsets if s.exchange.network is not None), None)

    @property
    def telemetry(self) -> Telemetry:  # type: ignore[override]
        """Counters of both exchanges together, without those of parts that no other rank holds."""
        costs = [subset.exchange.telemetry for subset in self._subsets]
        shared = [c for c, s in zip(costs, self._subsets, strict=True) if not _is_local(s)] or costs
        # Both exchanges see the same computing, and skip the same steps.
        first = costs[0] if len(shared) > 1 else shared[0]
        return replace(merged(shared), computing=first.computing, skipped=first.skipped, elements=self._n)

    def reset_telemetry(self) -> None:
        for subset in self._subsets:
            subset.exchange.reset_telemetry()

    def count_computing(self, seconds: float) -> None:
        for subset in self._subsets:
            subset.exchange.count_computing(seconds)

    def combine(self, step_input: StepInput) -> "Sequence[Array]":
        return self._in_order(self._step.combine(self._subsets, step_input))

    def _in_order(self, results: Iterable[Sequence[V]]) -> list[V]:
        """Return the results of the exchanges, one for each of their tensors, in the order of the specs."""
        placed: dict[int, V] = {}
        for subset, arrays in zip(self._subsets, results, strict=True):
            placed |= zip(subset.where, arrays, strict=True)
        return [placed[i] for i in range(len(self.specs))]

    @property
    def is_open(self) -> bool:
        return all(subset.exchange.is_open for subset in self._subsets)

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        for subset in self._subsets:
            subset.exchange.begin(subset.of(weights))

    def renew(self) -> None:
        for subset in self._subsets:
            subset.exchange.renew()

    @property
    def residuals(self) -> list[np.ndarray]:
        return self._in_order(subset.exchange.residuals for subset in self._subsets)

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        for subset in self._subsets:
            subset.exchange.add_to_residual(subset.of(tensors))

    def flush(self) -> "Sequence[Array | None] | None":
        """Return the final weights; None in the place of a tensor without one. Collective."""
        results = self._step.flush(self._subsets)
        if all(arrays is None for arrays in results):
            return None
        pairs = zip(results, self._subsets, strict=True)
        return self._in_order([None] * len(subset.where) if arrays is None else arrays for arrays, subset in pairs)

    def close(self) -> None:
        for subset in self._subsets:
            subset.exchange.close()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the states of both exchanges, with their number before each name."""
        states = [subset.exchange.state_dict() for subset in self._subsets]
        return {f"split{k}.{name}": array for k, state in enumerate(states) for name, array in state.items()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        for k, subset in enumerate(self._subsets):
            prefix = f"split{k}."
            mine = {n.removeprefix(prefix): a for n, a in state.items() if n.startswith(prefix)}
            subset.exchange.load_state_dict(mine)


def _is_local(subset: Subset[HostExchange]) -> bool:
    return isinstance(subset.exchange, _LocalExchange)


class _LocalExchange(HostExchange):
    """Exchange of parts that no other rank holds: it returns the tensors unchanged.

    Args:
        specs: the parts.
        takes_weights: whether the tensors are weights. A skipped step then returns the weights before it; otherwise it
            returns zeros.
    """

    def __init__(self, specs: Sequence[TensorSpec], takes_weights: bool):
        super().__init__(specs, Telemetry())
        self.elements, self._takes_weights = self._n, takes_weights
        # Weights after the last step, between `begin` and `close`.
        self._weights: list[np.ndarray] | None = None

    @property
    def is_open(self) -> bool:
        return not self._takes_weights or self._weights is not None

    def close(self) -> None:
        """Forget the weights."""
        self._weights = None

    def renew(self) -> None:
        self.close()

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        self._weights = [np.array(w) for w in weights]

    def combine(self, step_input: StepInput) -> "Sequence[Array]":
        self.telemetry.steps += 1
        self.telemetry.skipped += not step_input.finite
        if self._weights is None:
            zeros = [np.zeros(s.shape, np.float32) for s in self.specs]
            return list(step_input.tensors) if step_input.finite else zeros
        if step_input.finite:
            self._weights = [np.array(t) for t in step_input.tensors]
        return [w.copy() for w in self._weights]


class _LocalGraphExchange(Exchange[Tensor]):
    """Exchange in the graph of parts that no other rank holds: it returns the tensors unchanged."""

    def step(self, tensors: Sequence[Tensor], finite: bool = True) -> list[Tensor]:
        return list(tensors)

    def mean(self, tensors: Sequence[Tensor], weights: Weights) -> list[Tensor]:
        """Return the tensors, divided by this rank's weight."""
        return [t / weights[t.dtype] for t in tensors]

    def agree(self, since: int) -> int:
        """Return the steps since the last average."""
        return since
