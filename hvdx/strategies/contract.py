"""The contract of a strategy."""

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np

from hvdx.comm.buckets import GivenSums
from hvdx.comm.interfaces import Comm, DType, Engine, Tensor
from hvdx.errors import ConfigError, ReplicaError

if TYPE_CHECKING:
    from hvdx.codec.base import Array
    from hvdx.costs.model import Situation
    from hvdx.costs.types import Prediction

#: Pairs (first step, period), in increasing order of the steps; the first pair begins at step 0.
Schedule = tuple[tuple[int, int], ...]
EACH_STEP: Schedule = ((0, 1),)
SecondMoments = Literal["mean", "own"]
#: Factor of a rank in a mean of weights, by dtype of the weights.
Weights = Mapping[DType, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and element size of a tensor that is exchanged.

    Attributes:
        name: name of the variable, for error messages.
        shape: shape of the tensor.
        itemsize: bytes per element.
        device: device that holds the variable: "CPU", or "GPU:0", "GPU:1" ..., as CUDA counts them.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    device: str = "CPU"

    @property
    def elements(self) -> int:
        """Number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product


class Strategy(abc.ABC):
    """Method by which the workers combine their work.

    A strategy handles ranks and bytes, and is independent of Keras. It opens an `Exchange` for each optimiser. Its
    traits tell `hvdx.keras` which adapter connects that exchange to the optimiser's step. A trait is a class attribute,
    or an instance attribute that depends on the options.

    Attributes:
        placement: position in the step. "gradient": gradients are combined, and every rank's optimiser takes the same
            step. "update": each rank's optimiser processes its own gradients, and the resulting updates of the weights
            are combined. "weights": each rank's optimiser changes its own weights; the exchange takes these weights and
            returns the weights for the next step.
        runs: "graph": the exchange is traced as part of the TensorFlow graph, and processes tensors. "host": it
            processes host arrays, between two parts of the graph.
        engine: library that carries the tensors of an exchange in the graph: "horovod"; "mpi", on the host; or "auto",
            which is Horovod if it sends the tensors of GPUs by NCCL on all ranks, else MPI.
        schedule: steps at which the exchange runs, as pairs (first step, period) in increasing order of the steps; the
            first pair begins at step 0. Only exchanges of weights in the graph may differ from `EACH_STEP`.
        asynchronous: whether a rank exchanges without waiting for the others. `step_client` then returns the client
            that requests each step of an epoch.
        dedicated: number of ranks that only serve the others, by `serve`.
        counts_samples: whether the adapter needs the number of samples in each step.
        weighs: whether the ranks are combined in a mean, in which a rank weighs as many samples as it has.
        may_wait: whether a rank may have weights of its own between two exchanges: it takes as many steps alone as
            `HostExchange.period` says, and sees its `HostExchange.unsent`. Only on the host, under the placement
            "update".
        provisional: whether `successor` replaces the strategy after some steps.
        persists_between_fits: whether the state of an exchange is kept from one fit to the next.
        survives: whether the ranks can go on without one that dies; see `Comm.complete`.
        second_moments: under the placement "update", for optimisers such as Adam. "own": updates are used as they are.
            "mean": the exchange corrects them, and needs a sample of the gradients (`StepInput.sample`).
        split_exchange: for strategies on the host, function that presents the exchanges of whole weights and of parts
            of split layers as one, called like `SplitHostExchange`; None for that class. An asynchronous strategy needs
            its own: in it, the ranks of a group (`comm.mesh.group`) take or skip each step together.
    """

    #: Name of the strategy in `HVDX_STRATEGY` and in one-line spellings.
    name: ClassVar[str]
    #: Options whose text in a one-line spelling the strategy parses itself.
    own_spelling: ClassVar[frozenset[str]] = frozenset()

    placement: Literal["gradient", "update", "weights"]
    runs: Literal["graph", "host"]
    engine: Engine = "auto"
    schedule: Schedule = EACH_STEP
    asynchronous: bool = False
    dedicated: int = 0
    counts_samples: bool = False
    weighs: bool = True
    may_wait: bool = False
    provisional: bool = False
    persists_between_fits: bool = True
    survives: bool = False
    second_moments: SecondMoments = "own"
    split_exchange: ClassVar[Callable[..., "Exchange[Array]"] | None] = None

    @property
    def rank_local_state(self) -> bool:
        """True if the optimiser's state (momenta) is local to the rank."""
        return self.placement != "gradient"

    @abc.abstractmethod
    def open(self, comm: Comm, specs: Sequence[TensorSpec], name: str = "") -> "Exchange[Tensor] | Exchange[Array]":
        """Open the exchange for the tensors of one optimiser. Collective on the host.

        Args:
            comm: communicator of the ranks: a `Comm` on the host, a `GraphComm` in the graph.
            specs: the tensors, in their order.
            name: prefix of the names of graph collectives: the same on all ranks, different for each optimiser.

        Returns:
            An `Exchange`; on the host a `hvdx.strategies.HostExchange`.

        Raises:
            ReplicaError: if the ranks were given different strategies.
        """

    def device_for(self, specs: Sequence[TensorSpec]) -> str:
        """Return where an exchange of these tensors runs: "cpu", which is the default, "cuda", or "cuda:NUMBER".

        On a GPU the steps of the exchange take and return the tensors as one float32 array on the GPU, in a list of
        one. See `StepInput.allocate`.

        Args:
            specs: the tensors.

        Raises:
            ConfigError: if the strategy was told to run on a GPU and cannot.
        """
        return "cpu"

    def in_each_step(self, why: str) -> "Strategy":
        """Return this strategy with an exchange in each step.

        Args:
            why: what needs it, for the error.

        Raises:
            ConfigError: on all ranks, if the strategy was told to wait for a fixed number of steps.
        """
        return self

    def on_one_thread(self, why: str) -> "Strategy":
        """Return this strategy with one thread for its work on the host.

        Args:
            why: what needs it, for the error.

        Raises:
            ConfigError: if the strategy was told to use another number.
        """
        return self

    def problem_with_split(self) -> str:
        """Return why the options do not fit a model with split layers, and the remedy; "" if they do."""
        return ""

    def with_overhead(self, share: float) -> "Strategy":
        """Return this strategy with a share of its overhead, because an optimiser has several exchanges.

        Args:
            share: above 0, at most 1.
        """
        return self

    def merge(self, saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
        """Return the state that a rank restores, made from the states of another number of ranks. The default is empty.

        Args:
            saved: results of `Exchange.state_dict`, one for each rank that saved.
            rank: rank that restores.
            size: number of ranks that restore.
        """
        return {}

    def check(self, comm: Comm) -> None:
        """Refuse ranks that the strategy cannot run on. The default accepts all.

        Args:
            comm: the ranks that train.

        Raises:
            ConfigError: on all ranks, if they do not fit the strategy.
        """
        return

    def serve(self, comm: Comm) -> None:
        """Serve the workers until all have disconnected. Runs on each of the `dedicated` ranks.

        Args:
            comm: the ranks that serve.
        """
        return

    def step_client(self, comm: Comm, steps: int, begun: int = 0) -> "StepClient":
        """Return this rank's client for the steps of each epoch, for `asynchronous` strategies. Collective.

        Args:
            comm: the ranks that train.
            steps: steps in an epoch, of all ranks together; each rank takes its first step without a request.
            begun: steps of the first epoch that were taken before this fit.
        """
        raise NotImplementedError(f"{type(self).__name__}: an asynchronous strategy must implement step_client.")

    def ready(self, exchanges: "Sequence[Exchange[Array]]") -> bool:
        """Return whether a `provisional` strategy can choose its successor; the same on all ranks.

        Args:
            exchanges: exchanges of all optimisers that took a step.
        """
        return False

    def successor(self, exchanges: "Sequence[Exchange[Array]]", comm: Comm, updates: bool) -> "Strategy":
        """Choose the strategy that replaces a `provisional` one. Collective.

        Args:
            exchanges: exchanges of all optimisers that took a step.
            comm: the ranks.
            updates: whether the optimisers compute updates; if not, only gradients can be combined.
        """
        return self

    def predict(self, situation: "Situation") -> "Prediction | None":
        """Return the costs of a step, predicted without training; None if the strategy cannot predict them.

        Args:
            situation: model, computing time, link, machine and number of workers.
        """
        return None

    def __repr__(self) -> str:
        """Return the call that makes this strategy, without default values. Each option is an attribute of its name."""
        options = [f"{k}={getattr(self, k)!r}" for k, v in self._defaults().items() if getattr(self, k) != v]
        return f"{type(self).__name__}({', '.join(options)})"

    def _defaults(self) -> dict[str, object]:
        """Return the options, each with the value that `repr` omits."""
        return {k: p.default for k, p in inspect.signature(type(self)).parameters.items()}


class StepClient(Protocol):
    """Client that requests the steps of an epoch, one at a time.

    Attributes:
        steps: steps in an epoch, of all ranks together.
        taken: steps of this epoch that ranks had taken or begun at this rank's last request.
        over: whether this rank's last request was refused, so that the epoch is over for it.
        stopped: whether a rank ended the epoch early.
    """

    steps: int
    taken: int
    over: bool
    stopped: bool

    def begin(self) -> None:
        """Begin an epoch, on all ranks."""

    def request_step(self, stop: bool = False) -> bool:
        """Request another step; return whether this rank may take it.

        Args:
            stop: end the epoch for all ranks.
        """


class Exchange(abc.ABC, Generic[T]):
    """Exchange of one optimiser, with its state from step to step; T is the type of its tensors.

    Attributes:
        sent: bytes that this rank sends in each exchange, for exchanges in the graph, which cannot count them; without
            rows, whose number the graph computes.
        row_itemsize: bytes of an element of rows that travel in place of a whole tensor; None for those of its dtype, 0
            if no rows travel.
    """

    sent: int = 0
    row_itemsize: int | None = 0

    @abc.abstractmethod
    def step(self, tensors: Sequence[T], finite: bool = True) -> Sequence[T]:
        """Combine this rank's tensors with those of the others. Collective, unless the strategy is asynchronous.

        Args:
            tensors: tensors in the order of the specs. On the host: contiguous arrays, float32 (weights also float64).
                In the graph: `tf.Tensor`, or for gradients also `tf.IndexedSlices`.
            finite: False if this rank's gradients held NaN or infinity. All ranks then skip the step; if the exchange
                is not collective, only this rank skips it.

        Returns:
            The tensors that the optimiser uses instead; for collective exchanges the same bits on every rank. On the
            host, arrays of the shapes of the specs, which the next step may overwrite.

        Raises:
            WireError: if a received message is damaged.
            ExchangeError: if a message did not arrive within the time limit.
        """

    def given_sums(self) -> GivenSums | None:
        """Return what takes each array of a step when it has been computed, in place of `step`; None without that."""
        return None

    def flush(self) -> Sequence[T | None] | None:
        """End a session of weights and return them, in the form that `step` returns; None for others. Collective."""
        return None

    def close(self) -> None:
        """Release resources that other ranks hold for this exchange, after the last step. Every rank calls it."""
        return

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the state as named arrays for a checkpoint. Call it after `flush`."""
        return {}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a saved state. The default accepts only an empty one.

        Args:
            state: result of `state_dict` or `Strategy.merge`.

        Raises:
            ConfigError: if the state does not fit the tensors or the options of this exchange.
        """
        if state:
            raise ConfigError(f"{type(self).__name__}: expected no saved state, got {sorted(state)}.")


def one_of(where: str, option: str, value: object, known: Sequence[object]) -> None:
    """Refuse an option's value that the option does not accept.

    Args:
        where: owner of the option, for the message.
        option: name of the option.
        value: value that was given.
        known: values that the option accepts.

    Raises:
        ConfigError: if the value is not accepted.
    """
    if value not in known:
        listed = ", ".join(repr(k) for k in known)
        raise ConfigError(f"{where}: {option}: expected one of {listed}, got {value!r}.")


def views(flat: np.ndarray, specs: Sequence[TensorSpec]) -> list[np.ndarray]:
    """Return views of a flat array, one for each tensor, in order.

    Args:
        flat: array whose size is the number of elements of all tensors together.
        specs: the tensors, in their order.
    """
    ends = np.cumsum([s.elements for s in specs]).tolist()
    return [flat[end - s.elements : end].reshape(s.shape) for end, s in zip(ends, specs, strict=True)]


def refuse_unless_it_survives(strategy: Strategy, comm: Comm) -> None:
    """Refuse a strategy that cannot go on without a rank, if the ranks are to do so.

    Args:
        strategy: strategy of a fit.
        comm: the ranks.

    Raises:
        ConfigError: on all ranks, if it cannot.
    """
    if comm.survives and not strategy.survives:
        raise ConfigError.on_all_ranks(
            f"HVDX_SURVIVE=1: expected a strategy whose ranks can go on without one that dies, got {strategy!r}. Do: "
            "auto, all_reduce, parameter_averaging, threshold with exchange='auto' and local='auto', parameter_server, "
            "or hvdx run --max-restarts N in place of --survive."
        )


def refuse_several(several: bool, name: str) -> None:
    """Refuse several exchanges at once whose ranks meet after a death: they could be in different ones.

    Args:
        several: whether there are others; the same on all ranks.
        name: spelling of the strategy.

    Raises:
        ConfigError: on all ranks, if there are.
    """
    if several:
        raise ConfigError.on_all_ranks(
            f"HVDX_SURVIVE=1: {name}: expected one optimiser with one list of variables, got several. Do: hvdx run "
            "--max-restarts N in place of --survive."
        )


def agree_on_strategy(strategy: Strategy, comm: Comm) -> None:
    """Raise an error unless all ranks were given the same strategy. Collective.

    Args:
        strategy: strategy of this rank.
        comm: the ranks.

    Raises:
        ReplicaError: on every rank, if they differ.
    """
    everyone = comm.all_gather_object(repr(strategy), "the strategy")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ReplicaError(
                f"the ranks were given different strategies: {everyone[0]} on rank 0, {theirs} on rank {rank}. Give "
                "every rank the same; HVDX_STRATEGY must reach all hosts (mpirun -x HVDX_STRATEGY)."
            )


def agree_on_steps(since: int, event: str, comm: Comm) -> int:
    """Return the number of steps since an event, if all ranks have taken the same number. Collective.

    Args:
        since: steps of this rank.
        event: the event, for the error.
        comm: the ranks.

    Raises:
        ReplicaError: on every rank, if they differ.
    """
    everyone = comm.all_gather_object(since, f"the steps since {event}")
    if len(set(everyone)) > 1:
        raise ReplicaError(
            f"the ranks have taken {everyone} steps since {event}. Every rank must call its optimizer the same number "
            "of times: call it with zeros if there are no gradients."
        )
    return since


def agree_on_tensors(specs: Sequence[TensorSpec], comm: Comm) -> None:
    """Raise an error unless all ranks exchange the same tensors; their names may differ. Collective.

    Args:
        specs: tensors of this rank.
        comm: the ranks.

    Raises:
        ReplicaError: on every rank, if they differ.
    """
    everyone = comm.all_gather_object([(s.name, s.shape, s.itemsize) for s in specs], "the variables")
    for rank, theirs in enumerate(everyone):
        if [rest for _, *rest in theirs] != [rest for _, *rest in everyone[0]]:
            raise ReplicaError(
                f"the ranks exchange different variables: {everyone[0]} on rank 0, {theirs} on rank {rank}. "
                "Every rank must train the same variables."
            )
