"""The losses of a training step: those of one process with the rows of all ranks.

`adapters/rows.py` has the arithmetic. Regularisation, which is the same on all ranks, needs no factor. Neither does a
loss that is a mean over the rows, as most are.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from hvdx.comm import Comm
from hvdx.keras.adapters import rows
from hvdx.keras.fit.batches import Plan
from hvdx.keras.seams.losses import is_builtin, weights_of
from hvdx.keras.seams.replacing import Method
from hvdx.strategies import Strategy
from hvdx.strategies.contract import EACH_STEP


class Losses:
    """Reduction of the losses of the step that is being traced.

    Args:
        comm: the ranks.
        strategy: strategy of the fit.
        plan: batches of the ranks.
        standard: whether the step is Keras' own, which adds up a loss that is not reduced.
        record: function that is told the number of values of each sum over the ranks.
        count: rows of this step, float64; None if all ranks have as many.
    """

    def __init__(
        self,
        comm: Comm,
        strategy: Strategy,
        plan: Plan,
        standard: bool,
        record: Callable[[int], None],
        count: tf.Tensor | None,
    ):
        self._comm, self._plan, self._standard, self._record, self._count = comm, plan, standard, record, count
        # Elsewhere ranks take steps of their own.
        self._together = strategy.schedule == EACH_STEP and not strategy.asynchronous and strategy.weighs
        self._exact = self._together and strategy.placement == "gradient"
        # No adapter can weigh the gradient of a split layer's part: it is a sum over the batches of the group.
        split = comm.mesh is not None
        self._share = rows.share(comm, count, "fit") if split and self._exact and count is not None else None
        self._sums = 0

    def reduce(
        self,
        original: Method,
        loss: object,
        values: tf.Tensor,
        sample_weight: object = None,
        mask: object = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: object = None,
    ) -> tf.Tensor:
        """Reduce the values of a loss as Keras does, and multiply the result by the factor of this rank."""
        reduced = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        values = tf.convert_to_tensor(values)
        # A number already is a mean over the rows, or nobody knows.
        if self._together and values.shape.rank != 0:
            reduced = self._multiplied(reduced, loss, values, sample_weight, mask, reduction)
        return reduced if self._share is None else _with_gradient_times(reduced, self._share)

    def _multiplied(
        self,
        reduced: tf.Tensor,
        loss: object,
        values: tf.Tensor,
        sample_weight: object,
        mask: object,
        reduction: str | None,
    ) -> tf.Tensor:
        """Return a reduced loss times the factor of this rank; see `reduce`."""
        if reduction in (None, "none"):
            return _with_gradient_times(reduced, self._of_sum()) if self._standard else reduced
        if reduction == "sum":
            return self._times(reduced, self._of_sum())
        if not self._exact:
            return reduced
        # Keras returns an empty batch as it is.
        reduced = tf.reduce_sum(reduced)
        denominator = self._denominator(loss, values, sample_weight, mask, reduction)
        return reduced if denominator is None else self._times(reduced, self._of_mean(denominator))

    def _of_sum(self) -> float | tf.Tensor:
        """Return the factor of a sum: the number of ranks, or of rows everywhere for each row here."""
        if not self._exact or (self._count is None and not self._comm.survives):
            return float(self._comm.size)
        mine = self._count if self._count is not None else tf.constant(1.0, tf.float64)
        (everywhere,) = self._total([mine])
        return tf.math.divide_no_nan(everywhere, mine)

    def _of_mean(self, denominator: tf.Tensor) -> tf.Tensor:
        """Return the factor of a mean over something else than rows."""
        count = self._count if self._count is not None else tf.constant(1.0, tf.float64)
        all_denominators, all_rows = self._total([denominator, count])
        return tf.math.divide_no_nan(denominator, all_denominators) * tf.math.divide_no_nan(all_rows, count)

    def _denominator(
        self, loss: object, values: tf.Tensor, sample_weight: object, mask: object, reduction: str | None
    ) -> tf.Tensor | None:
        """Return the number by which Keras divides the sum; None if it is the same multiple of the rows on all ranks.

        All ranks must decide alike, so only what is the same on all of them may count: the shapes without their rows,
        and the presence of a mask.
        """
        if reduction == "mean_with_sample_weight":
            values, weights = weights_of(values, sample_weight, mask, reduction)
            return _size(values) if weights is None else tf.cast(tf.reduce_sum(weights), tf.float64)
        if mask is not None:
            mask = tf.cast(mask, tf.float64)
            return tf.math.divide_no_nan(tf.reduce_sum(mask) * _size(values), _size(mask))
        of_rows = self._plan.alike and values.shape[1:].is_fully_defined()
        if not (self._standard and is_builtin(loss)):
            # A loss or a step of the user's own may have dropped values, or joined dimensions.
            known = self._plan.fixed and values.shape[0] is not None and not tf.executing_eagerly()
            of_rows = of_rows and known
        return None if of_rows else _size(values)

    def _total(self, numbers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        self._sums += 1
        self._record(len(numbers))
        return rows.total(self._comm, numbers, name_of_sum(self._sums))

    @staticmethod
    def _times(reduced: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
        return reduced * (tf.cast(factor, reduced.dtype) if isinstance(factor, tf.Tensor) else factor)


def _with_gradient_times(values: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Return values unchanged, for Keras' metric of the loss, and multiply their gradient by a factor."""

    @tf.custom_gradient
    def same(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(x), lambda upstream: upstream * tf.cast(factor, upstream.dtype)

    return same(values)


def name_of_sum(number: int) -> str:
    """Return the name of a sum of denominators over the ranks, by its number in the step."""
    return f"fit.losses.{number}"


def _size(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.size(tensor, out_type=tf.int64), tf.float64)
