"""The contract of a strategy: one way in which the workers combine their work."""

import abc
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from hvdx.comm import Comm, GraphComm
from hvdx.errors import ConfigError, ReplicaError
from hvdx.strategies.telemetry import Telemetry


@dataclass(frozen=True)
class TensorSpec:
    """What a strategy is told of a tensor it will exchange.

    Attributes:
        name: the variable's name, for messages.
        shape: its shape.
        itemsize: bytes an element.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product


class Strategy(abc.ABC):
    """One way in which the workers combine their work.

    A strategy knows ranks and bytes, and nothing of Keras. It is a `GraphStrategy`, whose exchange is part of the
    TensorFlow graph, or a `HostStrategy`, whose exchange works on arrays of the host between two parts of the graph, or
    `ParameterAveraging`, which lets steps alone and exchanges weights.
    """

    #: What `HVDX_STRATEGY` and `hvdx.strategy` call it.
    name: ClassVar[str]
    #: Options whose one-line spelling the strategy reads itself.
    own_spelling: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def bytes_per_step(self, specs: Sequence[TensorSpec], size: int) -> int:
        """Bytes that one rank sends in a step, as far as that is known beforehand.

        Args:
            specs: the variables that are exchanged.
            size: number of ranks.
        """

    def __repr__(self) -> str:
        """The call that makes this strategy, without what is at its default; options are attributes of their names."""
        given = [f"{k}={getattr(self, k)!r}" for k, v in self._defaults().items() if getattr(self, k) != v]
        return f"{type(self).__name__}({', '.join(given)})"

    def _defaults(self) -> dict[str, Any]:
        """The options, each with the value that `repr` leaves out."""
        return {k: p.default for k, p in inspect.signature(type(self)).parameters.items()}


class GraphStrategy(Strategy):
    """Combines gradients inside the graph: the adapter in `hvdx.keras` calls `exchange` while it is traced."""

    @abc.abstractmethod
    def exchange(self, comm: GraphComm, tensors: Sequence[Any], name: str) -> list[Any]:
        """Combine this rank's gradients with those of the others.

        Args:
            comm: reaches the other ranks.
            tensors: one `tf.Tensor` or `tf.IndexedSlices` a variable, in the order of the variables.
            name: alike on all ranks, and different for each optimiser.

        Returns:
            What the optimiser is to apply, in the same order; the same bits on every rank.
        """


class HostStrategy(Strategy):
    """Combines arrays on the host, step by step, and remembers something from one step to the next.

    Attributes:
        placement: "gradient": what is combined are gradients, and every rank's optimiser takes the same step.
            "update": each rank's optimiser works on its own gradients, and what is combined are the updates that
            it wants to add to the weights; its state (momentum) belongs to its rank. "weights": each rank's optimiser
            changes its weights, and an exchange takes those, and gives the ones to go on with.
    """

    placement: Literal["update", "gradient", "weights"]
    #: Whether what an exchange remembers is worth keeping from one fit to the next.
    remembers: ClassVar[bool] = True

    @abc.abstractmethod
    def open(self, comm: Comm, specs: Sequence[TensorSpec], momentum: float = 0.0) -> "Exchange":
        """Begin to exchange the tensors of one optimiser. Collective.

        Args:
            comm: reaches the other ranks.
            specs: the tensors, in their order.
            momentum: how much of an update goes on into the next, from 0 to 1, where they are updates.

        Raises:
            ReplicaError: the ranks were given different strategies.
        """

    @abc.abstractmethod
    def merge(self, saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
        """What a rank restores of what other ranks saved, where their number was another.

        Args:
            saved: `Exchange.arrays` of every rank that saved.
            rank, size: the rank that restores, and the number of ranks now.
        """


class Exchange(abc.ABC):
    """One optimiser's exchange under a `HostStrategy`, with all that it remembers from step to step.

    Attributes:
        telemetry: what it cost so far.
        blamed: for a step that is not finite, the variable whose gradient held NaN or infinity; "" if it is not known.
    """

    telemetry: Telemetry
    blamed: str = ""

    @abc.abstractmethod
    def step(self, tensors: Sequence[np.ndarray], finite: bool = True) -> list[np.ndarray]:
        """Combine this rank's tensors with those of the others. Collective, unless the placement is "weights".

        Args:
            tensors: float32 arrays, contiguous, of the sizes of the specs.
            finite: False where this rank's gradients held NaN or infinity: all ranks then skip the step together, or
                this one alone where it is not collective.

        Returns:
            float32 arrays of the shapes of the specs, the same bits on every rank where it is collective; the next step
            overwrites them.

        Raises:
            WireError, ExchangeError: what came is damaged, or did not come.
        """

    @abc.abstractmethod
    def resume(self) -> None:
        """Steps come next, after something else, which was not computing."""

    @property
    @abc.abstractmethod
    def unsent(self) -> list[np.ndarray]:
        """What this rank has not sent of its tensors: float32 arrays of the shapes of the specs, not to be changed."""

    @abc.abstractmethod
    def owe(self, tensors: Sequence[np.ndarray]) -> None:
        """Have more to send.

        Args:
            tensors: float32 arrays of the shapes of the specs, which are added to what is unsent.
        """

    @abc.abstractmethod
    def flush(self) -> list[np.ndarray] | None:
        """What is still on its way, like the result of a step; None if nothing is. Collective."""

    def hold(self) -> None:
        """Wait for what is on its way, and keep it for the next step, which will not know the difference. Collective.

        Unlike after `flush`, the training goes on as if nobody had asked.
        """
        return

    def close(self) -> None:
        """Give back what others hold for it; nobody takes another step. Every rank calls it."""
        return

    @abc.abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """What it remembers, as named arrays for a checkpoint; after `flush`, or `hold`."""

    @abc.abstractmethod
    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from what `arrays` gave.

        Raises:
            ConfigError: it is of other tensors, or of other options.
        """


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
