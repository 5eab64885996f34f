"""Ties a Keras optimiser to a strategy, in place, and unties it.

Keras applies gradients in this order: skip the step if the loss scale overflowed, accumulate, clip, decay, update.
The ranks' gradients have to be combined after the accumulation, so that nothing travels in micro-steps, and before the
clipping, so that the norm is that of the combined gradient, as it would be in one process with the whole batch. The
one method that runs exactly there is `_clip_gradients`. Two methods of the instance are replaced; its class stays as
it is, so that Keras saves, compares and copies a plain optimiser.
"""

import inspect
import types
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdx.comm import Comm
from hvdx.comm.base import Reduction
from hvdx.errors import ConfigError
from hvdx.strategies import Strategy, TensorSpec

_BINDING = "_hvdx_binding"
_REPLACED = ("_backend_apply_gradients", "_clip_gradients")


class Binding:
    """What ties one optimiser to a strategy.

    Attributes:
        strategy, comm: what combines the gradients, and with whom.
        name: alike on all ranks and different for each optimiser of a model.
        gain: factor on the combined gradients.
        specs: the variables that were exchanged; empty before the first step is traced.
        reached: True once a training step went through the optimiser.
        owner: the callback that tied it and will untie it; None where a script did.
        seconds: float64 variable, time between the last gradient and the last combined gradient, summed over steps.
        exchanges: int64 variable, number of exchanges.
        steps: int64 variable, number of steps that reached the optimiser, skipped and accumulated ones too.
    """

    def __init__(self, strategy: Strategy, comm: Comm, name: str, gain: float = 1.0):
        self.strategy = strategy
        self.comm = comm
        self.name = name
        self.gain = gain
        self.specs: list[TensorSpec] = []
        self.reached = False
        self.owner: Any = None
        self.agrees_on_overflow = False
        with tf.device("CPU:0"):
            self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self.exchanges = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    def reset(self) -> None:
        """Count from zero."""
        for variable in (self.seconds, self.exchanges, self.steps):
            variable.assign(tf.zeros_like(variable))

    def count_step(self) -> None:
        """One more step has reached the optimiser."""
        with tf.device("CPU:0"):
            self.steps.assign_add(1)

    def see(self, variables: Sequence[Any]) -> None:
        """Note the variables whose gradients come next."""
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ConfigError(
                    f"variable {variable.path}: float8 scales are overwritten by each rank's own gradients, which "
                    "hvdx does not combine. Train with another dtype policy."
                )
        self.reached = True
        self.specs = [describe(v) for v in variables]

    def exchange(self, gradients: Sequence[Any]) -> list[Any]:
        """Combine gradients over the ranks, and count the time it takes.

        Args:
            gradients: one tensor or `IndexedSlices` a variable, none of them None.
        """
        if not self.agrees_on_overflow:
            _refuse_private_skip()
        # The clock waits for all gradients; the exchange does not, so that groups may leave one by one.
        with tf.control_dependencies([_dense(g) for g in gradients]):
            begin = tf.timestamp()
        combined = self.strategy.exchange(self.comm, gradients, self.name)
        with tf.control_dependencies([_dense(g) for g in combined]):
            elapsed = tf.timestamp() - begin
        with tf.device("CPU:0"):
            self.seconds.assign_add(elapsed)
            self.exchanges.assign_add(1)
        return [_scaled(g, self.gain) for g in combined]


def _refuse_private_skip() -> None:
    """A loss-scale optimiser made around a tied one skips a step on its rank alone; the others would wait."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), keras.optimizers.LossScaleOptimizer):
            raise ConfigError(
                "mixed_float16: the loss-scale optimiser was made after the optimiser had been distributed, and it "
                "would skip steps on one rank only. Distribute it instead: "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), or use the Distribute callback."
            )
        frame = frame.f_back


def attach(optimizer: Any, strategy: Strategy, comm: Comm, name: str, gain: float = 1.0) -> Binding:
    """Make an optimiser combine its gradients over the ranks, in place.

    Args:
        optimizer: a `keras.optimizers.Optimizer`; a `LossScaleOptimizer` is followed to the one it holds.
        strategy: how to combine.
        comm: with whom.
        name: alike on all ranks and different for each optimiser of a model.
        gain: factor on the combined gradients.

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
    _check_kind(_innermost(optimizer))
    binding = Binding(strategy, comm, name, gain)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _agree_on_overflow(optimizer, binding)
    _replace_methods(_innermost(optimizer), binding)
    return binding


def detach(optimizer: Any) -> None:
    """Make an optimiser a plain one again; one that is plain already stays as it is."""
    for part in (optimizer, _innermost(optimizer)):
        for attribute in (*_REPLACED, "check_finite", _BINDING):
            if attribute in vars(part):
                delattr(part, attribute)


def binding_of(optimizer: Any) -> Binding | None:
    """The binding of an optimiser, or None for a plain one."""
    return vars(_innermost(optimizer)).get(_BINDING)


def optimizers_of(model: Any) -> list[Any]:
    """Every optimiser that a model or one of its layers holds, in lists and dictionaries too; its own first."""
    held = [model.optimizer]
    for layer in model._flatten_layers():
        for value in vars(layer).values():
            held += _leaves(value)
    inner = {id(_innermost(o)) for o in held if isinstance(o, keras.optimizers.LossScaleOptimizer)}
    optimizers = [o for o in held if isinstance(o, keras.optimizers.Optimizer) and id(o) not in inner]
    return list({id(o): o for o in optimizers}.values())


def _leaves(value: Any) -> list[Any]:
    """What a nest of lists and dictionaries holds; anything else holds itself."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def local_variables(optimizer: Any) -> list[Any]:
    """What an optimiser keeps that belongs to its rank: gradients that it is still accumulating."""
    return list(getattr(_innermost(optimizer), "_accumulated_gradients", ()))


def describe(variable: Any) -> TensorSpec:
    """Name, shape and size of a Keras or TensorFlow variable."""
    dtype = tf.as_dtype(variable.dtype)
    return TensorSpec(getattr(variable, "path", variable.name), tuple(variable.shape), dtype.size)


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
        binding.see(trainable_variables)
        if not binding.agrees_on_overflow:
            binding.count_step()
        return kind._backend_apply_gradients(self, grads, trainable_variables)

    def _clip_gradients(self: Any, grads: Any) -> Any:
        return kind._clip_gradients(self, binding.exchange(grads))

    optimizer._backend_apply_gradients = types.MethodType(_backend_apply_gradients, optimizer)
    optimizer._clip_gradients = types.MethodType(_clip_gradients, optimizer)
    setattr(optimizer, _BINDING, binding)


def _agree_on_overflow(optimizer: Any, binding: Binding) -> None:
    """Have all ranks skip a step together if one of them overflowed."""
    kind = type(optimizer)

    def check_finite(self: Any, grads: Any) -> Any:
        binding.count_step()
        overflowed = tf.cast(tf.logical_not(kind.check_finite(self, grads)), tf.float32)
        how = Reduction(average=False)
        (anywhere,) = binding.comm.all_reduce([overflowed], how, f"{binding.name}.overflow")
        return tf.equal(anywhere, 0.0)

    optimizer.check_finite = types.MethodType(check_finite, optimizer)
    binding.agrees_on_overflow = True


def _innermost(optimizer: Any) -> Any:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def _dense(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scaled(gradient: Any, gain: float) -> Any:
    if gain == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * gain, gradient.indices, gradient.dense_shape)
    return gradient * gain
