"""The batches of a fit, whose rows and number may differ by rank: a step is that of one process with all rows.

`adapters/rows.py` has the arithmetic. Regularisation, which is the same on all ranks, needs no factor. Neither does a
loss that is a mean over the rows, as most are. A rank that has no batch left takes part in the steps of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras

from hvdx.comm import Comm
from hvdx.keras import backend
from hvdx.keras.adapters import rows
from hvdx.keras.adapters.base import ROWS, Call
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.backend import tf
from hvdx.keras.fit import data
from hvdx.keras.fit.array_batches import ArrayBatches
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.keras.seams.iterators import (
    arrays_of,
    batch_size_of,
    dataset_of,
    epoch_is_one_pass,
    last_batch_of,
    sampler_of,
)
from hvdx.keras.seams.losses import is_builtin, weights_of
from hvdx.keras.seams.replacing import Method
from hvdx.keras.types import Gradient, TensorLike, Variable
from hvdx.strategies import Strategy
from hvdx.strategies.contract import EACH_STEP


class Batches(NamedTuple):
    """What a rank knows of its batches before the first step.

    Attributes:
        steps: number of batches in an epoch; None if it is unknown.
        full: rows of a full batch; None if they are unknown.
        last: rows of the last batch; None if batches may have any number of rows.
        fixed: whether the number of rows is part of the shapes.
        shapes: shapes of the tensors of a batch without their rows; None if a step may have others.
        one_pass: whether an epoch is one pass through the data.
    """

    steps: int | None
    full: int | None
    last: int | None
    fixed: bool
    shapes: tuple[str, ...] | None
    one_pass: bool


class Plan(NamedTuple):
    """What the ranks know of their batches together.

    Attributes:
        even: whether all ranks have equally many rows in each step.
        fixed: whether the numbers of rows are part of the shapes on all ranks.
        alike: whether the batches of all ranks have the same shapes, except for their rows.
        full: rows of a full batch, a unit.
        steps: number of batches in an epoch of each rank.
        idles: whether ranks without a batch take part in the steps of the others.
    """

    even: bool = True
    fixed: bool = True
    alike: bool = True
    full: float = ROWS
    steps: tuple[int, ...] = ()
    idles: bool = False


def of(callback: keras.callbacks.Callback) -> Batches:
    """Return the batches of the `fit` that calls a callback, in its `on_train_begin`."""
    iterator = epoch_iterator(callback)
    steps: int | None = callback.params.get("steps")
    dataset = dataset_of(iterator)
    specs = [s for s in keras.tree.flatten(getattr(dataset, "element_spec", ())) if hasattr(s, "shape")]
    shapes = [s.shape for s in specs if s.shape.rank]
    fixed = bool(shapes) and all(shape[0] is not None for shape in shapes)
    share = sampler_of(iterator) or dataset
    full = shapes[0][0] if fixed else batch_size_of(iterator) or data.batch_size(share)
    last = full if fixed else last_batch_of(iterator)
    division = data.division_in(share)
    if division is not None:
        # TensorFlow knows no batch size of such a share, whose batches are full wherever they are equal.
        last = data.batch_size(share) if division.is_even else None
    one_pass = iterator is not None and epoch_is_one_pass(iterator)
    known: tuple[str, ...] | None = tuple(str(s[1:]) for s in shapes)
    if backend.name() != "tensorflow":
        # There a step shows the shapes of its own batch, and a graph of TensorFlow those of all.
        inputs = [a.shape for a in keras.tree.flatten(arrays_of(iterator)) if a is not None]
        arrays = dataset.shapes if isinstance(dataset, ArrayBatches) else inputs
        still = all(s[1:].is_fully_defined() for s in shapes)
        known = None if not (still and (shapes or arrays)) else known or tuple(str(s[1:]) for s in arrays)
    return Batches(steps, full, last, fixed, known, one_pass)


def agreed(offered: Sequence[Batches], may_idle: bool) -> Plan:
    """Return what the ranks know together; with `may_idle`, ranks can take part in the steps of others."""
    first = offered[0]
    steps = tuple(batches.steps or 0 for batches in offered)
    return Plan(
        even=first.last is not None and len({(b.steps, b.full, b.last) for b in offered}) == 1,
        fixed=all(b.fixed for b in offered),
        alike=first.shapes is not None and len({b.shapes for b in offered}) == 1,
        full=float(max((b.full or 0 for b in offered), default=0) or ROWS),
        steps=steps,
        idles=may_idle and len(set(steps)) > 1 and min(steps) > 0 and all(b.one_pass for b in offered),
    )


def in_step(strategy: Strategy) -> bool:
    """Return whether all ranks take each step of a strategy together, and each weighs as many rows as it has."""
    return strategy.schedule == EACH_STEP and not strategy.asynchronous and strategy.weighs


class Losses:
    """Reduction of the losses of the step that is being traced.

    Args:
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
        self._together = in_step(strategy)
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
        values = keras.ops.convert_to_tensor(values)
        # A number already is a mean over the rows, or nobody knows.
        if self._together and _extents(values) != ():
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
        reduced = keras.ops.sum(reduced)
        denominator = self._denominator(loss, values, sample_weight, mask, reduction)
        return reduced if denominator is None else self._times(reduced, self._of_mean(denominator))

    def _of_sum(self) -> float | tf.Tensor:
        """Return the factor of a sum: the number of ranks, or of rows everywhere for each row here."""
        if not self._exact or (self._count is None and not self._comm.survives):
            return float(self._comm.size)
        mine = self._count if self._count is not None else _count(1.0)
        (everywhere,) = self._total([mine])
        return keras.ops.divide_no_nan(everywhere, mine)

    def _of_mean(self, denominator: tf.Tensor) -> tf.Tensor:
        """Return the factor of a mean over something else than rows."""
        count = self._count if self._count is not None else _count(1.0)
        all_denominators, all_rows = self._total([denominator, count])
        return keras.ops.divide_no_nan(denominator, all_denominators) * keras.ops.divide_no_nan(all_rows, count)

    def _denominator(
        self, loss: object, values: tf.Tensor, sample_weight: object, mask: object, reduction: str | None
    ) -> tf.Tensor | None:
        """Return the number by which Keras divides the sum; None if it is the same multiple of the rows on all ranks.

        All ranks must decide alike, so only what is the same on all of them may count: the shapes without their rows,
        and the presence of a mask.
        """
        if reduction == "mean_with_sample_weight":
            values, weights = weights_of(values, sample_weight, mask, reduction)
            return _size(values) if weights is None else _count(keras.ops.sum(weights))
        if mask is not None:
            mask = _count(mask)
            return keras.ops.divide_no_nan(keras.ops.sum(mask) * _size(values), _size(mask))
        extents = _extents(values)
        of_rows = self._plan.alike and extents is not None and None not in extents[1:]
        if not (self._standard and is_builtin(loss)):
            # A loss or a step of the user's own may have dropped values, or joined dimensions.
            traced = backend.name() == "tensorflow" and not tf.executing_eagerly()
            known = self._plan.fixed and values.shape[0] is not None and traced
            of_rows = of_rows and known
        return None if of_rows else _size(values)

    def _total(self, numbers: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        self._sums += 1
        self._record(len(numbers))
        return rows.total(self._comm, numbers, _name_of_sum(self._sums))

    @staticmethod
    def _times(reduced: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
        return reduced * (factor if isinstance(factor, float) else keras.ops.cast(factor, reduced.dtype))


class Idling:
    """Training function that takes this rank's steps, and then those of the others with weight 0.

    Args:
        model: compiled model, with its training function.
        own, all: number of batches of this rank, and of the rank that has the most.
        events: what this rank's steps exchange, in order: calls of optimisers, and numbers of values that are summed.

    Attributes:
        function: the model's own training function.
    """

    def __init__(self, model: keras.Model, comm: Comm, own: int, all: int, events: Sequence[Call | int]):
        self._model, self._comm, self._own, self._all, self._events = model, comm, own, all, events
        self.function: Callable[..., object] = model.train_function
        self._at_once = model.steps_per_execution
        # As this rank's own steps: eager and traced operations may round differently.
        eager = model.run_eagerly or tf.config.functions_run_eagerly()
        self._idle: Callable[[], object] | None = self._step if eager else None
        self._logs: object = None
        # With constant gradients, TensorFlow would call Horovod while it optimises the graph.
        with tf.device("CPU:0"):
            self._zero = tf.Variable(0.0, trainable=False)
        self._batch = 0

    def resize(self, own: int, all: int) -> Idling:
        """Take other numbers of batches from the next step on."""
        self._own, self._all, self._batch = own, all, 0
        return self

    def begin_batch(self, batch: int) -> None:
        """Begin the step with this number in its epoch, from 0."""
        self._batch = batch

    def __call__(self, iterator: object) -> object:
        # A callback that calls `Distribute` may not pass on the begin of a step.
        begin, self._batch = self._batch, self._batch + self._at_once
        own = max(0, min(self._at_once, self._own - begin))
        if own:
            self._logs = self.function(iterator)
        for _ in range(min(self._at_once, self._all - begin) - own):
            if self._idle is None:
                # Not called as a function, of which TensorFlow would say that it is traced in each fit.
                self._idle = tf.function(self._step, autograph=False).get_concrete_function()
            self._idle()
        return self._logs

    def _step(self) -> None:
        events, sums = list(self._events), 0
        for event in events:
            if isinstance(event, int):
                sums += 1
                rows.total(self._comm, [tf.zeros((), tf.float64)] * event, _name_of_sum(sums))
            else:
                self._repeat(event)

    def _repeat(self, call: Call) -> None:
        adapter = call.adapter
        (optimizer,) = (o for o in optimizers_of(self._model) if adapter_of(o) is adapter)
        adapter.begin_step()
        adapter.count_samples(0)
        zeros = [self._zeros(v, indices) for v, indices in zip(call.variables, call.indices, strict=True)]
        adapter.idle(optimizer, zeros, call.variables)
        adapter.begin_step()

    def _zeros(self, variable: Variable, indices: tf.DType | None) -> Gradient:
        """Return a gradient of zeros; with a dtype of indices, of no rows."""
        dtype, shape = keras.backend.standardize_dtype(variable.dtype), tuple(variable.shape)
        zero = tf.cast(self._zero, dtype)
        if indices is None:
            return tf.fill(shape, zero)
        none = tf.cast(self._zero, tf.int32)
        values = tf.ensure_shape(tf.fill(tf.stack([none, *shape[1:]]), zero), (None, *shape[1:]))
        return tf.IndexedSlices(values, tf.fill([none], tf.cast(none, indices)), tf.constant(shape, indices))


def add_zeros(comm: Comm, events: Sequence[Call | int]) -> None:
    """Take part in the sums of a step of the others on JAX or PyTorch; see `Idling`."""
    for number, values in enumerate([e for e in events if isinstance(e, int)], 1):
        rows.total(comm, [keras.ops.zeros((), rows.COUNT)] * values, _name_of_sum(number))


def _name_of_sum(number: int) -> str:
    """Return the name of a sum of denominators over the ranks, by its number in the step."""
    return f"fit.losses.{number}"


def _with_gradient_times(values: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Return values unchanged, for Keras' metric of the loss, and multiply their gradient by a factor."""
    if backend.name() != "tensorflow":
        return values + (factor - 1.0) * (values - keras.ops.stop_gradient(values))

    @tf.custom_gradient
    def same(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(x), lambda upstream: upstream * tf.cast(factor, upstream.dtype)

    return same(values)


def _extents(values: tf.Tensor) -> tuple[int | None, ...] | None:
    """Return the shape of a tensor; None if it is unknown."""
    return None if getattr(values.shape, "rank", 0) is None else tuple(values.shape)


def _count(number: TensorLike) -> tf.Tensor:
    return keras.ops.cast(number, rows.COUNT)


def _size(tensor: tf.Tensor) -> tf.Tensor:
    if backend.name() != "tensorflow":
        return _count(float(math.prod(tensor.shape)))
    return tf.cast(tf.size(tensor, out_type=tf.int64), tf.float64)
