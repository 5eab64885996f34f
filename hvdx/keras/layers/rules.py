"""Regularisers and constraints that fit weights that are split."""

from collections.abc import Callable

import keras
import tensorflow as tf

from hvdx.comm.split_tensors import SplitTensors
from hvdx.errors import ConfigError
from hvdx.keras.types import TensorLike
from hvdx.keras.weight_parts import WeightPart

_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_NORMS = (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.UnitNorm)


def check_constraint(constraint: keras.constraints.Constraint | None, part: WeightPart, where: str) -> None:
    """Refuse a constraint that needs more than this rank's part of a weight.

    Args:
        constraint: constraint of Keras, or None.
        part: the part.
        where: owner of the weight, for the message.

    Raises:
        ConfigError: if it computes norms along the axis that is split, or is not one of Keras.
    """
    axes = getattr(constraint, "axis", None)
    axes = axes if isinstance(axes, list | tuple) else [axes]
    if constraint is None or isinstance(constraint, keras.constraints.NonNeg):
        return
    if isinstance(constraint, _NORMS) and part.axis not in [axis % len(part.shape) for axis in axes]:
        return
    each = "element" if len(part.shape) == 1 else ("row (axis=1)", "column (axis=0)")[part.axis]
    raise ConfigError(
        f"{where}: expected a constraint that acts on each {each}, got {type(constraint).__name__}, which needs the "
        "whole weight. Give it the other axis, leave it out, or use a layer of Keras."
    )


def split_regularizer(
    regularizer: keras.regularizers.Regularizer | None, ranks: SplitTensors, where: str
) -> Callable[[TensorLike], tf.Tensor] | None:
    """Return a regulariser whose loss is that of the whole weight, and whose gradient that of this rank's part.

    Args:
        regularizer: regulariser of Keras, or None.
        ranks: collectives of the group.
        where: owner of the weight, for the message.

    Raises:
        ConfigError: if the loss is not a sum over the elements.
    """
    if regularizer is None:
        return None
    if not isinstance(regularizer, _SUMS):
        raise ConfigError(
            f"{where}: expected the regularizer L1, L2 or L1L2, got {type(regularizer).__name__}, which may need the "
            "whole weight. Use one of these, or a layer of Keras."
        )

    def loss(part: TensorLike) -> tf.Tensor:
        @tf.custom_gradient
        def total(mine: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return ranks.sum(mine), lambda gradient: gradient

        return total(tf.convert_to_tensor(regularizer(part)))

    return loss
