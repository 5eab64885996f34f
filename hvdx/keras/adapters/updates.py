"""What an optimiser would add to the weights, without adding it."""

import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdx.errors import ConfigError

# Their weights are a function of their state, which belongs to one rank here: nothing that was added to the weights
# from outside would last.
_ABSOLUTE = ("Ftrl", "ScheduleFreeAdamW")


def check_kind(optimizer: Any) -> None:
    """Refuse optimisers whose updates cannot be combined.

    Args:
        optimizer: a Keras optimiser; not a loss-scale one.

    Raises:
        ConfigError: it computes weights from its state, not updates.
    """
    if assigns_weights(optimizer):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__}: it computes weights from its own state and no updates, so those "
            "cannot be combined. Use AllReduce(), or Threshold(placement='gradient')."
        )


def assigns_weights(optimizer: Any) -> bool:
    """Whether an optimiser computes weights from its state, and has no update to send."""
    return any(cls.__name__ in _ABSOLUTE for cls in type(optimizer).__mro__)


def updates_of(optimizer: Any, step: Callable[[], Any], variables: Sequence[Any]) -> list[Any]:
    """Let an optimiser take a step with its own state, and collect what it wants to add to the weights.

    Args:
        optimizer: a Keras optimiser, built.
        step: its own update step, which assigns to `variables`.
        variables: the weights; they are left as they were.

    Returns:
        One dense tensor a variable, of its shape and dtype.
    """
    return _collected(optimizer, step, variables) if _is_keras(optimizer) else _measured(step, variables)


def momentum_of(optimizer: Any) -> float:
    """How much of an update an optimiser carries on into the next, beyond what it leads by itself.

    Args:
        optimizer: a Keras optimiser.

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


def _is_keras(optimizer: Any) -> bool:
    """Whether its update step is one of Keras' own, which change variables by `optimizer.assign...` alone."""
    return next(c for c in type(optimizer).__mro__ if "update_step" in vars(c)).__module__.startswith("keras.")


def _collected(optimizer: Any, step: Callable[[], Any], variables: Sequence[Any]) -> list[Any]:
    """Divert the assignments: no copy of the weights, and nothing to subtract afterwards."""
    kind, found = type(optimizer), {optimizer._var_key(v): i for i, v in enumerate(variables)}
    total: list[Any] = [None] * len(variables)

    def divert(method: str, delta_of: Callable[[Any, Any], Any], afresh: bool) -> None:
        def diverted(self: Any, variable: Any, value: Any) -> None:
            i = found.get(self._var_key(variable))
            if i is None:
                getattr(kind, method)(self, variable, value)
                return
            delta = delta_of(tf.cast(_dense(value), variables[i].dtype), variables[i])
            total[i] = delta if afresh or total[i] is None else total[i] + delta

        setattr(optimizer, method, types.MethodType(diverted, optimizer))

    divert("assign", lambda value, variable: value - tf.convert_to_tensor(variable), afresh=True)
    divert("assign_add", lambda value, _: value, afresh=False)
    divert("assign_sub", lambda value, _: -value, afresh=False)
    try:
        step()
    finally:
        for method in ("assign", "assign_add", "assign_sub"):
            delattr(optimizer, method)
    return [tf.zeros(v.shape, v.dtype) if t is None else t for t, v in zip(total, variables, strict=True)]


def _measured(step: Callable[[], Any], variables: Sequence[Any]) -> list[Any]:
    """Let the step happen, see what changed, and take it back."""
    before = [tf.identity(tf.convert_to_tensor(v)) for v in variables]
    with tf.control_dependencies(before):
        step()
    deltas = [tf.convert_to_tensor(v) - b for v, b in zip(variables, before, strict=True)]
    with tf.control_dependencies(deltas):
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
    return deltas


def _dense(value: Any) -> Any:
    return tf.convert_to_tensor(value)
