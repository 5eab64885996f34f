"""The batches of a fit on each rank: their rows, which may differ, and their number."""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from hvdx.keras.adapters.base import ROWS
from hvdx.keras.fit import data
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.keras.seams.iterators import batch_size_of, dataset_of, epoch_is_one_pass, last_batch_of


class Batches(NamedTuple):
    """What a rank knows of its batches before the first step.

    Attributes:
        steps: number of batches in an epoch; None if it is unknown.
        full: rows of a full batch; None if they are unknown.
        last: rows of the last batch; None if batches may have any number of rows.
        fixed: whether the number of rows is part of the shapes.
        shapes: shapes of the tensors of a batch without their rows.
        one_pass: whether an epoch is one pass through the data.
    """

    steps: int | None
    full: int | None
    last: int | None
    fixed: bool
    shapes: tuple[str, ...]
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
    specs = [s for s in tf.nest.flatten(getattr(dataset, "element_spec", ())) if hasattr(s, "shape")]
    shapes = [s.shape for s in specs if s.shape.rank]
    fixed = bool(shapes) and all(shape[0] is not None for shape in shapes)
    full = shapes[0][0] if fixed else batch_size_of(iterator) or data.batch_size(dataset)
    last = full if fixed else last_batch_of(iterator)
    one_pass = iterator is not None and epoch_is_one_pass(iterator)
    return Batches(steps, full, last, fixed, tuple(str(s[1:]) for s in shapes), one_pass)


def agreed(offered: Sequence[Batches], may_idle: bool) -> Plan:
    """Return what the ranks know together.

    Args:
        offered: batches of each rank.
        may_idle: whether ranks can take part in the steps of others.
    """
    first = offered[0]
    steps = tuple(batches.steps or 0 for batches in offered)
    return Plan(
        even=first.last is not None and len({(b.steps, b.full, b.last) for b in offered}) == 1,
        fixed=all(b.fixed for b in offered),
        alike=len({b.shapes for b in offered}) == 1,
        full=float(max((b.full or 0 for b in offered), default=0) or ROWS),
        steps=steps,
        idles=may_idle and len(set(steps)) > 1 and min(steps) > 0 and all(b.one_pass for b in offered),
    )
