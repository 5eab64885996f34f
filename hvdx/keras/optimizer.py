"""Ties a Keras optimiser to a strategy, in place, and unties it.

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
from hvdx.keras import xla
from hvdx.keras.averaging_binding import AveragingBinding
from hvdx.keras.binding import Binding
from hvdx.keras.graph_binding import GraphBinding
from hvdx.keras.host_binding import HostBinding
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.weights_binding import WeightsBinding
from hvdx.strategies import Strategy
from hvdx.strategies.base import EACH_STEP

# The adapters, by where a strategy's exchange runs and what it combines.
_ADAPTERS: dict[tuple[str, str], Any] = {
    ("graph", "gradient"): GraphBinding,
    ("graph", "weights"): AveragingBinding,
    ("host", "gradient"): HostBinding,
    ("host", "update"): HostBinding,
    ("host", "weights"): WeightsBinding,
}
_BINDING = "_hvdx_binding"
_REPLACED = ("_backend_apply_gradients", "_clip_gradients", "_backend_update_step")


def attach(optimizer: Any, strategy: Strategy, name: str, gain: float = 1.0, comm: Comm | None = None) -> Binding:
    """Make an optimiser combine its gradients over the ranks, in place.

    Args:
        optimizer: a `keras.optimizers.Optimizer`; a `LossScaleOptimizer` is followed to the one it holds.
        strategy: how to combine.
        name: alike on all ranks and different for each optimiser of a model.
        gain: factor on the combined gradients.
        comm: the ranks that take part: a `GraphComm` where the strategy runs in the graph. By default all.

    Returns:
        The binding. An optimiser that is tied already keeps its own.

    Raises:
        ConfigError: it is tied to another strategy, or is no Keras 3 optimiser.
    """
    bound = binding_of(optimizer)
    if bound is not None:
        if repr(bound.strategy) != repr(strategy):
            raise ConfigError(
                f"optimizer {optimizer.name}: it is distributed by {bound.strategy!r} already, and {strategy!r} was "
                "asked for. Use one of the two."
            )
        return bound
    _check_kind(innermost(optimizer))
    binding = _bind(strategy, optimizer, name, gain, comm)
    if binding.stands_around:
        _watch_steps(optimizer, binding)
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _agree_on_overflow(optimizer, binding)
    _replace_methods(innermost(optimizer), binding)
    return binding


def _bind(strategy: Strategy, optimizer: Any, name: str, gain: float, comm: Comm | None) -> Binding:
    """Make the adapter that a strategy needs; starts the engine of those that run in the graph."""
    adapter = _ADAPTERS.get((strategy.runs, strategy.placement))
    if adapter is None or (strategy.schedule != EACH_STEP and adapter is not AveragingBinding):
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
    binding: Binding = adapter(strategy, comm, optimizer, name, gain)
    return binding


def detach(optimizer: Any) -> None:
    """Make an optimiser a plain one again; one that is plain already stays as it is."""
    for part in (optimizer, innermost(optimizer)):
        for attribute in (*_REPLACED, "apply", "check_finite", "register_local_var", _BINDING):
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
    binding = binding_of(optimizer)
    if binding is not None:
        binding.flush()


def count_samples(optimizer: Any, count: Any) -> None:
    """Tell `ParameterAveraging(weighted=True)` how many samples the next step is made of; `Distribute` does.

    Args:
        optimizer: a distributed one, or a plain one, for which nothing is done.
        count: a whole number, or a scalar tensor.

    Example:
        >>> count_samples(keras.optimizers.SGD(0.1), 64)
    """
    binding = binding_of(optimizer)
    if binding is not None:
        binding.count_samples(count)


def binding_of(optimizer: Any) -> Binding | None:
    """The binding of an optimiser, or None for a plain one."""
    return vars(innermost(optimizer)).get(_BINDING)


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


def _replace_methods(optimizer: Any, binding: Binding) -> None:
    kind = type(optimizer)

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        xla.refuse()
        binding.see(trainable_variables)
        if not binding.holds_loss_scale:
            binding.count_step()
        return kind._backend_apply_gradients(self, grads, trainable_variables)

    def _clip_gradients(self: Any, grads: Any) -> Any:
        return kind._clip_gradients(self, binding.gradients(grads))

    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        def step() -> None:
            kind._backend_update_step(self, grads, trainable_variables, learning_rate)

        binding.apply(self, step, trainable_variables)

    for method in (_backend_apply_gradients, _clip_gradients, _backend_update_step):
        setattr(optimizer, method.__name__, types.MethodType(method, optimizer))
    setattr(optimizer, _BINDING, binding)


def _agree_on_overflow(optimizer: Any, binding: Binding) -> None:
    """Have all ranks skip a step together if one of them overflowed."""
    kind = type(optimizer)

    def check_finite(self: Any, grads: Any) -> Any:
        binding.count_step()
        overflowed = tf.cast(tf.logical_not(kind.check_finite(self, grads)), tf.float32)
        return tf.equal(binding.any_overflow(overflowed), 0.0)

    optimizer.check_finite = types.MethodType(check_finite, optimizer)
    binding.holds_loss_scale = True


def _watch_steps(optimizer: Any, binding: Binding) -> None:
    """Have weights averaged after a step, outside of all that only some ranks do, such as skipping it."""
    kind = type(optimizer)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        binding.before_step()
        result = kind.apply(self, grads, trainable_variables)
        binding.after_step()
        return result

    optimizer.apply = types.MethodType(apply, optimizer)
