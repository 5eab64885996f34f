"""`keras.utils.PyDataset` as the data of a `fit` whose epochs are no passes through the data.

Keras calls the hooks of a `PyDataset` around an epoch that takes all its batches. After an epoch that ended earlier it
refuses the next one.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def end_epoch(iterator: Any) -> None:
    """Let the data end an epoch in which not all batches were taken; do nothing for other data.

    Args:
        iterator: iterator of the `fit`, see `callback_list.epoch_iterator`.
    """
    adapter: Any = getattr(iterator, "data_adapter", None)
    if not _reads_py_dataset(adapter):
        return
    adapter.on_epoch_end()
    # With workers, Keras keeps the batches that were read ahead for the next epoch. It would begin with them, and the
    # batches left over would become more with each epoch.
    ahead = getattr(adapter.enqueuer, "ready_queue", None)
    while ahead is not None and not ahead.empty():
        ahead.get()


def repeat(iterator: Any, dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, Callable[[], None]]:
    """Repeat the data of a `fit`, and call a `PyDataset`'s hooks around each pass in place of each epoch.

    Args:
        iterator: iterator of the `fit`.
        dataset: its data.

    Returns:
        The repeated dataset, and a function to call after the last step.
    """
    adapter: Any = getattr(iterator, "data_adapter", None)
    if not _reads_py_dataset(adapter):
        return dataset.repeat(), lambda: None
    passes = _Passes(adapter.on_epoch_begin, adapter.on_epoch_end)
    adapter.on_epoch_begin = adapter.on_epoch_end = lambda: None
    numbers = tf.data.Dataset.counter().map(lambda number: tf.numpy_function(passes.begin, [number], tf.int64))
    return numbers.flat_map(lambda _: dataset), passes.finish


class _Passes:
    """Hooks of a `PyDataset` around each pass.

    Args:
        begin, end: `on_epoch_begin` and `on_epoch_end` of Keras' adapter, which call those of the `PyDataset`.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]):
        self._begin, self._end = begin, end
        self._open = False

    def begin(self, number: Any) -> Any:
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


def _reads_py_dataset(adapter: Any) -> bool:
    return isinstance(getattr(adapter, "py_dataset", None), keras.utils.PyDataset)
