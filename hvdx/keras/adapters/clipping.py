"""Clipping of gradients by a norm, where some of them are parts of split weights."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hvdx import comm as world
from hvdx.comm.mesh import mesh_of
from hvdx.keras.adapters.base import values_of, with_values
from hvdx.keras.types import Gradient, Variable
from hvdx.keras.weight_parts import part_of, tensors_of


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
        variables: variables of the gradients.
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
