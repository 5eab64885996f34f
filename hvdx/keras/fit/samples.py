"""Samples that stay where they are until a batch of them is read: rows of a large array, or of a map-style dataset."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard

import keras
import numpy as np

from hvdx.errors import ConfigError, HvdxError
from hvdx.keras.backend import is_a, tf
from hvdx.keras.types import Structure
from hvdx.keras.variables import dtype_of

#: Types of single values.
SINGLE = (bool, int, float, complex, str, bytes, np.generic)

# Batches of which some columns wait to be read.
_BATCHES = 4


class Rows:
    """Large NumPy array that stays where it is, also in a file (`numpy.memmap`): only its batches become tensors.

    Args:
        array: numbers[n, ...] in the byte order of this machine.

    Attributes:
        shape: shape of the array.
        dtype: dtype of the batches.

    Example:
        >>> rows = Rows(np.arange(6.0).reshape(3, 2))
        >>> rows[1:].at(tf.constant([1, 0])).numpy().tolist(), rows.dtype.name
        ([[4.0, 5.0], [2.0, 3.0]], 'float32')
    """

    def __init__(self, array: np.ndarray):
        self._array, self.shape = array, array.shape
        self.dtype = dtype_of(keras.config.floatx()) if array.dtype.kind == "f" else array.dtype

    def __getitem__(self, key: slice) -> Rows:
        return Rows(self._array[key])

    def read(self, at: np.ndarray) -> np.ndarray:
        """Return the rows at some positions, int64[m], as [m, ...]."""
        # `numpy.take` would first copy the whole of an array that is not contiguous.
        return self._array[at].astype(self.dtype, copy=False)

    def at(self, positions: tf.Tensor) -> tf.Tensor:
        """Return the rows at some positions, int64[m], as a tensor [m, ...]."""
        # TensorFlow keeps the function until the process ends; the dataset keeps this object.
        reference = weakref.ref(self)

        def read(at: np.ndarray) -> np.ndarray:
            rows = reference()
            if rows is None:
                raise HvdxError("shard: the dataset was deleted while it was read. Keep it until its iterators end.")
            return rows.read(at)

        batch = tf.numpy_function(read, [positions], tf.as_dtype(self.dtype), stateful=False)
        batch.set_shape([*positions.shape, *self.shape[1:]])
        return batch


class Source(Protocol):
    """A dataset with a number of samples, each of which can be read at its position."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> object: ...


def is_source(data: object) -> TypeGuard[Source]:
    """Return whether data are a map-style dataset, and neither arrays nor batches.

    Example:
        >>> is_source(range(3)), is_source([1, 2]), is_source(np.zeros(3))
        (True, False, False)
    """
    others = (str, bytes, list, tuple, Mapping, keras.utils.PyDataset)
    return (
        hasattr(data, "__len__")
        and hasattr(data, "__getitem__")
        and not hasattr(data, "__array__")
        and not isinstance(data, others)
        and not is_a(data, "RaggedTensor")
        and not type(data).__module__.startswith("scipy.")
    )


def columns_of(source: Source) -> Structure:
    """Return the structure of a sample with a column in place of each of its parts.

    Raises:
        ConfigError: if the dataset has no end, or no sample, or if a part of the first one is not an array.

    Example:
        >>> columns_of(range(10, 20)).read(np.array([3, 0])).tolist()
        [13, 10]
    """
    count = len(source)
    if not count:
        raise ConfigError(f"shard: data: expected one sample or more, got {type(source).__name__} with none.")
    if count == sys.maxsize:
        raise ConfigError(
            f"shard: data: expected samples with an end, got {type(source).__name__} that repeats them. Do: leave "
            ".repeat() out; fit(epochs=) reads them again."
        )
    sample = _arrays(source[0])
    parts = keras.tree.flatten(sample)
    for part in parts:
        if part.dtype == object and not isinstance(part.flat[0], str | bytes):
            raise ConfigError(
                f"shard: data: expected samples of numbers or strings, got {type(part.flat[0]).__name__} in the first "
                "one. Do: convert it in the dataset, for example by np.asarray(image)."
            )
    batches = _Batches(source)
    columns = [Column(batches, number, 0, count, part) for number, part in enumerate(parts)]
    return keras.tree.pack_sequence_as(sample, columns)


def is_plain(data: Sequence[object]) -> bool:
    """Return whether a list is one array: it holds numbers or strings, or such lists, and no arrays."""
    # The first element decides, since a list may hold millions.
    first = data[0] if data else 0
    return is_plain(first) if isinstance(first, list) else isinstance(first, SINGLE)


def _arrays(sample: object) -> Structure:
    if isinstance(sample, Mapping):
        return {key: _arrays(value) for key, value in sample.items()}
    if isinstance(sample, tuple) or (isinstance(sample, list) and not is_plain(sample)):
        return tuple(_arrays(value) for value in sample)
    array = np.asarray(sample)
    return array.astype(object) if array.dtype.kind in "US" else array


class _Batches:
    """Batches of samples, read once for all columns."""

    def __init__(self, source: Source):
        self._source = source
        # TensorFlow reads columns from several threads.
        self._lock = threading.Lock()
        self._waiting: dict[bytes, dict[int, np.ndarray]] = {}

    def column(self, at: np.ndarray, number: int) -> np.ndarray:
        """Return one part of the samples at some positions; a part that is read again is of new samples."""
        with self._lock:
            key = at.tobytes()
            columns = self._waiting.pop(key, {})
            if number not in columns:
                columns = dict(enumerate(self._read(at)))
            found = columns.pop(number)
            if columns:
                self._waiting[key] = columns
            if len(self._waiting) > _BATCHES:
                del self._waiting[next(iter(self._waiting))]
            return found

    def _read(self, at: np.ndarray) -> list[np.ndarray]:
        samples = [keras.tree.flatten(_arrays(self._source[int(i)])) for i in at]
        return [_stacked(parts) for parts in zip(*samples, strict=True)]


class Column(Rows):
    """One part of each sample.

    Args:
        batches: batches of the samples.
        number: number of the part.
        first, last: the first sample, and the one after the last.
        part: this part of a sample, as an array.
    """

    def __init__(self, batches: _Batches, number: int, first: int, last: int, part: np.ndarray):
        super().__init__(np.broadcast_to(part, (last - first, *part.shape)))
        self._batches, self._number, self._first, self._part = batches, number, first, part

    def __getitem__(self, key: slice) -> Column:
        begin, end, _ = key.indices(self.shape[0])
        return Column(self._batches, self._number, self._first + begin, self._first + end, self._part)

    def read(self, at: np.ndarray) -> np.ndarray:
        return self._batches.column(at + self._first, self._number).astype(self.dtype, copy=False)


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    shapes = sorted({part.shape for part in parts})
    if len(shapes) > 1:
        raise ConfigError(
            f"shard: data: expected samples of one shape, got {shapes[0]} and {shapes[1]}. Do: pad or crop them in the "
            "dataset."
        )
    return np.stack(parts)
