"""Attaching a Keras optimiser to a strategy, in place, and detaching it.

Keras applies gradients in this order: skip the step if the loss scale overflowed, accumulate, clip, decay, update.
The ranks' gradients must be combined after accumulation, so that micro-steps send nothing, and before clipping, so
that the norm is that of the combined gradient, the same as in one process with the whole batch. The method that clips
is the only one that runs at this point. To combine updates, an adapter wraps the update step, which runs later. To
average weights, it wraps the whole of `apply`. Methods are replaced on the optimiser object, see `seams/optimizers.py`.
Its class stays the same, so that Keras saves, compares and copies a plain optimiser.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import keras

from hvdx import comm as world
from hvdx.comm import Comm, GraphComm
from hvdx.comm.array_comm import ArrayComm
from hvdx.comm.mesh import mesh_of
from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.adapters.base import Adapter, refuse_xla, values_of, with_values
from hvdx.keras.adapters.stepped import SteppedAdapter, SteppedGradients
from hvdx.keras.adapters.stepped_averages import SteppedAverages
from hvdx.keras.adapters.stepped_updates import SteppedUpdates, SteppedWeights
from hvdx.keras.backend import tf
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.models import layers_of
from hvdx.keras.seams.optimizers import (
    has_parts_of_step,
    unwrap_optimizer,
    wrap_apply,
    wrap_optimizer,
    wrap_overflow_check,
)
from hvdx.keras.seams.replacing import Method
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.weight_parts import part_of, tensors_of
from hvdx.strategies import Strategy
from hvdx.strategies.contract import EACH_STEP


def clip(
    optimizer: keras.optimizers.Optimizer,
    gradients: list[Gradient],
    variables: Sequence[Variable],
    of_keras: Callable[[list[Gradient]], list[Gradient]],
) -> list[Gradient]:
    """Clip gradients as Keras does, by norms of whole gradients.

    Args:
        optimizer: Keras optimiser, not a loss-scale optimiser.
        gradients: combined gradients, one for each variable.
        of_keras: Keras' own method, which is used where no gradient is a part or no norm is needed.
    """
    parts = [i for i, v in enumerate(variables) if part_of(v) is not None and gradients[i] is not None]
    if not parts or not (optimizer.clipnorm or optimizer.global_clipnorm):
        return of_keras(gradients)
    squares = [None if g is None else _square(g) for g in gradients]
    ranks = tensors_of(mesh_of(world.start()))
    sums = tf.unstack(ranks.sum(tf.stack([squares[i] for i in parts])))
    for i, total in zip(parts, sums, strict=True):
        squares[i] = total
    if optimizer.clipnorm:
        return [
            None if g is None else _scaled(g, optimizer.clipnorm / tf.maximum(tf.sqrt(s), optimizer.clipnorm))
            for g, s in zip(gradients, squares, strict=True)
        ]
    norm = tf.sqrt(tf.add_n([s for s in squares if s is not None]))
    # The difference is NaN if the norm is not finite.
    scale = optimizer.global_clipnorm * tf.minimum(1.0 / norm, 1.0 / optimizer.global_clipnorm) + (norm - norm)
    return [None if g is None else _scaled(g, scale) for g in gradients]


def _square(gradient: Gradient) -> tf.Tensor:
    """Return the sum of squares of a dense gradient or of `tf.IndexedSlices`, in float32."""
    return tf.reduce_sum(tf.square(tf.cast(values_of(gradient), tf.float32)))


def _scaled(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    values = values_of(gradient)
    return with_values(gradient, values * tf.cast(factor, values.dtype))


_ADAPTER = "_hvdx_adapter"


def attach(
    optimizer: keras.optimizers.Optimizer,
    strategy: Strategy,
    name: str,
    gain: float = 1.0,
    comm: Comm | None = None,
    earlier: Adapter | None = None,
) -> Adapter:
    """Attach an optimiser to a strategy, in place.

    Args:
        optimizer: a `keras.optimizers.Optimizer`; of a `LossScaleOptimizer`, the inner optimiser is attached.
        name: name of the exchange; the same on all ranks, different for each optimiser of a model.
        gain: factor on the gradients that the optimiser applies.
        comm: ranks that take part, by default all; a `GraphComm` if the strategy runs in the graph.
        earlier: adapter to attach again, in place of a new one; it was made by the same call.

    Returns:
        The adapter; if the optimiser is attached already, its present adapter.

    Raises:
        ConfigError: if the optimiser is attached to another strategy, or is not a Keras 3 optimiser.
    """
    present = adapter_of(optimizer)
    if present is not None:
        if repr(present.strategy) != repr(strategy):
            raise ConfigError(
                f"optimizer {optimizer.name}: it is already distributed by {present.strategy!r}, so it cannot be "
                f"distributed by {strategy!r}. Use one of the two."
            )
        return present
    _check_kind(innermost(optimizer))
    adapter = earlier or _make_adapter(strategy, optimizer, name, gain, comm)
    if adapter.wraps_apply:
        _wrap_apply(optimizer, adapter)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _agree_on_overflow(optimizer, adapter)
    _replace_methods(innermost(optimizer), adapter)
    return adapter


def _make_adapter(
    strategy: Strategy, optimizer: keras.optimizers.Optimizer, name: str, gain: float, comm: Comm | None
) -> Adapter:
    """Make the adapter for a strategy; start the engine if the strategy runs in the graph."""
    if backend.name() != "tensorflow":
        return _make_stepped(strategy, optimizer, name, gain, comm)
    # Imported here because they import TensorFlow.
    from hvdx.keras.adapters.graph import AveragingAdapter, GraphAdapter
    from hvdx.keras.adapters.host import HostAdapter
    from hvdx.keras.adapters.periodic import PeriodicAdapter
    from hvdx.keras.adapters.weights import WeightsAdapter

    # By `Strategy.runs` and `Strategy.placement`.
    adapters: dict[tuple[str, str], type[Adapter]] = {
        ("graph", "gradient"): GraphAdapter,
        ("graph", "weights"): AveragingAdapter,
        ("host", "gradient"): HostAdapter,
        ("host", "update"): HostAdapter,
        ("host", "weights"): WeightsAdapter,
    }
    kind: Callable[..., Adapter] | None = adapters.get((strategy.runs, strategy.placement))
    if strategy.may_wait and kind is HostAdapter:
        if innermost(optimizer).use_ema:
            # The averages of ranks that have weights of their own would differ.
            strategy = strategy.in_each_step(
                f"optimizer {optimizer.name}, whose use_ema averages the weights of all steps"
            )
        else:
            kind = PeriodicAdapter
    if kind is None or (strategy.schedule != EACH_STEP and kind is not AveragingAdapter):
        raise ConfigError(
            f"strategy {strategy!r}: expected (runs, placement) to be one of {sorted(adapters)}, and a schedule only "
            f"with ('graph', 'weights'), got {(strategy.runs, strategy.placement)} with the schedule "
            f"{strategy.schedule}. Do: change its traits."
        )
    if strategy.runs == "graph":
        comm = comm or world.graph(strategy.placement == "weights", strategy.engine)
    else:
        comm = _with_channels(comm or world.start())
    return kind(strategy, comm, optimizer, name, gain)


def _with_channels(comm: Comm) -> Comm:
    """Return a communicator by which the host exchanges arrays; raise ConfigError for one that has no MPI."""
    if isinstance(comm, GraphComm) and comm.size > 1:
        comm.channel("the data of this strategy")  # raises: Horovod's own launcher starts no MPI
    return comm


# By the communicator below: each opens channels, which all fits use.
_array_comms: weakref.WeakKeyDictionary[Comm, ArrayComm] = weakref.WeakKeyDictionary()
# Adapters for JAX and PyTorch, by `Strategy.runs` and `Strategy.placement`.
_STEPPED: dict[tuple[str, str], type[SteppedAdapter]] = {
    ("graph", "gradient"): SteppedGradients,
    ("graph", "weights"): SteppedAverages,
    ("host", "gradient"): SteppedGradients,
    ("host", "update"): SteppedUpdates,
    ("host", "weights"): SteppedWeights,
}


def _make_stepped(
    strategy: Strategy, optimizer: keras.optimizers.Optimizer, name: str, gain: float, comm: Comm | None
) -> SteppedAdapter:
    """Make the adapter for a strategy on JAX or PyTorch.

    Raises:
        ConfigError: if the strategy is none that hvdx has there.
    """
    kind = _STEPPED.get((strategy.runs, strategy.placement))
    if kind is None:
        backend.needs_tensorflow(f"strategy {strategy!r}")
    assert kind is not None
    comm = _with_channels(comm or world.start())
    if strategy.runs == "graph":
        if comm not in _array_comms:
            _array_comms[comm] = ArrayComm(comm)
        comm = _array_comms[comm]
    return kind(strategy, comm, optimizer, name, gain)


def detach(optimizer: keras.optimizers.Optimizer) -> None:
    """Make an optimiser a plain one again; leave a plain one unchanged."""
    for part in (optimizer, innermost(optimizer)):
        unwrap_optimizer(part)
        if _ADAPTER in vars(part):
            delattr(part, _ADAPTER)


def flush(optimizer: keras.optimizers.Optimizer) -> None:
    """Flush the exchange of an optimiser; do nothing for a plain one. Collective; see `hvdx.keras.flush`."""
    adapter = adapter_of(optimizer)
    if adapter is not None:
        adapter.settle()


def count_samples(optimizer: keras.optimizers.Optimizer, count: int | tf.Tensor) -> None:
    """Count the samples of the next step, by which this rank weighs; `Distribute` does this for you.

    Call it on all ranks before each step of a loop of your own if their batches may have different sizes. Without it,
    all ranks weigh alike.

    Args:
        optimizer: distributed optimiser; nothing is done for a plain one.
        count: number of samples, an integer or a scalar tensor.

    Example:
        >>> count_samples(keras.optimizers.SGD(0.1), 64)
    """
    adapter = adapter_of(optimizer)
    if adapter is not None:
        adapter.count_samples(count)


def adapter_of(optimizer: keras.optimizers.Optimizer) -> Adapter | None:
    """Return the adapter of an optimiser, or None for a plain one."""
    return vars(innermost(optimizer)).get(_ADAPTER)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return all optimisers of a model and its layers, also those in lists and dictionaries; the model's own first."""
    held = [model.optimizer]
    for layer in layers_of(model):
        for value in vars(layer).values():
            held += _leaves(value)
    inner = {id(innermost(o)) for o in held if isinstance(o, keras.optimizers.LossScaleOptimizer)}
    optimizers = [o for o in held if isinstance(o, keras.optimizers.Optimizer) and id(o) not in inner]
    return list({id(o): o for o in optimizers}.values())


def _leaves(value: object) -> list[object]:
    """Return the leaves of nested lists and dictionaries; any other value is its own leaf."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _check_kind(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse an optimiser that lacks the replaced methods or bypasses them."""
    if not has_parts_of_step(optimizer):
        raise ConfigError(
            f"optimizer: expected a single optimizer of Keras 3.6 or later, got {type(optimizer).__name__}, which hvdx "
            "cannot distribute. Give the model one optimizer, or several in a custom train_step."
        )


def _replace_methods(optimizer: keras.optimizers.Optimizer, adapter: Adapter) -> None:
    def begin(
        self: keras.optimizers.Optimizer,
        original: Method,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable],
    ) -> object:
        refuse_xla()
        if not adapter.holds_loss_scale:
            adapter.count_step()
        return original(adapter.begin_call(self, grads, trainable_variables), trainable_variables)

    def combine_and_clip(
        self: keras.optimizers.Optimizer, original: Method, grads: Sequence[Gradient]
    ) -> list[Gradient]:
        return clip(self, adapter.gradients(grads), adapter.variables, original)

    def update(
        self: keras.optimizers.Optimizer,
        original: Method,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        adapter.apply(self, lambda: original(grads, trainable_variables, learning_rate), trainable_variables)

    def overwrite(
        _: keras.optimizers.Optimizer, original: Method, grads: Sequence[Gradient], variables: Sequence[Variable]
    ) -> object:
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ConfigError(
                    f"variable {variable.path}: float8 scales are overwritten by each rank's own gradients, which "
                    "hvdx does not combine. Train with another dtype policy."
                )
        return original(grads, variables)

    wrap_optimizer(optimizer, begin=begin, clip=combine_and_clip, update=update, overwrite=overwrite)
    setattr(optimizer, _ADAPTER, adapter)


def _agree_on_overflow(optimizer: keras.optimizers.Optimizer, adapter: Adapter) -> None:
    """Let the adapter decide on an overflow, so that ranks can skip a step together."""

    def check_finite(_: keras.optimizers.Optimizer, original: Method, grads: Sequence[Gradient]) -> tf.Tensor:
        adapter.count_step()
        overflowed = keras.ops.cast(keras.ops.logical_not(original(grads)), "float32")
        return keras.ops.equal(adapter.any_overflow(overflowed), 0.0)

    wrap_overflow_check(optimizer, check_finite)
    adapter.agree_on_overflow()


def _wrap_apply(optimizer: keras.optimizers.Optimizer, adapter: Adapter) -> None:
    """Call the adapter before and after each step, also on ranks that skip the step."""

    def apply(
        _: keras.optimizers.Optimizer,
        original: Method,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Variable] | None = None,
    ) -> object:
        adapter.before_step()
        result = original(grads, trainable_variables)
        adapter.after_step()
        return result

    wrap_apply(optimizer, apply)
