"""The iterator over the batches of a fit, and its data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, TypeAlias

import keras
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.backend import is_dataset, tf
from hvdx.keras.seams.frames import class_weight
from hvdx.keras.seams.replacing import restore
from hvdx.keras.types import PyDatasetAdapter, Structure

if TYPE_CHECKING:
    from keras.src.trainers.epoch_iterator import EpochIterator as KerasIterator

#: Iterator over the batches of a fit, which Keras keeps for all epochs.
EpochIterator: TypeAlias = "KerasIterator"
#: Number of a step, or those of the first and the last of several, and the iterator over batches.
Step: TypeAlias = tuple[int, Iterator[Structure]] | tuple[int, int, Iterator[Structure]]


class OwnBatches(DataAdapter):
    """Batches of hvdx's own, which JAX and PyTorch read in their order, whatever `fit(shuffle=)` says.

    Relies on: since Keras 3.7, `get_data_adapter` returns a `DataAdapter` unchanged. A fit calls `get_jax_iterator` or
    `get_torch_dataloader` when a pass begins.
    """

    def __iter__(self) -> Iterator[Structure]:
        raise NotImplementedError

    def get_numpy_iterator(self) -> Iterator[Structure]:
        """Begin a pass; a fit with `class_weight` weighs its rows."""
        weights = class_weight()
        return iter(self) if weights is None else (_weighed(batch, weights) for batch in self)

    get_jax_iterator = get_numpy_iterator

    def get_torch_dataloader(self) -> object:
        """Begin a pass, of PyTorch's tensors."""
        return data_adapter_utils.get_torch_dataloader(self.get_numpy_iterator())


def _weighed(batch: Structure, weights: dict[int, float]) -> Structure:
    """Return a batch with the weights of its classes, as Keras' own adapters do.

    Relies on: `data_adapter_utils.class_weight_to_sample_weights`.
    """
    x, y, given = keras.utils.unpack_x_y_sample_weight(batch)
    if y is None or given is not None:
        raise ConfigError(
            "fit: class_weight: expected batches of inputs and labels, without weights. Do: leave it out."
        )
    return x, y, data_adapter_utils.class_weight_to_sample_weights(y, weights)


def dataset_of(iterator: EpochIterator) -> tf.data.Dataset | OwnBatches | None:
    """Return the dataset that a fit reads; None if it is unknown, or if the fit reads other data.

    Relies on: `TFEpochIterator._distributed_dataset`; on JAX and PyTorch `TFDatasetAdapter._dataset`.
    """
    holder, name = _holder(iterator)
    if isinstance(holder, OwnBatches):
        return holder
    dataset = getattr(holder, name, None)
    return dataset if backend.name() == "tensorflow" or is_dataset(dataset) else None


def sampler_of(iterator: EpochIterator | None) -> OwnBatches | None:
    """Return the share of positions by which a PyTorch `DataLoader` of a fit makes its batches; None for other data.

    Relies on: `TorchDataLoaderAdapter._dataloader`.
    """
    loader = getattr(getattr(iterator, "data_adapter", None), "_dataloader", None)
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if isinstance(sampler, OwnBatches) else None


def _holder(iterator: EpochIterator) -> tuple[object, str]:
    """Return the object that holds the dataset of a fit, and the name of its attribute."""
    if backend.name() == "tensorflow":
        return iterator, "_distributed_dataset"
    return getattr(iterator, "data_adapter", None), "_dataset"


def read_from(iterator: EpochIterator, dataset: tf.data.Dataset) -> None:
    """Make a fit read another dataset from its next pass on.

    Relies on: the attribute of `dataset_of` is read when a pass begins.
    """
    setattr(*_holder(iterator), dataset)


def take_steps(iterator: EpochIterator, dataset: tf.data.Dataset, steps: int) -> None:
    """Make each epoch of a fit take some steps of a dataset that repeats.

    Relies on: `EpochIterator` ends an epoch after `steps_per_epoch` steps, or after `_num_batches` if known.
    """
    iterator._distributed_dataset, iterator._num_batches = dataset, None
    iterator.steps_per_epoch = steps
    # Keras up to 3.6 has this attribute only if it was created with a number of steps.
    iterator._current_iterator = None


def begin_passes(iterator: EpochIterator, steps: int, begin: Callable[[], object]) -> None:
    """Make each epoch of a fit on JAX or PyTorch take some steps, and read its data again whenever a pass ends.

    Args:
        begin: function to call before each pass.

    Relies on: with `steps_per_epoch`, `EpochIterator` goes on in the next epoch with the batches of `_get_iterator`.
    """
    one_pass = iterator._get_iterator

    def passes() -> Iterator[Structure]:
        batches = 1
        while batches:  # those of a generator do not come again
            batches = 0
            begin()
            for batch in one_pass():
                batches += 1
                yield batch

    iterator._get_iterator, iterator._num_batches = passes, None
    iterator.steps_per_epoch, iterator._current_iterator = steps, None


def pad_passes(iterator: EpochIterator, steps: int) -> None:
    """Make each pass of a fit on JAX or PyTorch have some steps: None stands for a batch that is missing at its end.

    Relies on: `EpochIterator` takes the batches of `_get_iterator`, and ends an epoch after `_num_batches`.
    """
    one_pass = iterator._get_iterator

    def padded() -> Iterator[Structure]:
        missing = steps
        for batch in one_pass():
            missing -= 1
            yield batch
        yield from [None] * missing

    iterator._get_iterator, iterator._num_batches = padded, steps


def epoch_is_one_pass(iterator: EpochIterator) -> bool:
    """Return whether each epoch of a fit is one pass through its data.

    Relies on: `EpochIterator.steps_per_epoch` is None then.
    """
    return getattr(iterator, "steps_per_epoch", None) is None


def number_of_batches(iterator: EpochIterator) -> int | None:
    """Return the number of batches of a pass; None if it is unknown.

    Relies on: `EpochIterator.num_batches`.
    """
    number = getattr(iterator, "num_batches", None)
    return None if number is None else int(number)


def count_map_dataset(iterator: EpochIterator | None) -> int | None:
    """Count the batches of a `MapDataset` of Grain for Keras, which does not ask; return None for other data.

    Relies on: `GrainDatasetAdapter._dataset`, and `EpochIterator._num_batches`, with which an epoch ends.
    """
    dataset = getattr(getattr(iterator, "data_adapter", None), "_dataset", None)
    if iterator is None or not type(dataset).__module__.startswith("grain.") or not isinstance(dataset, Sized):
        return None
    # An endless one has the largest number.
    number = None if len(dataset) == sys.maxsize else len(dataset)
    iterator._num_batches = number
    return number


def batches_of_pass(iterator: EpochIterator) -> int | None:
    """Return the number of batches of a pass, however many an epoch has; None if it is unknown.

    Relies on: `EpochIterator._num_batches`. Keras begins the next pass after an epoch that had too few.
    """
    number = getattr(iterator, "_num_batches", None)
    return None if number is None else int(number)


def batch_size_of(iterator: EpochIterator) -> int | None:
    """Return the batch size of arrays that a fit divides into batches; None for other data.

    Relies on: `ArrayDataAdapter.batch_size`.
    """
    size = getattr(getattr(iterator, "data_adapter", None), "batch_size", None)
    return int(size) if size else None


def last_batch_of(iterator: EpochIterator) -> int | None:
    """Return the rows of the last batch of arrays that a fit divides into batches; None for other data.

    Relies on: `ArrayDataAdapter.partial_batch_size`, which is 0 or None if the last batch is full; then
    `has_partial_batch` is False. The adapters of iterators have None for both.
    """
    size = batch_size_of(iterator)
    # A `PyDataset` has no batch size, and its adapter raises for that of the last batch.
    if size is None:
        return None
    adapter = iterator.data_adapter
    last = adapter.partial_batch_size
    return None if last is None and adapter.has_partial_batch is not False else last or size


def lengthen_epochs(iterator: EpochIterator, steps: int) -> None:
    """Make each epoch of a fit take some steps, more than its data have; the training function must not read on.

    Relies on: `EpochIterator` ends an epoch after `_num_batches` steps.
    """
    iterator._num_batches = steps


def arrays_of(iterator: EpochIterator) -> Structure:
    """Return the arrays of a fit; None for other data.

    Relies on: `ArrayDataAdapter._inputs`.
    """
    return getattr(getattr(iterator, "data_adapter", None), "_inputs", None)


def wrap_steps(iterator: EpochIterator, wrapper: Callable[[Iterator[Step]], Iterator[Step]]) -> bool:
    """Replace the steps of the next epoch by `wrapper(steps)`; return False if Keras names the generator differently.

    Relies on: `fit` calls `EpochIterator._enumerate_iterator` (3.6: `enumerate_epoch`), which yields tuples of a step's
    number first and the iterator over batches last.
    """
    name = next((n for n in ("_enumerate_iterator", "enumerate_epoch") if hasattr(iterator, n)), None)
    if name is None:
        return False
    steps = getattr(iterator, name)

    def once() -> Iterator[Step]:
        restore(iterator, [name])
        return wrapper(steps())

    setattr(iterator, name, once)
    return True


def count_batches(iterator: EpochIterator, batches: int) -> None:
    """Tell the iterator of a fit that batches were taken in addition to those that it has counted.

    Relies on: `EpochIterator._steps_seen`.
    """
    iterator._steps_seen += batches


def py_dataset_adapter(iterator: EpochIterator) -> PyDatasetAdapter | None:
    """Return the adapter of a fit that reads a `PyDataset`, with its hooks of an epoch; None for other data.

    Relies on: `EpochIterator.data_adapter.py_dataset`, and `on_epoch_begin` and `on_epoch_end` of the adapter.
    """
    adapter = getattr(iterator, "data_adapter", None)
    return adapter if isinstance(getattr(adapter, "py_dataset", None), keras.utils.PyDataset) else None


def take_epoch_hooks(adapter: PyDatasetAdapter) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the hooks of a `PyDataset` around an epoch, which Keras no longer calls from now on.

    Relies on: `fit` calls `on_epoch_begin` and `on_epoch_end` of the object `data_adapter`.
    """
    hooks = adapter.on_epoch_begin, adapter.on_epoch_end
    adapter.on_epoch_begin = adapter.on_epoch_end = lambda: None
    return hooks


def drop_read_ahead(adapter: PyDatasetAdapter) -> None:
    """Drop the batches of a `PyDataset` with workers that were read for this epoch and not taken.

    Relies on: `PyDatasetAdapter.enqueuer.ready_queue`; without workers there is no enqueuer or queue.
    """
    ahead = getattr(getattr(adapter, "enqueuer", None), "ready_queue", None)
    while ahead is not None and not ahead.empty():
        ahead.get()
