"""Computation of the updates that an optimiser would add to the weights."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hvdx.errors import ConfigError
from hvdx.keras.seams.optimizers import divert_assignments, is_of_keras, owner_of_update_step
from hvdx.keras.types import Gradient, Variable

# The weights of these optimisers are a function of their state, which is rank-local here: the next step would undo
# any other change of the weights.
_ASSIGN_WEIGHTS = ("Ftrl", "ScheduleFreeAdamW")


def check_kind(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse an optimiser whose updates cannot be combined.

    Args:
        optimizer: Keras optimiser, not a loss-scale optimiser.

    Raises:
        ConfigError: if the optimiser computes weights from its state, and no updates.
    """
    if assigns_weights(optimizer):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: it computes weights from its own state, so it has no updates to "
            "combine. Use AllReduce(), or Threshold(placement='gradient')."
        )


def assigns_weights(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether an optimiser computes weights from its state and has no update to send."""
    return any(cls.__name__ in _ASSIGN_WEIGHTS for cls in type(optimizer).__mro__)


def updates_of(
    optimizer: keras.optimizers.Optimizer, step: Callable[[], object], variables: Sequence[Variable]
) -> list[tf.Tensor]:
    """Take an optimiser's step with its own state, and return the updates without applying them.

    Args:
        optimizer: Keras optimiser, built.
        step: function that takes the optimiser's own update step, which assigns to `variables`.
        variables: weights; the step leaves them unchanged.

    Returns:
        One dense tensor per variable, of the variable's shape and dtype.
    """
    return _divert_updates(optimizer, step, variables) if _is_keras(optimizer) else _measure_updates(step, variables)


def momentum_of(optimizer: keras.optimizers.Optimizer) -> float:
    """Return the share of an update that an optimiser carries over into the next: `momentum` or `beta_1`, else 0.

    Args:
        optimizer: Keras optimiser.

    Example:
        >>> import keras
        >>> momentum_of(keras.optimizers.SGD(momentum=0.5)), momentum_of(keras.optimizers.Adam())
        (0.5, 0.9)
    """
    for name in ("momentum", "beta_1"):
        value = getattr(optimizer, name, None)
        if isinstance(value, int | float):
            return float(value)
    return 0.0


def _is_keras(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether the update step is one of Keras' own, which change variables only by `optimizer.assign...`."""
    return is_of_keras(owner_of_update_step(optimizer))


def _divert_updates(
    optimizer: keras.optimizers.Optimizer, step: Callable[[], object], variables: Sequence[Variable]
) -> list[tf.Tensor]:
    """Intercept the assignments of the step, which needs no copy of the weights and no subtraction."""
    total: list[tf.Tensor | None] = [None] * len(variables)

    def record(method: str, i: int, value: Gradient) -> None:
        value = tf.cast(_dense(value), variables[i].dtype)
        if method == "assign":
            total[i] = value - tf.convert_to_tensor(variables[i])
        else:
            delta = value if method == "assign_add" else -value
            total[i] = delta if total[i] is None else total[i] + delta

    restore = divert_assignments(optimizer, variables, record)
    try:
        step()
    finally:
        restore()
    return [tf.zeros(v.shape, v.dtype) if t is None else t for t, v in zip(total, variables, strict=True)]


def _measure_updates(step: Callable[[], object], variables: Sequence[Variable]) -> list[tf.Tensor]:
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
