"""The contract of a strategy: one way in which the workers combine their work."""

import abc
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from hvdx.comm import Comm
from hvdx.comm.base import Engine
from hvdx.errors import ConfigError, ReplicaError

#: Pairs (first step, period), in the order of the steps; the first begins at step 0.
Schedule = tuple[tuple[int, int], ...]
EACH_STEP: Schedule = ((0, 1),)


@dataclass(frozen=True)
class TensorSpec:
    """What a strategy is told of a tensor it will exchange.

    Attributes:
        name: the variable's name, for messages.
        shape: its shape.
        itemsize: bytes an element.
        constraint: what the optimiser's step holds the variable to, for messages; "" for nothing.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    constraint: str = ""

    @property
    def elements(self) -> int:
        """Number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product


class Strategy(abc.ABC):
    """One way in which the workers combine their work.

    A strategy knows ranks and bytes, and nothing of Keras. It opens an exchange for each optimiser; by its traits
    `hvdx.keras` picks the adapter that stands between that exchange and the optimiser's step. Traits may be attributes
    of the class, or depend on options.

    Attributes:
        placement: where in the step it acts. "gradient": gradients are combined, and every rank's optimiser takes the
            same step. "update": each rank's optimiser works on its own gradients, and the updates that it wants to add
            to the weights are combined. "weights": each rank's optimiser changes its weights, and an exchange takes
            those and gives the weights to go on with.
        runs: where its exchange runs. "graph": it is traced as a part of the TensorFlow graph, and works on tensors.
            "host": it works on arrays of the host, between two parts of the graph.
        engine: what carries the tensors of an exchange in the graph: "horovod"; "mpi", which does it on the host; or
            "auto", which is Horovod where it is installed on all ranks, else MPI.
        schedule: when it runs, as pairs (first step, period) in the order of the steps, of which the first begins at
            step 0. Only exchanges of weights in the graph may have another schedule than `EACH_STEP`.
        asynchronous: whether a rank exchanges when it is ready, without the others. The steps of an epoch then are
            dealt out to the ranks by `deal_out`.
        dedicated: number of ranks that only serve the others, by `serve`.
        counts_samples: whether the adapter has to be told of how many samples a step is made.
        provisional: whether it gives way to another strategy, which `successor` names, after some steps.
        remembers: whether what an exchange remembers is worth keeping from one fit to the next.
    """

    #: What `HVDX_STRATEGY` and `hvdx.strategy` call it.
    name: ClassVar[str]
    #: Options whose one-line spelling the strategy reads itself.
    own_spelling: ClassVar[frozenset[str]] = frozenset()

    placement: Literal["gradient", "update", "weights"]
    runs: Literal["graph", "host"]
    engine: Engine = "auto"
    schedule: Schedule = EACH_STEP
    asynchronous: bool = False
    dedicated: int = 0
    counts_samples: bool = False
    provisional: bool = False
    remembers: bool = True

    @property
    def rank_local_state(self) -> bool:
        """Whether the optimiser's state (momenta) belongs to its rank."""
        return self.placement != "gradient"

    @abc.abstractmethod
    def open(self, comm: Any, specs: Sequence[TensorSpec], momentum: float = 0.0, name: str = "") -> Any:
        """Begin to exchange the tensors of one optimiser. Collective on the host.

        Args:
            comm: reaches the other ranks: a `Comm` on the host, a `GraphComm` in the graph.
            specs: the tensors, in their order.
            momentum: how much of an update goes on into the next, from 0 to 1, where they are updates.
            name: pairs up what the ranks send in a graph: alike on all ranks, and different for each optimiser.

        Returns:
            An `Exchange`; on the host a `hvdx.strategies.HostExchange`.

        Raises:
            ReplicaError: the ranks were given different strategies.
        """

    def merge(self, saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
        """Make the state that a rank restores of those that another number of ranks saved; by default none.

        Args:
            saved: `Exchange.state_dict` of every rank that saved.
            rank, size: the rank that restores, and the number of ranks now.
        """
        return {}

    def check(self, comm: Comm) -> None:
        """Refuse ranks that do not fit the strategy; by default all do.

        Args:
            comm: the ranks that train.

        Raises:
            ConfigError: on all ranks.
        """
        return

    def serve(self, comm: Comm) -> None:
        """Serve the others until they have ended, on one of the `dedicated` ranks.

        Args:
            comm: the ranks that serve.
        """
        return

    def deal_out(self, comm: Comm, steps: int, begun: int = 0) -> "StepClient":
        """Have the steps of each epoch dealt out, where ranks are `asynchronous`. Collective.

        Args:
            comm: the ranks that train.
            steps: in an epoch, of all ranks together; each takes its first without asking.
            begun: steps of the first epoch that were taken before.
        """
        raise NotImplementedError(f"{type(self).__name__}: deal_out, which an asynchronous strategy has to have.")

    def ready(self, exchanges: Sequence[Any]) -> bool:
        """Return whether a `provisional` strategy has seen enough to choose its successor; alike on all ranks.

        Args:
            exchanges: of all optimisers that took a step.
        """
        return False

    def successor(self, exchanges: Sequence[Any], comm: Comm, updates: bool) -> "Strategy":
        """Choose the strategy that takes the place of a `provisional` one. Collective.

        Args:
            exchanges: of all optimisers that took a step.
            comm: the ranks.
            updates: whether the optimisers have updates to send; else only gradients can be combined.
        """
        return self

    def __repr__(self) -> str:
        """The call that makes this strategy, without what is at its default; options are attributes of their names."""
        given = [f"{k}={getattr(self, k)!r}" for k, v in self._defaults().items() if getattr(self, k) != v]
        return f"{type(self).__name__}({', '.join(given)})"

    def _defaults(self) -> dict[str, Any]:
        """The options, each with the value that `repr` leaves out."""
        return {k: p.default for k, p in inspect.signature(type(self)).parameters.items()}


class StepClient(Protocol):
    """The steps of an epoch, dealt out one by one.

    Attributes:
        steps: in an epoch, of all ranks together.
        taken: steps of this epoch that ranks have taken or begun, when this one asked last.
        over: whether this rank heard that no more are dealt out.
        stopped: whether that is because a rank wanted it so.
    """

    steps: int
    taken: int
    over: bool
    stopped: bool

    def begin(self) -> None:
        """Begin an epoch, on all ranks."""

    def another(self, stop: bool = False) -> bool:
        """Return whether this rank is to take another step.

        Args:
            stop: have nobody take another.
        """


class Exchange(abc.ABC):
    """One optimiser's exchange, with all that it remembers from step to step.

    Attributes:
        sent: bytes that this rank sends in each exchange; of one that runs in the graph, where it cannot count them.
    """

    sent: int = 0

    @abc.abstractmethod
    def step(self, tensors: Sequence[Any], finite: Any = True) -> list[Any]:
        """Combine this rank's tensors with those of the others. Collective, unless the strategy is asynchronous.

        Args:
            tensors: in the order of the specs. On the host contiguous arrays, float32 (of weights also float64); in the
                graph `tf.Tensor`, or of gradients `tf.IndexedSlices`.
            finite: False where this rank's gradients held NaN or infinity: all ranks then skip the step together, or
                this one alone where it is not collective. Exchanges of weights in the graph take in its place how much
                this rank counts: a scalar for each dtype of the tensors.

        Returns:
            What the optimiser is to use in their place; the same bits on every rank where it is collective. On the host
            arrays of the shapes of the specs, which the next step may overwrite.

        Raises:
            WireError, ExchangeError: what came is damaged, or did not come.
        """

    def flush(self) -> list[np.ndarray] | None:
        """What is still on its way, like the result of a step; None if nothing is. Collective."""
        return None

    def close(self) -> None:
        """Give back what others hold for it; nobody takes another step. Every rank calls it."""
        return

    def state_dict(self) -> dict[str, np.ndarray]:
        """What it remembers, as named arrays for a checkpoint; after `flush`, or `HostExchange.drain`."""
        return {}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from what `state` gave.

        Raises:
            ConfigError: it is of other tensors, or of other options.
        """
        if state:
            raise ConfigError(f"{type(self).__name__}: expected no saved state, got {sorted(state)}.")


def one_of(where: str, option: str, value: Any, known: Sequence[Any]) -> None:
    """Refuse a value that an option does not have.

    Args:
        where: whose option it is, for the message.
        option: its name.
        value: what was given.
        known: what there is.

    Raises:
        ConfigError: the value is none of them.
    """
    if value not in known:
        listed = ", ".join(repr(k) for k in known)
        raise ConfigError(f"{where}: {option}: expected one of {listed}, got {value!r}.")


def views(flat: np.ndarray, specs: Sequence[TensorSpec]) -> list[np.ndarray]:
    """A flat array as the tensors that stand in it one after another.

    Args:
        flat: as many elements as the tensors have together.
        specs: the tensors, in their order.
    """
    ends = np.cumsum([s.elements for s in specs]).tolist()
    return [flat[end - s.elements : end].reshape(s.shape) for end, s in zip(ends, specs, strict=True)]


def ring_bytes(payload: float, size: int) -> int:
    """Bytes that one rank sends in a ring all-reduce: 2 (N - 1) / N times the payload.

    Args:
        payload: bytes of the tensors.
        size: number of ranks.
    """
    return round(payload * 2 * (size - 1) / size)


def agree_on_strategy(strategy: Strategy, comm: Comm) -> None:
    """Stop unless all ranks were given the same strategy. Collective.

    Args:
        strategy: this rank's.
        comm: reaches the other ranks.

    Raises:
        ReplicaError: on every rank, if they differ.
    """
    everyone = comm.all_gather_object(repr(strategy), "the strategy")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ReplicaError(
                f"the ranks were given different strategies: {everyone[0]} on rank 0, {theirs} on rank {rank}. Give "
                "every rank the same; HVDX_STRATEGY has to reach all hosts (mpirun -x HVDX_STRATEGY)."
            )


def agree_on_tensors(specs: Sequence[TensorSpec], comm: Comm) -> None:
    """Stop unless all ranks exchange the same tensors; their names may differ. Collective.

    Args:
        specs: this rank's.
        comm: reaches the other ranks.

    Raises:
        ReplicaError: on every rank, if they differ.
    """
    everyone = comm.all_gather_object([(s.name, s.shape, s.itemsize) for s in specs], "the variables")
    for rank, theirs in enumerate(everyone):
        if [rest for _, *rest in theirs] != [rest for _, *rest in everyone[0]]:
            raise ReplicaError(
                f"the ranks exchange different variables: {everyone[0]} on rank 0, {theirs} on rank {rank}. "
                "Every rank must train the same ones."
            )
