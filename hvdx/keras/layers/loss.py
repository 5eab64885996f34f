"""Loss and metric of a softmax over classes that no rank holds whole."""

import keras
import tensorflow as tf

from hvdx.errors import ConfigError
from hvdx.keras.layers import collectives
from hvdx.keras.layers.group import joined_mesh
from hvdx.keras.seams.layers import set_mask, set_metric_function
from hvdx.keras.weight_parts import tensors_of


@keras.saving.register_keras_serializable("hvdx")
class SplitSparseCategoricalCrossentropy(keras.losses.SparseCategoricalCrossentropy):
    """`keras.losses.SparseCategoricalCrossentropy` of logits whose classes are split over the ranks of a group.

    The predictions are the output of `SplitDense(classes, gather_output=False)`: this rank's classes of the rows of
    the group's batches. The labels and sample weights are those of this rank's batch, and so is the loss. The ranks
    exchange three numbers a row: the maximum, the sum of exponentials, and the target's logit. With groups of one rank
    it is the loss of Keras.

    Args:
        from_logits: must be True.
        ignore_class: label of rows that are left out of the loss.
        reduction, name, dtype: see `keras.losses.SparseCategoricalCrossentropy`.

    Raises:
        ConfigError: if `from_logits` is False. On all ranks of the group in a step, if the predictions have other rows
            than those of the group, or a label is no class.

    Example:
        >>> loss = SplitSparseCategoricalCrossentropy()
        >>> round(float(loss(keras.ops.array([1]), keras.ops.array([[0.0, 0.0]]))), 4)
        0.6931

    Source: Shoeybi et al. 2019, "Megatron-LM", which exchanges the three numbers by two all-reduces and not by one
    all-gather.
    """

    #: Class of the loss that `hvdx.keras.gather` puts in the place of this one.
    plain_class = keras.losses.SparseCategoricalCrossentropy

    def __init__(
        self,
        from_logits: bool = True,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        name: str = "sparse_categorical_crossentropy",
        dtype: str | keras.DTypePolicy | None = None,
    ):
        if not from_logits:
            raise ConfigError(
                "SplitSparseCategoricalCrossentropy: from_logits: expected True, got False. Leave the softmax out of "
                "the last layer; the loss computes it over all ranks."
            )
        super().__init__(from_logits=True, ignore_class=ignore_class, reduction=reduction, name=name, dtype=dtype)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Return the loss of each row of this rank's batch.

        Args:
            y_true: labels of this rank's batch, [...] or [..., 1].
            y_pred: this rank's classes of the logits of the group's rows, [..., classes].
        """
        mesh = joined_mesh()
        if mesh is None:
            return super().call(y_true, y_pred)
        ranks, labels = tensors_of(mesh), _labels(y_true, y_pred)
        logits = tf.reshape(y_pred, [-1, y_pred.shape[-1]])
        everyone, counts, first = ranks.gather_labels(tf.reshape(labels, [-1]), logits, self.ignore_class)
        losses = tf.reshape(collectives.softmax_losses(ranks, logits, everyone, counts, first), tf.shape(labels))
        losses.set_shape(labels.shape)
        if self.ignore_class is not None:
            valid = tf.not_equal(labels, self.ignore_class)
            losses = tf.where(valid, losses, 0)
            # Keras leaves these rows out of the mean, too.
            set_mask(losses, valid)
        return losses


@keras.saving.register_keras_serializable("hvdx")
class SplitSparseCategoricalAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """`keras.metrics.SparseCategoricalAccuracy` of predictions whose classes are split over the ranks of a group.

    Args:
        name, dtype: see `keras.metrics.SparseCategoricalAccuracy`.

    Example:
        >>> metric = SplitSparseCategoricalAccuracy()
        >>> _ = metric.update_state(keras.ops.array([1, 0]), keras.ops.array([[0.0, 1.0], [0.0, 1.0]]))
        >>> float(metric.result())
        0.5
    """

    #: Class of the metric that `hvdx.keras.gather` puts in the place of this one.
    plain_class = keras.metrics.SparseCategoricalAccuracy

    def __init__(self, name: str = "sparse_categorical_accuracy", dtype: str | keras.DTypePolicy | None = None):
        super().__init__(name=name, dtype=dtype)
        set_metric_function(self, _matches)


def _matches(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Return 1 for each row of this rank's batch whose largest prediction is that of its label, else 0.

    Args:
        y_true: labels of this rank's batch, [...] or [..., 1].
        y_pred: this rank's classes of the predictions of the group's rows, [..., classes].
    """
    mesh = joined_mesh()
    if mesh is None:
        return keras.metrics.sparse_categorical_accuracy(y_true, y_pred)
    ranks, labels = tensors_of(mesh), _labels(y_true, y_pred)
    rows = tf.reshape(y_pred, [-1, y_pred.shape[-1]])
    # Labels that are no classes count as misses, as in Keras; only the numbers of rows and classes are needed.
    _, counts, first = ranks.gather_labels(tf.zeros_like(tf.reshape(labels, [-1])), rows, None)
    top, best = tf.reduce_max(rows, axis=1), tf.argmax(rows, axis=1) + first
    # One exchange for both; float64 holds every number of a class.
    mine = tf.stack([tf.cast(top, tf.float64), tf.cast(best, tf.float64)], axis=1)
    received = ranks.columns_to_rows(mine, counts, [2 * rank for rank in range(ranks.size + 1)])
    classes = tf.gather(received[:, 1::2], tf.argmax(received[:, ::2], axis=1), batch_dims=1)
    return tf.cast(tf.equal(tf.reshape(tf.cast(classes, tf.int64), tf.shape(labels)), labels), keras.config.floatx())


def _labels(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Return the labels as int64 without a last dimension of 1 that the predictions lack."""
    labels = tf.cast(y_true, tf.int64)
    return tf.squeeze(labels, -1) if len(labels.shape) == len(y_pred.shape) and labels.shape[-1] == 1 else labels
