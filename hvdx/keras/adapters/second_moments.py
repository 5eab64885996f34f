"""Correction of updates for the second moment by which an optimiser divides them.

Under a strategy that combines updates, each rank's optimiser sees the gradients of its rank alone, and Adam divides by
the root of their second moment. If gradients are mostly noise, this root is larger than that of the mean gradient, by
up to sqrt(N) for N ranks, and the steps are that much too small. So each rank multiplies the update of a variable by
the root of (second moment of its own gradient / second moment of the mean gradient).

A rank estimates this ratio from the state of its optimiser, without an exchange. Let a gradient be s + n, where the
noise n has mean 0 and variance V. Then, summed over the elements of a variable:

    v = s^2 + V          second moment of a gradient
        s^2 + V / N      of the mean of N gradients
    m = s^2 + kappa V    square of the first moment; kappa is the sum of the squared weights of the gradients in it

The optimiser has v and the first moment, so s^2 / v = (m / v - kappa) / (1 - kappa), and V = v - s^2.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdx.strategies.base import Schedule

# Optimisers whose update is the first moment over the root of the second. Lamb is none of them: it scales its updates
# to the norm of the weights.
_KINDS = (keras.optimizers.Adam, keras.optimizers.Nadam)


def divides(optimizer: Any) -> bool:
    """Return whether an optimiser divides its first moment by the root of the second, as Keras' Adam does.

    Args:
        optimizer: Keras optimiser, not a loss-scale optimiser.

    Example:
        >>> divides(keras.optimizers.AdamW()), divides(keras.optimizers.Lion())
        (True, False)
    """
    if not isinstance(optimizer, _KINDS):
        return False
    # A subclass with an update step of its own may divide by something else.
    return next(c for c in type(optimizer).__mro__ if "update_step" in vars(c)) in _KINDS


def corrected(
    optimizer: Any, updates: Sequence[Any], variables: Sequence[Any], contributors: Sequence[Schedule]
) -> list[Any]:
    """Return the updates for a division by the second moment of the ranks' mean gradient.

    Args:
        optimizer: optimiser that has just computed the updates, and has not yet counted the step; see `divides`.
        updates: one tensor per variable.
        variables: trained variables.
        contributors: number of ranks in the mean of each variable, as pairs (first step, ranks).
    """
    step = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.float32)
    return [
        update * tf.cast(_factor(optimizer, optimizer._get_variable_index(v), step, _at(step, ranks)), update.dtype)
        for update, v, ranks in zip(updates, variables, contributors, strict=True)
    ]


def _factor(optimizer: Any, i: int, step: Any, ranks: Any) -> Any:
    """Return the root of (second moment of a gradient / second moment of the mean gradient) of one variable."""
    power_1, power_2 = optimizer.beta_1 ** (step + 1.0), optimizer.beta_2 ** (step + 1.0)
    momentum, velocity = (
        tf.cast(tf.convert_to_tensor(slots[i]), tf.float32) for slots in (optimizer._momentums, optimizer._velocities)
    )
    first = tf.reduce_sum(tf.square(momentum)) / tf.square(1.0 - power_1)
    second = tf.reduce_sum(velocity) / (1.0 - power_2)
    kappa = (1.0 - optimizer.beta_1) * (1.0 + power_1) / ((1.0 + optimizer.beta_1) * (1.0 - power_1))
    signal = tf.math.divide_no_nan(tf.math.divide_no_nan(first, second) - kappa, 1.0 - kappa)
    signal = tf.clip_by_value(signal, 0.0, 1.0)
    # The first step has one gradient, which says nothing about noise. Without gradients there is nothing to correct.
    known = tf.logical_and(step > 0.0, second > 0.0)
    return tf.where(known, tf.math.rsqrt(signal + (1.0 - signal) / ranks), 1.0)


def _at(step: Any, schedule: Schedule) -> Any:
    """Return the value of a schedule at a step."""
    value = tf.constant(float(schedule[0][1]))
    for first, later in schedule[1:]:
        value = tf.where(step >= first, float(later), value)
    return value
