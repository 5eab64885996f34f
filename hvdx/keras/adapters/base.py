"""The contract of an adapter, which connects one optimiser to a strategy inside the training function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from hvdx import comm as world
from hvdx.comm.interfaces import Comm
from hvdx.comm.mesh import mesh_of
from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.adapters import rows
from hvdx.keras.backend import is_a, tf
from hvdx.keras.seams.frames import loss_scale_calls
from hvdx.keras.seams.graphs import traces_for_xla
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import dtype_of
from hvdx.keras.weight_parts import part_of
from hvdx.strategies import Exchange, HostExchange, Strategy, TensorSpec
from hvdx.strategies.split import open_split
from hvdx.strategies.telemetry import Telemetry

#: Rows of a full batch where nobody knows them: a unit, which keeps weighed gradients near their own size.
ROWS = 64.0


class Call(NamedTuple):
    """Call of an optimiser in a traced step.

    Attributes:
        indices: for each gradient the dtype of its indices, or None if it is dense.
    """

    adapter: Adapter
    variables: list[Variable]
    indices: list[tf.DType | None]


class Adapter:
    """Adapter between one optimiser and a strategy.

    Attributes:
        strategy: strategy that combines the gradients, updates or weights.
        comm: communicator of the ranks that take part.
        name: name of the exchange; the same on all ranks, different for each optimiser of a model.
        gain: factor on the gradients that the optimiser applies.
        variables: variables that the optimiser trains; empty before the first step is traced.
        specs: `TensorSpec` of each variable.
        stepped: True once a training step has gone through the optimiser, or has been traced through it.
        exchange: for a strategy on the host, the exchange that was used or opened last; None if none is open, and for
            strategies in the graph.
        local: `LocalVariables`, whose gradients stay on their rank; None if the adapter does not support them.
        owner: part of a fit that attached the adapter and will detach it; None if a script did.
        holds_loss_scale: True if the attached optimiser is a loss-scale optimiser, whose skipped steps the adapter
            handles.
        steps: int64 variable, number of steps that reached the optimiser, including skipped and accumulated ones.
        rows: float64 scalar, rows of this rank's next step; None if all ranks have as many, or count alike.
        full: rows of a full batch, the same on all ranks; a unit for `rows`.
        record: function that is told each call of the optimiser; None if nobody records them.
        unflushed: number of them since the last call of `settle`.
    """

    strategy: Strategy
    comm: Comm
    #: True if the logs report `cost` beside the metrics.
    logs_cost = False
    #: True if `before_step` and `after_step` enclose the whole of the optimiser's `apply`.
    wraps_apply = False
    #: True if a later fit can attach the adapter again, with the graph that was traced with it.
    reusable_across_fits = False
    exchange: HostExchange | None = None
    local: Any = None  # `LocalVariables`, whose module imports this one

    def __init__(self, name: str, gain: float = 1.0):
        self.name = name
        self.gain = gain
        self.variables: list[Variable] = []
        self.specs: list[TensorSpec] = []
        self.stepped = False
        self.owner: keras.callbacks.Callback | None = None
        self.holds_loss_scale = False
        self.rows: tf.Tensor | None = None
        self.full = ROWS
        self.record: Callable[[Call], None] | None = None
        self._accumulates = False
        self._settled = 0
        self.steps = self._counter()

    def _counter(self) -> tf.Variable:
        with tf.device("CPU:0"):
            return tf.Variable(0, dtype=tf.int64, trainable=False)

    def open_exchange(self, variables: Sequence[Variable], specs: Sequence[TensorSpec]) -> Exchange[Any]:
        """Open the exchange of variables with the ranks that hold the same ones. Collective on the host.

        Args:
            variables: Keras variables; parts of split layers are exchanged with the ranks that hold the same parts.
            specs: `TensorSpec` of the tensor that is sent for each variable.

        Raises:
            ConfigError, ReplicaError: see `Strategy.open` and `open_split`.
        """
        is_part = [part_of(v) is not None for v in variables]
        if not any(is_part):
            return self.strategy.open(self.comm, specs, name=self.name)
        if self.comm.size != world.start().size:
            raise ConfigError(
                f"{self.name}: process_set: expected all ranks for a model with split layers, got some of them. Leave "
                "process_set out."
            )
        if self.strategy.runs == "graph":
            peers: Comm = world.graph_of_peers(self.strategy.placement == "weights", self.strategy.engine)
        else:
            peers = mesh_of(world.start()).peers
        return open_split(self.strategy, self.comm, peers, specs, is_part, self.name)

    def belong_to(self, owner: keras.callbacks.Callback) -> None:
        """Record the part of a fit that attached the adapter, and will detach it."""
        self.owner = owner

    def agree_on_overflow(self) -> None:
        """Handle the steps that a loss-scale optimiser skips."""
        self.holds_loss_scale = True

    def reset(self) -> None:
        """Reset the counters to zero."""
        self.steps.assign(0)
        self._settled = 0

    def count_step(self) -> None:
        """Count a step that has reached the optimiser."""
        self.stepped = True
        with tf.device("CPU:0"):
            self.steps.assign_add(1)

    def record_variables(self, variables: Sequence[Variable]) -> None:
        """Record the variables of the step that begins; `gradients` then receives their gradients."""
        self.stepped = True
        self.variables = list(variables)
        self.specs = [describe(v) for v in variables]

    def begin_step(self, record: Callable[[Call], None] | None = None, full: float = ROWS) -> None:
        """Begin a step without rows of its own; for `record` and `full` see the attributes."""
        self.rows, self.record, self.full = None, record, full

    def begin_call(
        self, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> list[Gradient]:
        """Begin a call of the optimiser, and return the gradients that it accumulates or applies.

        Args:
            optimizer: optimiser that is called, not a loss-scale optimiser.
        """
        self.record_variables(variables)
        if self.record is not None:
            self.record(Call(self, list(variables), [_index_dtype(g) for g in gradients]))
        self._accumulates = (optimizer.gradient_accumulation_steps or 1) > 1
        if self._accumulates and self.weighs and not self.strategy.rank_local_state:
            # The gradients of several micro-steps are exchanged as one, which cannot be weighed any more.
            weight = rows.share(self.comm, self.rows, self.name)
            return [scaled(g, weight) for g in gradients]
        return list(gradients)

    @property
    def weighs(self) -> bool:
        """True if this rank weighs as many rows as its step has."""
        return self.rows is not None and self.strategy.weighs

    def idle(self, optimizer: keras.optimizers.Optimizer, gradients: list[Gradient], variables: list[Variable]) -> None:
        """Take part in a step of the other ranks for which this rank has no batch, with weight 0.

        Args:
            gradients: zeros of the kinds that this rank's steps have.
        """
        optimizer.apply(gradients, variables)

    def gradients(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return the gradients that the optimiser clips and applies.

        Args:
            gradients: `tf.Tensor` or `tf.IndexedSlices`, one for each variable; no element is None.
        """
        raise NotImplementedError

    def apply(
        self, optimizer: keras.optimizers.Optimizer, step: Callable[[], object], variables: Sequence[Variable]
    ) -> None:
        """Change the weights; by default, take the optimiser's own update step.

        Args:
            optimizer: optimiser that changes the weights, not a loss-scale optimiser.
            step: function that takes the optimiser's own update step.
        """
        step()

    def before_step(self) -> None:
        """Prepare a call of the optimiser, if `wraps_apply`."""

    def after_step(self) -> None:
        """Finish a call of the optimiser, if `wraps_apply`."""

    def count_samples(self, count: int | tf.Tensor) -> None:
        """Count the samples of this rank's next step, by which its gradient or update weighs."""
        with tf.device("CPU:0"):
            self.rows = tf.cast(count, tf.float64)

    def any_overflow(self, overflowed: tf.Tensor) -> tf.Tensor:
        """Agree on a step whose gradients overflow under a loss scale.

        Args:
            overflowed: float32, 1 if gradients overflowed on this rank, else 0.

        Returns:
            float32, above 0 if this rank is to skip the step: the same on all ranks, unless they are asynchronous.
        """
        raise NotImplementedError

    def restart_timer(self) -> None:
        """Restart the compute timer before a run of steps."""

    def begin_epoch(self) -> None:
        """Prepare for the steps of an epoch, after all callbacks have begun it."""

    def renew(self) -> None:
        """Prepare for new weights, for example after an exception; residuals are kept.

        The training function must be traced again before the next step.
        """

    def flush(self) -> None:
        """Apply every update in flight, so that the weights can be read. Collective."""

    def settle(self) -> None:
        """Flush, and record that the weights of this step can be read. Collective."""
        self.flush()
        self._settled = int(self.steps.numpy())

    @property
    def unflushed(self) -> int:
        return int(self.steps.numpy()) - self._settled

    def prepare_broadcast(self) -> None:
        """Prepare for a broadcast of rank 0's weights; by default, flush. Collective."""
        self.flush()

    def first_bad(self) -> tuple[int, str]:
        """Find the first step since the last call that applied a gradient with NaN or infinity on this rank.

        Returns:
            Number of the step, from 1, and name of the variable; (0, "") if there was none.
        """
        return 0, ""

    def cost(self) -> Telemetry:
        """Return the cost of the exchanges since `reset`."""
        raise NotImplementedError

    def seconds_away(self) -> float:
        """Return the seconds since `reset` in which this rank waited for others, or sent and received."""
        cost = self.cost()
        return cost.waiting + cost.exchanging

    @property
    def telemetries(self) -> list[Telemetry] | None:
        """Counters that the open exchanges update; None for an adapter whose counters are in the graph, see `cost`."""
        return None

    # -- rank-local state, which fits and checkpoints keep ------------------------------------------------------------

    def rank_local_variables(self, now: bool = True) -> list[Variable]:
        """Return the weights and optimiser variables that belong to this rank alone.

        Args:
            now: True for the variables that are rank-local at this moment; False for those that may become so.
        """
        return []

    @property
    def has_state(self) -> bool:
        """True if the optimiser has rank-local state from an earlier fit or a checkpoint."""
        return False

    def before_saving(self) -> None:
        """Prepare for a checkpoint; by default, flush. Collective."""
        self.flush()

    def drain(self) -> None:
        """Prepare for a checkpoint in mid-epoch, without a change to the later steps if possible. Collective."""

    def go_on(self) -> None:
        """Continue the training after `drain`."""

    @property
    def state_key(self) -> str:
        """Kind of the state; an adapter can resume only from a state with the same key."""
        return self.strategy.name

    @property
    def exchanged(self) -> list[Variable]:
        """Weights to which the state in `state_dict` belongs."""
        return []

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the adapter's state for a checkpoint, after `before_saving` or `drain`."""
        return {}

    def merge(self, saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
        """Return the state of one rank, made from that of another number of ranks; see `Strategy.merge`."""
        return self.strategy.merge(saved, rank, size)

    def reopen(self, variables: Sequence[Variable]) -> None:
        """Replace open exchanges by a new one, before a checkpoint is loaded. Collective.

        Args:
            variables: weights that `exchanged` listed when the checkpoint was saved.
        """

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Resume from a checkpoint, after `reopen`.

        Args:
            state: result of `state_dict` or `merge`.
        """


def _index_dtype(gradient: Gradient) -> tf.DType | None:
    return gradient.indices.dtype if is_a(gradient, "IndexedSlices") else None


def describe(variable: Variable) -> TensorSpec:
    """Return the name, shape, element size and device of a Keras or TensorFlow variable."""
    name, shape = getattr(variable, "path", variable.name), tuple(variable.shape)
    return TensorSpec(name, shape, dtype_of(variable.dtype).itemsize, _cuda_device(device_of(variable)))


def describe_sum(variable: Variable) -> TensorSpec:
    """Return the spec of a variable's values in a sum, which are float32 if its dtype is narrower."""
    spec = describe(variable)
    return TensorSpec(spec.name, spec.shape, max(spec.itemsize, 4))


def device_of(variable: Variable) -> str:
    """Return TensorFlow's name of the device that holds a variable; "" if it is unknown, or on another backend."""
    if backend.name() != "tensorflow":
        return ""
    return getattr(getattr(variable, "value", variable), "device", None) or ""


def _cuda_device(name: str) -> str:
    """Return the value of `TensorSpec.device` for a device of TensorFlow."""
    _, found, number = name.partition(":GPU:")
    if not found:
        return "CPU"
    # TensorFlow numbers the GPUs that it was told to see; CUDA, and the names of physical devices, number all.
    visible = tf.config.get_visible_devices("GPU")
    return f"GPU:{visible[int(number)].name.rpartition(':')[2]}" if int(number) < len(visible) else "CPU"


def refuse_xla() -> None:
    """Refuse a function that is being traced for XLA, which cannot compile communication between ranks."""
    if backend.name() == "tensorflow" and traces_for_xla():
        raise ConfigError(
            "jit_compile: expected False where gradients are combined over ranks, got True: XLA cannot compile "
            "communication between ranks. Do: move @tf.function(jit_compile=True) from a train_step to the part of it "
            "that computes the gradients; or model.compile(..., jit_compile=False); or add the callback Distribute or "
            "BroadcastGlobalVariablesCallback, which turn the option of compile off."
        )


def refuse_local_skip() -> None:
    """Refuse a loss-scale optimiser that was made around an attached optimiser.

    The loss-scale optimiser would skip a step on its rank alone, and the other ranks would wait.
    """
    if loss_scale_calls():
        raise ConfigError(
            "mixed_float16: the loss-scale optimiser was made after the optimiser had been distributed, and it would "
            "skip steps on one rank only. Distribute it instead: "
            "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), or use the Distribute callback."
        )


def apply_constraints(variables: Sequence[Variable]) -> None:
    """Apply the constraints of variables that have changed since the optimiser's step, in which Keras applies them."""
    for variable in variables:
        if getattr(variable, "constraint", None) is not None:
            variable.assign(variable.constraint(variable))


def values_of(gradient: Gradient) -> tf.Tensor:
    """Return the values of a dense gradient or of `tf.IndexedSlices`."""
    return gradient.values if is_a(gradient, "IndexedSlices") else gradient


def with_values(gradient: Gradient, values: tf.Tensor) -> Gradient:
    """Return a gradient of the same rows with other values."""
    if is_a(gradient, "IndexedSlices"):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def scaled(gradient: Gradient, gain: float | tf.Tensor) -> Gradient:
    """Return a gradient times a factor, a number or a scalar tensor."""
    if is_a(gain, "Tensor"):
        values = values_of(gradient)
        return with_values(gradient, values * tf.cast(gain, values.dtype))
    return gradient if gain == 1.0 else with_values(gradient, values_of(gradient) * gain)
