"""Collectives of split layers with their gradients.

Each function is linear in its tensor. The gradient of a linear map is its transpose, so that the gradient of the sum of
all ranks' losses arrives at each rank: no factor of the number of ranks appears here. `average_gradient` divides the
gradients of parts once, by the number of batches in the group.

Everywhere `ranks` are the collectives of the group, and `counts`, int64[ranks], are the rows of each rank.

The gradients that Horovod registers for its own collectives average or sum inconsistently; none of them is used.
Source: https://github.com/horovod/horovod/issues/2654
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from hvdx.comm.split_tensors import Lookup, SplitTensors
from hvdx.keras.types import TensorLike

#: Linear map of one tensor.
Linear: TypeAlias = Callable[[tf.Tensor], tf.Tensor]


def _linear(forward: Linear, backward: Linear, tensor: tf.Tensor) -> tf.Tensor:
    """Apply a linear map whose gradient is another."""

    @tf.custom_gradient
    def apply(inputs: tf.Tensor) -> tuple[tf.Tensor, Linear]:
        return forward(inputs), backward

    return apply(tensor)


def gather_rows(ranks: SplitTensors, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the rows of the group and the number of rows of each rank; the gradient sums over the ranks.

    Args:
        rows: [rows of this rank, k].
    """

    @tf.custom_gradient
    def gather(block: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]:
        gathered, counts = ranks.gather_rows(block)
        return (gathered, counts), lambda gradient, _: ranks.sum_rows(gradient, counts)

    return gather(rows)


def sum_rows(ranks: SplitTensors, terms: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Return this rank's rows of the sum over the ranks; the gradient gathers rows.

    Args:
        terms: [rows of the group, k].
    """
    return _linear(lambda t: ranks.sum_rows(t, counts), lambda g: ranks.gather_rows(g)[0], terms)


def columns_to_rows(ranks: SplitTensors, columns: tf.Tensor, counts: tf.Tensor, bounds: Sequence[int]) -> tf.Tensor:
    """Return all columns of this rank's rows; the gradient goes the other way.

    Args:
        columns: [rows of the group, columns of this rank].
        bounds: bounds of the ranks' columns.
    """
    return _linear(
        lambda c: ranks.columns_to_rows(c, counts, bounds), lambda g: ranks.rows_to_columns(g, counts, bounds), columns
    )


def rows_of_ids(ranks: SplitTensors, rows: tf.Tensor, lookup: Lookup) -> tf.Tensor:
    """Return the row of each id of this rank; the gradient of each id goes to the rank that holds its row.

    A row travels forwards once to each rank that reads it. Gradients of an id that occurs several times are not added
    up, as in Keras, whose optimisers and norms square each of them.

    Args:
        rows: [asked, k], the rows `lookup.rows` of this rank's part.
        lookup: ids of this rank, and rows that the group reads from this rank.
    """

    def forward(block: tf.Tensor) -> tf.Tensor:
        received = ranks.send_rows(tf.gather(block, lookup.first), lookup.distinct_asked, lookup.distinct)
        return tf.gather(received, lookup.place)

    def backward(gradient: tf.Tensor) -> tf.Tensor:
        return ranks.send_rows(tf.gather(gradient, lookup.order), lookup.ids, lookup.asked)

    return _linear(forward, backward, rows)


def softmax_losses(
    ranks: SplitTensors, logits: tf.Tensor, labels: tf.Tensor, counts: tf.Tensor, first: tf.Tensor
) -> tf.Tensor:
    """Return the cross-entropy of this rank's rows with the softmax over the classes of all ranks.

    The gradient of the logits is that of the sum of all ranks' losses.

    Args:
        logits: [rows of the group, classes of this rank], float32 or float64.
        labels: int64[rows of the group].
        first: int64, first class of this rank.

    Returns:
        [rows of this rank].
    """
    width = tf.shape(logits, tf.int64)[1]

    @tf.custom_gradient
    def losses(scores: tf.Tensor) -> tuple[tf.Tensor, Linear]:
        hot = tf.one_hot(labels - first, tf.cast(width, tf.int32), dtype=scores.dtype)
        # Finite even if all logits of this rank are -infinity.
        top = tf.maximum(tf.reduce_max(scores, axis=1), scores.dtype.min)
        total = tf.reduce_sum(tf.exp(scores - top[:, None]), axis=1)
        target = tf.reduce_sum(tf.where(hot > 0, scores, 0), axis=1)
        gathered, _ = ranks.gather_rows(tf.stack([top, total, target], axis=1))
        tops, totals, targets = tf.unstack(tf.reshape(gathered, [ranks.size, -1, 3]), axis=2)
        peak = tf.reduce_max(tops, axis=0)
        log_total = peak + tf.math.log(tf.reduce_sum(totals * tf.exp(tops - peak), axis=0))
        begin = tf.reduce_sum(counts[: ranks.rank])
        mine = (log_total - tf.reduce_sum(targets, axis=0))[begin : begin + counts[ranks.rank]]

        def backward(gradient: tf.Tensor) -> tf.Tensor:
            of_rows, _ = ranks.gather_rows(gradient[:, None])
            return (tf.exp(scores - log_total[:, None]) - hot) * of_rows

        return mine, backward

    return losses(logits)


def average_gradient(weight: TensorLike, batches: int) -> tf.Tensor:
    """Return a weight unchanged, and divide its gradient.

    Each rank of the group computes a loss of its own batch. The gradient of a part is the sum over the group's losses;
    without splitting it would be the mean.

    Args:
        batches: number of ranks in the group.
    """

    @tf.custom_gradient
    def identity(value: tf.Tensor) -> tuple[tf.Tensor, Linear]:
        return tf.identity(value), lambda gradient: gradient / tf.cast(batches, gradient.dtype)

    return identity(tf.convert_to_tensor(weight))
