"""Samples of the gradients of an optimiser that divides by their second moment.

A strategy compares the samples of all ranks; see `hvdx.strategies.threshold.gradient_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras

from hvdx.keras.backend import is_a, tf
from hvdx.keras.seams.optimizers import owner_of_update_step, velocity_of
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.weight_parts import part_of
from hvdx.strategies.threshold.gradient_noise import SAMPLE

# Optimisers whose update is proportional to the gradients of a rank, divided by the root of the second moment.
# Lamb is none of them: it scales its updates to the norm of the weights.
_KINDS = (keras.optimizers.Adam, keras.optimizers.Nadam, keras.optimizers.RMSprop)
# A sample is taken from this number of the largest variables, because each costs some operations of the graph.
_MOST_VARIABLES = 8


def divides(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether an optimiser divides by the root of the second moment of its gradients, as Keras' Adam does.

    Args:
        optimizer: Keras optimiser, not a loss-scale optimiser.

    Example:
        >>> divides(keras.optimizers.AdamW()), divides(keras.optimizers.Lion())
        (True, False)
    """
    if not isinstance(optimizer, _KINDS) or getattr(optimizer, "centered", False):
        return False
    # A subclass with an update step of its own may divide by something else.
    return owner_of_update_step(optimizer) in _KINDS


def decay_of(optimizer: keras.optimizers.Optimizer) -> float:
    """Return the share of a second moment that an optimiser keeps in a step; see `divides`."""
    return float(optimizer.rho if isinstance(optimizer, keras.optimizers.RMSprop) else optimizer.beta_2)


def sample(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    moves: bool = True,
) -> list[tf.Tensor]:
    """Return some elements of the gradients, each divided by the root of its second moment.

    The elements are those at other positions in every step, the same on all ranks.

    Args:
        optimizer: optimiser that has just taken a step with the gradients, and has not yet counted it; see `divides`.
        gradients: one per variable; of `tf.IndexedSlices` no elements are taken.
        variables: variables of the optimiser.
        moves: False for the same positions in every step.

    Returns:
        One float32 vector per variable, which may be empty. They have `SAMPLE` elements together or a few more, and as
        many from the parts of split layers.
    """
    sizes = counts(gradients, variables)
    step = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64)
    decay = decay_of(optimizer)
    where = step if moves else tf.zeros_like(step)
    correction = 1.0 - decay ** (tf.cast(step, tf.float32) + 1.0)
    none = tf.zeros(0)
    return [
        _elements(g, velocity_of(optimizer, v), where, count) * tf.sqrt(correction) if count else none
        for g, v, count in zip(gradients, variables, sizes, strict=True)
    ]


def counts(gradients: Sequence[Gradient], variables: Sequence[Variable]) -> list[int]:
    """Return the number of elements in a `sample` of each variable, in proportion to the sizes of the largest.

    Args:
        gradients, variables: see `sample`.
    """
    sizes = [0 if is_a(g, "IndexedSlices") else math.prod(v.shape) for g, v in zip(gradients, variables, strict=True)]
    found = [0] * len(sizes)
    # The sizes of parts of split layers differ between the ranks that exchange whole weights.
    for is_part in (False, True):
        mine = [i for i, v in enumerate(variables) if (part_of(v) is not None) == is_part]
        largest = sorted(mine, key=lambda i: -sizes[i])[:_MOST_VARIABLES]
        total = max(sum(sizes[i] for i in largest), 1)
        for i in largest:
            found[i] = min(sizes[i], -(-SAMPLE * sizes[i] // total))
    return found


def _elements(gradient: Gradient, velocity: tf.Variable, step: tf.Tensor, count: int) -> tf.Tensor:
    """Return some elements of gradient / sqrt(velocity); 0 where the velocity is 0."""
    size = math.prod(velocity.shape)
    # Multiples of a large prime visit the positions evenly.
    where = (step * 2654435761 + tf.range(count, dtype=tf.int64) * (size // count)) % size
    g, v = (
        tf.cast(tf.gather(tf.reshape(tf.convert_to_tensor(t), [-1]), where), tf.float32) for t in (gradient, velocity)
    )
    return tf.math.divide_no_nan(g, tf.sqrt(v))
