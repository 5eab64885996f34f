"""Ties a Keras optimiser to a strategy, in place, and unties it.

Keras applies gradients in this order: skip the step if the loss scale overflowed, accumulate, clip, decay, update.
The ranks' gradients have to be combined after the accumulation, so that nothing travels in micro-steps, and before the
clipping, so that the norm is that of the combined gradient, as it would be in one process with the whole batch. The
one method that runs exactly there is `_clip_gradients`. Two methods of the instance are replaced; its class stays as
it is, so that Keras saves, compares and copies a plain optimiser.
"""

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
        seconds: float64 variable, time between the last gradient and the last combined gradient, summed over steps.
        exchanges: int64 variable, number of exchanges.
    """

    def __init__(self, strategy: Strategy, comm: Comm, name: str, gain: float = 1.0):
        self.strategy = strategy
        self.comm = comm
        self.name = name
        self.gain = gain
        self.specs: list[TensorSpec] = []
        self.reached = False
        self.agrees_on_overflow = False
        with tf.device("CPU:0"):
            self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self.exchanges = tf.Variable(0, dtype=tf.int64, trainable=False)

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

    def exchange(self, gradients: Sequence[Any], accumulates: bool) -> list[Any]:
        """Combine gradients over the ranks, and count the time it takes.

        Args:
            gradients: one tensor or `IndexedSlices` a variable, none of them None.
            accumulates: True where Keras runs this only in the last of several micro-steps.
        """
        self._refuse_private_condition(accumulates)
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

    def _refuse_private_condition(self, accumulates: bool) -> None:
        """A loss-scale optimiser made around this one skips a step on this rank alone; the others would wait."""
        if self.agrees_on_overflow or keras.config.dtype_policy().name != "mixed_float16" or tf.executing_eagerly():
            return
        depth, graph = 0, tf.compat.v1.get_default_graph()
        while type(graph).__name__ == "CondBranchFuncGraph":
            depth, graph = depth + 1, graph.outer_graph
        if depth > int(accumulates):
            raise ConfigError(
                "mixed_float16: the loss-scale optimiser was made after the optimiser had been distributed, and it "
                "would skip steps on one rank only. Distribute it instead: "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), or use the Distribute callback."
            )


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
    if not all(hasattr(optimizer, method) for method in _REPLACED):
        raise ConfigError(f"optimizer: expected one of Keras 3.6 or later, got {optimizer!r}.")
    binding = Binding(strategy, comm, name, gain)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _agree_on_overflow(optimizer, comm, name)
        binding.agrees_on_overflow = True
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
    """Every optimiser that a model holds, its own first; a GAN holds two."""
    held = [model.optimizer, *vars(model).values()]
    optimizers = [v for v in held if isinstance(v, keras.optimizers.Optimizer)]
    return list({id(o): o for o in optimizers}.values())


def describe(variable: Any) -> TensorSpec:
    """Name, shape and size of a Keras or TensorFlow variable."""
    dtype = tf.as_dtype(variable.dtype)
    return TensorSpec(getattr(variable, "path", variable.name), tuple(variable.shape), dtype.size)


def _replace_methods(optimizer: Any, binding: Binding) -> None:
    kind = type(optimizer)

    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        binding.see(trainable_variables)
        return kind._backend_apply_gradients(self, grads, trainable_variables)

    def _clip_gradients(self: Any, grads: Any) -> Any:
        combined = binding.exchange(grads, accumulates=bool(self.gradient_accumulation_steps))
        return kind._clip_gradients(self, combined)

    optimizer._backend_apply_gradients = types.MethodType(_backend_apply_gradients, optimizer)
    optimizer._clip_gradients = types.MethodType(_clip_gradients, optimizer)
    setattr(optimizer, _BINDING, binding)


def _agree_on_overflow(optimizer: Any, comm: Comm, name: str) -> None:
    """Have all ranks skip a step together if one of them overflowed."""
    kind = type(optimizer)

    def check_finite(self: Any, grads: Any) -> Any:
        overflowed = tf.cast(tf.logical_not(kind.check_finite(self, grads)), tf.float32)
        (anywhere,) = comm.all_reduce([overflowed], Reduction(average=False), f"{name}.overflow")
        return tf.equal(anywhere, 0.0)

    optimizer.check_finite = types.MethodType(check_finite, optimizer)


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
