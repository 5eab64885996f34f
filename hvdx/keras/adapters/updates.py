"""The updates that an optimiser would add to the weights, and their addition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np

from hvdx.errors import ConfigError
from hvdx.keras.adapters.base import values_of, with_values
from hvdx.keras.backend import tf
from hvdx.keras.seams.layers import raw_variable
from hvdx.keras.seams.optimizers import divert_assignments, is_of_keras, owner_of_update_step
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.variables import dtype_of

# The weights of these optimisers are a function of their state, which is rank-local here: the next step would undo
# any other change of the weights.
_ASSIGN_WEIGHTS = ("Ftrl", "ScheduleFreeAdamW")
# Classes whose update step reads no weights.
_WITHOUT_WEIGHTS = {
    *(keras.optimizers.SGD, keras.optimizers.RMSprop, keras.optimizers.Adam, keras.optimizers.Nadam),
    *(keras.optimizers.Adamax, keras.optimizers.Adagrad, keras.optimizers.Adadelta),
}


def check_kind(optimizer: keras.optimizers.Optimizer, placement: str) -> None:
    """Refuse an optimiser whose updates cannot be combined.

    Args:
        optimizer: Keras optimiser, not a loss-scale optimiser.
        placement: that of the strategy; with "update" the updates are compressed.

    Raises:
        ConfigError: if the optimiser computes weights from its state, and no updates, or if they are signs.
    """
    why = _obstacle(optimizer)
    if why and (placement == "update" or assigns_weights(optimizer)):
        raise ConfigError(f"optimizer {type(optimizer).__name__}: {why}")


def check_averages(optimizer: keras.optimizers.Optimizer, own_state: bool) -> None:
    """Refuse an optimiser whose weights cannot be averaged.

    Args:
        optimizer: Keras optimiser, not a loss-scale optimiser.
        own_state: whether each rank keeps its own state of the optimiser.

    Raises:
        ConfigError: if the optimiser computes weights from a state that is not averaged.
    """
    if own_state and assigns_weights(optimizer):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: it computes weights from its state, so the next step would undo an "
            "average of the weights alone. Use ParameterAveraging(average_optimizer=True)."
        )


def served_dtype(variables: Sequence[Variable]) -> np.dtype:
    """Return the dtype in which servers hold some weights: float32, or float64 if one of them is.

    Raises:
        ConfigError: if a variable is stored in less than 32 bits.
    """
    for variable in variables:
        if dtype_of(variable.dtype).itemsize < 4:
            raise ConfigError(
                f"variable {getattr(variable, 'path', variable.name)}: it is stored as {variable.dtype}, and every "
                "pull would round the servers' weights. Train under a mixed policy, such as mixed_bfloat16."
            )
    return np.dtype(np.float64 if any(dtype_of(v.dtype).itemsize > 4 for v in variables) else np.float32)


def combines(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether `Threshold` can combine the updates of an optimiser."""
    return not _obstacle(optimizer)


def _obstacle(optimizer: keras.optimizers.Optimizer) -> str:
    """Return why `Threshold` cannot combine the updates of an optimiser, and the remedy; "" if it can."""
    if assigns_weights(optimizer):
        return (
            "it computes weights from its own state, so it has no updates to combine. Use AllReduce(), or "
            "Threshold(placement='gradient')."
        )
    if any(cls.__name__ == "Lion" for cls in type(optimizer).__mro__):
        # ADR 54: at best a loss of 2.50, where a worker alone has 2.42 and all-reduce 2.31.
        return (
            "its updates are signs, all of one size, so a threshold cannot tell which matter, and a worker alone "
            "trains better. Use AllReduce(), or another optimizer such as AdamW."
        )
    return ""


def assigns_weights(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether an optimiser computes weights from its state and has no update to send."""
    return any(cls.__name__ in _ASSIGN_WEIGHTS for cls in type(optimizer).__mro__)


def reads_weights(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether the step of an optimiser depends on the weights, and not only on gradients and its own state.

    Example:
        >>> reads_weights(keras.optimizers.Adam()), reads_weights(keras.optimizers.AdamW())
        (False, True)
    """
    return bool(optimizer.weight_decay) or owner_of_update_step(optimizer) not in _WITHOUT_WEIGHTS


def writes_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether the updates of an optimiser are rows where the gradients are.

    Example:
        >>> writes_rows(keras.optimizers.SGD()), writes_rows(keras.optimizers.SGD(momentum=0.9))
        (True, False)
    """
    return owner_of_update_step(optimizer) is keras.optimizers.SGD and not optimizer.momentum


def updates_of(
    optimizer: keras.optimizers.Optimizer, step: Callable[[], object], variables: Sequence[Variable]
) -> list[Gradient]:
    """Take an optimiser's step with its own state, and return the updates without applying them.

    Args:
        optimizer: Keras optimiser, built.
        step: function that takes the optimiser's own update step, which assigns to `variables`.
        variables: weights; the step leaves them unchanged.

    Returns:
        One per variable, of its shape and dtype: `tf.IndexedSlices` if the step changes only some rows, else a tensor.
    """
    return _divert_updates(optimizer, step, variables) if _is_keras(optimizer) else _measure_updates(step, variables)


def add(variables: Sequence[Variable], changes: Sequence[Gradient]) -> list[tf.Operation]:
    """Add updates to variables in place; return the operations that do it."""
    added = []
    for variable, update in zip(variables, changes, strict=True):
        # The sum of a Keras variable and a tensor would be a third array.
        raw = raw_variable(variable)
        if isinstance(update, tf.IndexedSlices):
            added.append(raw.scatter_add(update))
        else:
            added.append(raw.assign_add(tf.cast(update, variable.dtype), read_value=False))
    return added


def _is_keras(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether the update step is one of Keras' own, which change variables only by `optimizer.assign...`."""
    return is_of_keras(owner_of_update_step(optimizer))


def _divert_updates(
    optimizer: keras.optimizers.Optimizer, step: Callable[[], object], variables: Sequence[Variable]
) -> list[Gradient]:
    """Intercept the assignments of the step, which needs no copy of the weights and no subtraction."""
    total: list[Gradient | None] = [None] * len(variables)

    def record(method: str, i: int, value: Gradient) -> None:
        before, value = total[i], tf.cast(value, variables[i].dtype)
        if method == "assign":
            total[i] = _dense(value) - tf.convert_to_tensor(variables[i])
            return
        delta = value if method == "assign_add" else with_values(value, _negative(values_of(value)))
        total[i] = delta if before is None else _dense(before) + _dense(delta)

    restore = divert_assignments(optimizer, variables, record)
    try:
        step()
    finally:
        restore()
    return [tf.zeros(v.shape, v.dtype) if t is None else t for t, v in zip(total, variables, strict=True)]


def _negative(value: tf.Tensor) -> tf.Tensor:
    """Return the negative of a tensor, without a pass over it if a graph has made it by a scalar factor.

    The sign of a factor changes no other bit of a product or a quotient. `SGD` subtracts `gradient * rate`, and `Adam`
    `m * alpha / (sqrt(v) + epsilon)`.
    """
    kind = "" if tf.executing_eagerly() else value.op.type
    if kind not in ("Mul", "RealDiv") or not value.shape.rank:
        return -value
    first, second = value.op.inputs
    if kind == "RealDiv":
        return _negative(first) / second
    if second.shape.rank == 0:
        return first * -second
    return -first * second if first.shape.rank == 0 else -value


def _measure_updates(step: Callable[[], object], variables: Sequence[Variable]) -> list[Gradient]:
    """Take the step, measure the change of the weights, and undo it."""
    before = [tf.identity(tf.convert_to_tensor(v)) for v in variables]
    with tf.control_dependencies(before):
        step()
    deltas = [tf.convert_to_tensor(v) - b for v, b in zip(variables, before, strict=True)]
    with tf.control_dependencies(deltas):
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
    return deltas


def _dense(value: Gradient) -> tf.Tensor:
    return tf.convert_to_tensor(value)
