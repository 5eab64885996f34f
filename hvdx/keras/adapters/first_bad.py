"""The first step in which a gradient held NaN or infinity."""

from collections.abc import Sequence

import tensorflow as tf

from hvdx.keras.adapters.base import values_of, with_values
from hvdx.keras.types import Gradient

# The cheapest tensor summary of tfdbg, in one pass without a copy: [an id, whether the tensor holds NaN or infinity].
_HEALTH = 2
_FLOAT_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class FirstBad:
    """Record of the first step in which a gradient of this rank held NaN or infinity; part of the training function.

    Attributes:
        found: int64[2] variable: number of the step, counted from 1, and index of the gradient; [0, 0] if none.

    Example:
        >>> first = FirstBad()
        >>> seen = first.look([tf.constant([1.0]), tf.constant([float("nan")])], tf.constant(7, tf.int64))
        >>> first.found.numpy().tolist()
        [7, 1]
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self.found = tf.Variable([0, 0], dtype=tf.int64, trainable=False)

    def reset(self) -> None:
        """Clear the record."""
        self.found.assign([0, 0])

    def look(self, gradients: Sequence[Gradient], step: tf.Tensor) -> list[Gradient]:
        """Record the step if one of its gradients is the first to hold NaN or infinity.

        Args:
            gradients: those that are not floating-point count as finite.
            step: int64 scalar, number of the step.

        Returns:
            The gradients after they have been read: the all-reduce can then write to their memory.
        """
        if not gradients:
            return []
        read = [_health(values_of(g)) for g in gradients]
        bad = tf.stack(read)[:, 1]
        with tf.device("CPU:0"):
            now = tf.stack([step, tf.argmax(bad, output_type=tf.int64)])
            first = tf.logical_and(tf.reduce_any(bad > 0), self.found[0] == 0)
            self.found.assign(tf.where(first, now, self.found))
        return [with_values(g, _after(r, values_of(g))) for g, r in zip(gradients, read, strict=True)]


def bad_flags(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return float32[n]: 1 for each tensor that holds NaN or infinity, 0 for the others."""
    return tf.stack([_health(value) for value in values])[:, 1]


def _after(read: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([read]):
        return tf.identity(value)


def _health(value: tf.Tensor) -> tf.Tensor:
    if value.dtype not in _FLOAT_DTYPES:
        return tf.zeros(2)
    return tf.raw_ops.DebugNumericSummaryV2(
        input=value, output_dtype=tf.float32, tensor_debug_mode=_HEALTH, tensor_id=0
    )
