"""`keras.utils.PyDataset` as the data of a `fit` whose epochs are no passes through the data.

Keras calls the hooks of a `PyDataset` around an epoch that takes all its batches. After an epoch that ended earlier it
refuses the next one.
"""

from __future__ import annotations

from collections.abc import Callable

from hvdx.keras.backend import tf
from hvdx.keras.seams import iterators
from hvdx.keras.seams.iterators import EpochIterator, drop_read_ahead, py_dataset_adapter, take_epoch_hooks


def end_epoch(iterator: EpochIterator) -> None:
    """Let the data end an epoch in which not all batches were taken; do nothing for other data.

    Args:
        iterator: iterator of the `fit`, see `epoch_iterator`.
    """
    adapter = py_dataset_adapter(iterator)
    if adapter is None:
        return
    adapter.on_epoch_end()
    # Keras keeps the batches that were read ahead for the next epoch. It would begin with them, and the batches left
    # over would become more with each epoch.
    drop_read_ahead(adapter)


def repeat(iterator: EpochIterator, dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, Callable[[], None]]:
    """Repeat the data of a `fit`, and call a `PyDataset`'s hooks around each pass in place of each epoch.

    Args:
        iterator: iterator of the `fit`.
        dataset: its data.

    Returns:
        The repeated dataset, and a function to call after the last step.
    """
    adapter = py_dataset_adapter(iterator)
    if adapter is None:
        return dataset.repeat(), lambda: None
    passes = _Passes(*take_epoch_hooks(adapter))
    numbers = tf.data.Dataset.counter().map(lambda number: tf.numpy_function(passes.begin, [number], tf.int64))
    return numbers.flat_map(lambda _: dataset), passes.finish


def begin_passes(iterator: EpochIterator, steps: int) -> Callable[[], None]:
    """Let each epoch of a fit on JAX or PyTorch take some steps of repeated data; else as `repeat`."""
    adapter = py_dataset_adapter(iterator)
    passes = _Passes(*(take_epoch_hooks(adapter) if adapter is not None else (lambda: None, lambda: None)))
    iterators.begin_passes(iterator, steps, passes.begin)
    return passes.finish


class _Passes:
    """Hooks of a `PyDataset` around each pass.

    Args:
        begin, end: `on_epoch_begin` and `on_epoch_end` of Keras' adapter, which call those of the `PyDataset`.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]):
        self._begin, self._end = begin, end
        self._open = False

    def begin(self, number: tf.Tensor | None = None) -> tf.Tensor | None:
        """Begin a pass, and return its number."""
        self.finish()
        self._open = True
        self._begin()
        return number

    def finish(self) -> None:
        """End the present pass, if there is one."""
        if self._open:
            self._open = False
            self._end()
