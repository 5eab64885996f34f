"""Batch normalisation over the samples of all ranks."""

from collections.abc import Callable

import keras
import tensorflow as tf

from hvdx import comm as world
from hvdx.comm import GraphComm
from hvdx.comm.interfaces import Reduction
from hvdx.keras import backend
from hvdx.keras.horovod.collectives import name_of
from hvdx.keras.seams.layers import CombinedBatchNormalization


@keras.saving.register_keras_serializable("hvdx")
class SyncBatchNormalization(CombinedBatchNormalization):
    """Batch normalisation with mean and variance over the batches of all ranks in training.

    Mean and variance of rank r over its n_r samples, m_r and v_r, become m = sum n_r m_r / n and
    v = sum n_r (v_r + (m_r - m)^2) / n, with n = sum n_r. The gradient passes through them on all ranks, so that an
    optimiser which averages gradients takes the step of one process with the whole batch. Every rank must call the
    layer the same number of times. XLA cannot compile it.

    Args:
        fused: must be False.
        options: arguments of `keras.layers.BatchNormalization`.

    Raises:
        ValueError: if `fused` is not False.

    Example:
        >>> layer = SyncBatchNormalization()
        >>> layer(tf.constant([[1.0], [3.0]]), training=True).numpy().round(1).tolist()  # in a world of one
        [[-1.0], [1.0]]

    Source: Horovod 0.28, `horovod.tensorflow.SyncBatchNormalization`, which gives all ranks the same weight. The
    formula, which avoids cancellation, is from Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample
    Variance".
    """

    def __init__(self, fused: bool = False, **options: object):
        if fused is not False:
            raise ValueError(f"SyncBatchNormalization: fused: expected False, got {fused!r}. Do: leave it out.")
        backend.needs_tensorflow("SyncBatchNormalization")
        options.pop("synchronized", None)
        super().__init__(**options)
        self.supports_jit = False

    def combine(
        self, inputs: tf.Tensor, mask: tf.Tensor | None, axes: list[int], mean: tf.Tensor, variance: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance over all ranks."""
        comm = world.graph(engine="auto")
        if comm.size == 1:
            return mean, variance
        mean, variance = tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
        count = _count(inputs, mask, axes, mean.dtype)
        mine = tf.concat([[count], mean, variance], axis=0)[None]
        ranks = _gathered(mine, comm)
        counts, (means, variances) = ranks[:, :1], tf.split(ranks[:, 1:], 2, axis=1)
        total = tf.maximum(tf.reduce_sum(counts), 1.0)
        whole = tf.reduce_sum(counts * means, axis=0) / total
        return whole, tf.reduce_sum(counts * (variances + tf.square(means - whole)), axis=0) / total


def _count(inputs: tf.Tensor, mask: tf.Tensor | None, axes: list[int], dtype: tf.DType) -> tf.Tensor:
    """Return the number of values of a channel on this rank."""
    if mask is not None:
        # A mask has all dimensions except the channels; Keras broadcasts it over those that it lacks.
        return tf.reduce_sum(tf.cast(mask, dtype))
    return tf.cast(tf.reduce_prod(tf.gather(tf.shape(inputs), list(axes))), dtype)


def _gathered(row: tf.Tensor, comm: GraphComm) -> tf.Tensor:
    """Gather the rows of all ranks; the gradient of a row is summed over the ranks."""

    @tf.custom_gradient
    def gather(row: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            (total,) = comm.all_reduce([upstream], Reduction(average=False), name_of("batch_norm.gradient", upstream))
            return total[comm.rank : comm.rank + 1]

        return tf.reshape(comm.all_gather(row, name_of("batch_norm", row)), [comm.size, row.shape[1]]), gradient

    return gather(row)
