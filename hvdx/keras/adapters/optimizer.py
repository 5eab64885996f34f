"""Attach a Keras optimiser to a strategy in place, and detach it.

Keras applies gradients in this order: skip the step if the loss scale overflowed, accumulate, clip, decay, update.
The ranks' gradients have to be combined after the accumulation, so that nothing travels in micro-steps, and before the
clipping, so that the norm is that of the combined gradient, as it would be in one process with the whole batch. The
one method that runs exactly there is `_clip_gradients`; what combines updates stands around `_backend_update_step`,
after it. Averaging weights stands around the whole of `apply`. Methods of the instance are replaced; its class stays
as it is, so that Keras saves, compares and copies a plain optimiser.
"""

import types
from typing import Any

import keras
import tensorflow as tf

from hvdx import comm as world
from hvdx.comm import Comm, GraphComm
from hvdx.errors import ConfigError
from hvdx.keras.adapters import xla
from hvdx.keras.adapters.averaging import AveragingAdapter
from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.graph import GraphAdapter
from hvdx.keras.adapters.host import HostAdapter
from hvdx.keras.adapters.optimizer_state import innermost
from hvdx.keras.adapters.weights import WeightsAdapter
from hvdx.strategies import Strategy
from hvdx.strategies.base import EACH_STEP

# The adapters, by where a strategy's exchange runs and what it combines.
_ADAPTERS: dict[tuple[str, str], Any] = {
    ("graph", "gradient"): GraphAdapter,
    ("graph", "weights"): AveragingAdapter,
    ("host", "gradient"): HostAdapter,
    ("host", "update"): HostAdapter,
    ("host", "weights"): WeightsAdapter,
}
_ADAPTER = "_hvdx_adapter"
_REPLACED = ("_backend_apply_gradients", "_clip_gradients", "_backend_update_step")


def attach(optimizer: Any, strategy: Strategy, name: str, gain: float = 1.0, comm: Comm | None = None) -> Adapter:
    """Make an optimiser combine its gradients over the ranks, in place.

    Args:
        optimizer: a `keras.optimizers.Optimizer`; a `LossScaleOptimizer` is followed to the one it holds.
        strategy: how to combine.
        name: alike on all ranks and different for each optimiser of a model.
        gain: factor on the combined gradients.
        comm: the ranks that take part: a `GraphComm` where the strategy runs in the graph. By default all.

    Returns:
        The adapter. An optimiser that is attached already keeps its own.

    Raises:
        ConfigError: it is attached to another strategy, or is no Keras 3 optimiser.
    """
    present = adapter_of(optimizer)
    if present is not None:
        if repr(present.strategy) != repr(strategy):
            raise ConfigError(
                f"optimizer {optimizer.name}: it is distributed by {present.strategy!r} already, and {strategy!r} was "
                "asked for. Use one of the two."
            )
        return present
    _check_kind(innermost(optimizer))
    adapter = _make_adapter(strategy, optimizer, name, gain, comm)
    if adapter.stands_around:
        _watch_steps(optimizer, adapter)
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _agree_on_overflow(optimizer, adapter)
    _replace_methods(innermost(optimizer), adapter)
    return adapter


def _make_adapter(strategy: Strategy, optimizer: Any, name: str, gain: float, comm: Comm | None) -> Adapter:
    """Make the adapter that a strategy needs; starts the engine of those that run in the graph."""
    kind = _ADAPTERS.get((strategy.runs, strategy.placement))
    if kind is None or (strategy.schedule != EACH_STEP and kind is not AveragingAdapter):
        raise ConfigError(
            f"strategy {strategy!r}: expected one of {sorted(_ADAPTERS)} for where it runs and what it combines, and "
            f"a schedule for weights in the graph only, got {(strategy.runs, strategy.placement)} with the schedule "
            f"{strategy.schedule}. Do: change its traits."
        )
    if strategy.runs == "graph":
        comm = comm or world.graph(strategy.placement == "weights", strategy.engine)
    else:
        comm = comm or world.start()
        if isinstance(comm, GraphComm) and comm.size > 1:
            comm.channel("what this strategy sends")  # refuses, and says what can
    return kind(strategy, comm, optimizer, name, gain)


def detach(optimizer: Any) -> None:
    """Make an optimiser a plain one again; one that is plain already stays as it is."""
    for part in (optimizer, innermost(optimizer)):
        for attribute in (*_REPLACED, "apply", "check_finite", "register_local_var", _ADAPTER):
            if attribute in vars(part):
                delattr(part, attribute)


def flush(optimizer: Any) -> None:
    """Make the weights those of all ranks: add what is still on its way, or average what each has trained alone.

    Call it on all ranks before looking at the weights in a loop of your own, and at its end. `Distribute` does. Weights
    that no gradient reaches (batch normalisation's statistics) stay as they are.

    Args:
        optimizer: a distributed one, or a plain one.

    Raises:
        ReplicaError: on all ranks, if they have not taken as many steps.

    Example:
        >>> flush(keras.optimizers.SGD(0.1))
    """
    adapter = adapter_of(optimizer)
    if adapter is not None:
        adapter.flush()


def count_samples(optimizer: Any, count: Any) -> None:
    """Tell `ParameterAveraging(weighted=True)` how many samples the next step is made of; `Distribute` does.

    Args:
        optimizer: a distributed one, or a plain one, for which nothing is done.
        count: a whole number, or a scalar tensor.

    Example:
        >>> count_samples(keras.optimizers.SGD(0.1), 64)
    """
    adapter = adapter_of(optimizer)
    if adapter is not None:
        adapter.count_samples(count)


def adapter_of(optimizer: Any) -> Adapter | None:
    """The adapter of an optimiser, or None for a plain one."""
    return vars(innermost(optimizer)).get(_ADAPTER)


def optimizers_of(model: Any) -> list[Any]:
    """Every optimiser that a model or one of its layers holds, in lists and dictionaries too; its own first."""
    held = [model.optimizer]
    for layer in model._flatten_layers():
        for value in vars(layer).values():
            held += _leaves(value)
    inner = {id(innermost(o)) for o in held if isinstance(o, keras.optimizers.LossScaleOptimizer)}
    optimizers = [o for o in held if isinstance(o, keras.optimizers.Optimizer) and id(o) not in inner]
    return list({id(o): o for o in optimizers}.values())


def _leaves(value: Any) -> list[Any]:
    """What a nest of lists and dictionaries holds; anything else holds itself."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _check_kind(optimizer: Any) -> None:
    """Refuse an optimiser that would go past the methods that are replaced."""
    kind = type(optimizer)
    ours = all(hasattr(optimizer, method) for method in _REPLACED)
    if not ours or (kind.__module__.startswith("keras.") and kind.apply is not keras.optimizers.Optimizer.apply):
        raise ConfigError(
            f"optimizer: expected a single one of Keras 3.6 or later, got {kind.__name__}, which hvdx cannot "
            "distribute. Give the model one optimizer, or several in a custom train_step."
        )


def _replace_methods(optimizer: Any, adapter: Adapter) -> None:
    kind = type(optimizer)

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        xla.refuse()
        adapter.record_variables(trainable_variables)
        if not adapter.holds_loss_scale:
            adapter.count_step()
        return kind._backend_apply_gradients(self, grads, trainable_variables)

    def _clip_gradients(self: Any, grads: Any) -> Any:
        return kind._clip_gradients(self, adapter.gradients(grads))

    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        def step() -> None:
            kind._backend_update_step(self, grads, trainable_variables, learning_rate)

        adapter.apply(self, step, trainable_variables)

    for method in (_backend_apply_gradients, _clip_gradients, _backend_update_step):
        setattr(optimizer, method.__name__, types.MethodType(method, optimizer))
    setattr(optimizer, _ADAPTER, adapter)


def _agree_on_overflow(optimizer: Any, adapter: Adapter) -> None:
    """Have all ranks skip a step together if one of them overflowed."""
    kind = type(optimizer)

    def check_finite(self: Any, grads: Any) -> Any:
        adapter.count_step()
        overflowed = tf.cast(tf.logical_not(kind.check_finite(self, grads)), tf.float32)
        return tf.equal(adapter.any_overflow(overflowed), 0.0)

    optimizer.check_finite = types.MethodType(check_finite, optimizer)
    adapter.holds_loss_scale = True


def _watch_steps(optimizer: Any, adapter: Adapter) -> None:
    """Have weights averaged after a step, outside of all that only some ranks do, such as skipping it."""
    kind = type(optimizer)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        adapter.before_step()
        result = kind.apply(self, grads, trainable_variables)
        adapter.after_step()
        return result

    optimizer.apply = types.MethodType(apply, optimizer)
