"""The rows of a training step on each rank, by which the ranks' gradients and losses are weighed.

One process divides the sum over all rows of a batch by their number, or by another denominator: unmasked steps, or the
sum of the sample weights. On several ranks the mean of means is that only if the denominators are equal. So a rank's
gradient weighs as many rows as it has, and a loss whose denominator is not the number of rows is multiplied by

    (denominator / sum of denominators) * (sum of rows / rows).

A gradient weighed by rows then has the factor denominator / sum of denominators, and the mean of the losses, which
Keras also weighs by rows, is the loss of one process.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np

from hvdx.comm import Comm, GraphComm, clock
from hvdx.comm.interfaces import Reduction
from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.backend import tf
from hvdx.keras.backends import stepped
from hvdx.keras.types import Structure

#: Dtype of numbers of rows; JAX has no float64.
COUNT = "float32" if backend.name() == "jax" else "float64"


class Tally:
    """A number of this process to which Python adds, and TensorFlow in each step.

    Example:
        >>> tally = Tally()
        >>> tally.add(3.0)
        >>> tally.value()
        3.0
    """

    def __init__(self) -> None:
        self._value = 0.0
        # Made with the first graph that adds to it.
        self._in_graph: tf.Variable | None = None

    def value(self) -> float:
        """Return the sum so far."""
        return self._value + (0.0 if self._in_graph is None else float(self._in_graph.numpy()))

    def add(self, more: float) -> None:
        """Add a number."""
        self._value += more

    def add_in_graph(self, more: tf.Tensor) -> None:
        """Add a float64 scalar whenever a step runs that is being traced."""
        with tf.device("CPU:0"):
            if self._in_graph is None:
                with tf.init_scope():
                    self._in_graph = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self._in_graph.assign_add(more)


#: Rows that this rank has trained where the ranks may have different numbers of them.
taken = Tally()
#: Seconds in sums of rows over the ranks, in which this rank waits for those that compute longer.
waited = Tally()

_NO_ROWS = (
    "fit: the first input of a step has no rows to count, so steps of different sizes cannot be weighed. Do: give all "
    "ranks batches of one size, by hvdx.shard; or train in a loop of your own, which calls "
    "hvdx.keras.count_samples(optimizer, rows) before each step."
)


def rows_of(data: Structure) -> tf.Tensor:
    """Return the number of rows of a batch, float64.

    Args:
        data: data of a training step, as `train_step` takes them.

    Raises:
        ConfigError: if the first input has no rows to count.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    first = next((part for part in tf.nest.flatten(x) if part is not None), None)
    with tf.device("CPU:0"):
        if isinstance(first, tf.RaggedTensor):
            return tf.cast(first.nrows(), tf.float64)
        if isinstance(first, tf.SparseTensor):
            return tf.cast(first.dense_shape[0], tf.float64)
        if first is None or not first.shape.rank:
            raise ConfigError(_NO_ROWS)
        return tf.cast(tf.shape(first)[0], tf.float64)


def rows_in(batch: object) -> float:
    """Return the number of rows of a batch of arrays, or of tensors of JAX or PyTorch.

    Args:
        batch: as `train_step` takes it.

    Raises:
        ConfigError: if the first input has no rows to count.

    Example:
        >>> rows_in((np.zeros((3, 2)), np.zeros(3)))
        3.0
    """
    inputs = keras.tree.flatten(keras.utils.unpack_x_y_sample_weight(batch)[0])
    shape = next((tuple(part.shape) for part in inputs if part is not None), ())
    if not shape:
        raise ConfigError(_NO_ROWS)
    return float(shape[0])


def total(comm: Comm, numbers: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
    """Return the sums of numbers over the ranks. Collective, in the graph.

    Args:
        comm: the ranks.
        numbers: scalars of the dtype `COUNT`.
        name: name of the collective, the same on all ranks.
    """
    if backend.name() != "tensorflow":

        def add_up(vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
            with clock.measured(waited.add):
                return [comm.all_reduce_sum(v.astype(np.float64), name).astype(v.dtype) for v in vectors]

        (sums,) = stepped().on_host(add_up, [keras.ops.stack(list(numbers))])
        return [sums[i] for i in range(len(numbers))]
    with tf.device("CPU:0"):
        mine = tf.stack(list(numbers))
        with tf.control_dependencies([mine]):
            begin = tf.timestamp()
        if isinstance(comm, GraphComm):
            (sums,) = comm.all_reduce([mine], Reduction(average=False), name)
        else:
            from hvdx.comm.host_graph import on_host

            (sums,) = on_host(lambda vector: [comm.all_reduce_sum(vector, name)], [mine], [tf.float64])
        with tf.control_dependencies([sums]):
            waited.add_in_graph(tf.timestamp() - begin)
        return tf.unstack(tf.ensure_shape(sums, [len(numbers)]))


def share(comm: Comm, rows: tf.Tensor, name: str) -> tf.Tensor:
    """Return the weight of this rank in a mean over the ranks: its rows divided by their mean. Collective.

    Args:
        comm: the ranks.
        rows: float64 scalar, rows of this rank's step.
        name: see `total`.
    """
    # Where ranks may die, their number in the graph would be that of the ranks that traced it.
    everywhere, ranks = total(comm, [rows, tf.ones((), tf.float64)], f"{name}.rows")
    return tf.math.divide_no_nan(rows * ranks, everywhere)
