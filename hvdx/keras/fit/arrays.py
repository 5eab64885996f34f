"""Arrays that `shard` accepts: those that Keras' `fit` accepts, and lists of numbers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvdx.errors import ConfigError, HvdxError
from hvdx.keras import backend
from hvdx.keras.backend import is_a, on_cpu, tf
from hvdx.keras.types import Arrays, Structure, TensorLike
from hvdx.keras.variables import dtype_of

_SPARSE = "Give a tf.data.Dataset.from_tensor_slices(...) of a tf.sparse.SparseTensor, or a dense array."

_SCALAR = "shard: data: expected arrays with a sample in each row, got the single value {!r}."

# Bytes of an array that stays where it is. A smaller one is copied once: a batch through Python takes 70 us longer if
# its rows are short.
_LARGE = 1 << 26

_SINGLE = (bool, int, float, complex, str, bytes, np.generic)


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


def tensors_of(data: Arrays) -> Structure:
    """Return the structure of a script's arrays with tensors in place of the arrays; large ones become `Rows`.

    As in `fit`, a list of arrays is several inputs, None stands for an input that is absent, and floating-point numbers
    become those of `keras.config.floatx()`. A list of numbers or strings, nested or not, is one array.

    Args:
        data: arrays, lists of numbers or None, in tuples, lists and dictionaries.

    Returns:
        Tensors or ragged tensors; lists become tuples, because a `tf.data` dataset would stack them.

    Raises:
        ConfigError: if a part of the data is not an array, or if the arrays have different lengths.

    Example:
        >>> tensors_of(([0.5, 1.5], None))[0].dtype
        tf.float32
    """
    with on_cpu():
        tensors = _converted(data)
    lengths = {int(t.shape[0]) for t in _leaves(tensors)}
    if not lengths:
        raise ConfigError(f"shard: data: expected arrays, got {data!r}.")
    if len(lengths) > 1:
        raise ConfigError(
            f"shard: expected arrays of one length, got {sorted(lengths)}. A list of arrays is a list of inputs; for a "
            "list of samples give numpy.stack(samples)."
        )
    return tensors


def length_of(tensors: Structure) -> int:
    """Return the number of samples of the result of `tensors_of`."""
    return int(_leaves(tensors)[0].shape[0])


def split(tensors: Structure, fraction: float) -> tuple[Structure, Structure]:
    """Return the first samples, for training, and the last ones, for validation, as Keras' `fit` splits them.

    Args:
        tensors: result of `tensors_of`.
        fraction: share of the samples that is for validation, above 0 and below 1.

    Raises:
        ConfigError: if the fraction is out of range, or leaves no sample to one of the two.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"shard: validation_split: expected a number between 0 and 1, got {fraction}.")
    count = length_of(tensors)
    first = math.floor(count * (1 - fraction))
    if first in (0, count):
        raise ConfigError(
            f"shard: validation_split: {fraction} of {count} samples leaves {first} for training and {count - first} "
            "for validation. Give more samples, or another fraction."
        )

    def part(begin: int, end: int) -> Structure:
        with on_cpu():
            return keras.tree.map_structure(lambda t: None if t is None else t[begin:end], tensors)

    return part(0, first), part(first, count)


def rows_at(tensors: Structure, positions: tf.Tensor | np.ndarray) -> Structure:
    """Return some rows of each array; those of `Rows` at an array of positions as arrays.

    Args:
        tensors: result of `tensors_of`.
        positions: int64[m].
    """

    def part(array: tf.Tensor | tf.RaggedTensor | Rows | None) -> tf.Tensor | tf.RaggedTensor | np.ndarray | None:
        if isinstance(array, Rows):
            return array.read(positions) if isinstance(positions, np.ndarray) else array.at(positions)
        return None if array is None else tf.gather(array, positions)

    return keras.tree.map_structure(part, tensors)


def _leaves(tensors: Structure) -> list[tf.Tensor]:
    return [t for t in keras.tree.flatten(tensors) if t is not None]


def _converted(data: Arrays) -> Structure:
    if isinstance(data, Mapping):
        return {key: _converted(value) for key, value in data.items()}
    if isinstance(data, tuple):
        parts: list[Any] = [_converted(value) for value in data]
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    if isinstance(data, list) and not _is_plain(data):
        return tuple(_converted(value) for value in data)
    return None if data is None else _tensor(data)


def _is_plain(data: list[Arrays]) -> bool:
    """Return whether a list is one array: it holds numbers or strings, or such lists, and no arrays."""
    # The first element decides, since a list may hold millions.
    first = data[0] if data else 0
    return _is_plain(first) if isinstance(first, list) else isinstance(first, _SINGLE)


def _tensor(array: TensorLike) -> tf.Tensor | tf.RaggedTensor | Rows:
    kind = f"{type(array).__module__}.{type(array).__name__}"
    if is_a(array, "sparse.SparseTensor") or kind.startswith("scipy.sparse"):
        raise ConfigError(f"shard: data: expected dense or ragged arrays, got {kind}. Do: {_SPARSE}")
    if backend.name() != "tensorflow":
        return _rows(_numpy(array, kind))
    if not isinstance(array, tf.RaggedTensor | tf.Tensor | tf.Variable):
        array = _numpy(array, kind)
        if array.nbytes >= _LARGE and array.ndim and array.dtype.kind in "biuf" and array.dtype.isnative:
            return Rows(array)
    tensor = array if isinstance(array, tf.RaggedTensor) else tf.convert_to_tensor(array)
    if tensor.shape.rank == 0:
        raise ConfigError(_SCALAR.format(array))
    floatx = keras.config.floatx()
    return tf.cast(tensor, floatx) if tensor.dtype.is_floating and tensor.dtype != floatx else tensor


def _rows(array: np.ndarray) -> Rows:
    """Return an array for JAX or PyTorch; a copy if it is not large."""
    if not array.ndim:
        raise ConfigError(_SCALAR.format(array))
    rows = Rows(array)
    return rows if array.nbytes >= _LARGE else Rows(array.astype(rows.dtype))


def _numpy(array: Any, kind: str) -> np.ndarray:
    if kind.startswith("pandas."):
        values = array.to_numpy()
        # Like `fit`: a column becomes [n, 1].
        array = values[:, None] if values.ndim == 1 else values
    elif not hasattr(array, "__array__") and not isinstance(array, (list, *_SINGLE)):
        remedy = (
            "Do: give fit dataset[hvdx.rank() :: hvdx.size()].batch(n); a DataLoader of Grain takes "
            "ShardOptions(hvdx.rank(), hvdx.size()), and fit steps_per_epoch=."
            if kind.startswith("grain.")
            else "A PyDataset or a generator divides the data itself, by hvdx.rank() and hvdx.size(): give it to fit "
            "directly, a generator with steps_per_epoch=."
        )
        raise ConfigError(f"shard: data: expected arrays or a tf.data.Dataset, got {kind}. {remedy}")
    try:
        array = np.asarray(array)
    except ValueError as error:
        raise ConfigError(
            f"shard: data: expected lists of one length, got others ({error}). Do: tf.ragged.constant(lists)."
        ) from error
    if array.dtype == object and not all(isinstance(value, str | bytes) for value in array.flat):
        raise ConfigError(
            f"shard: data: expected numbers or strings, got Python objects ({type(array.flat[0]).__name__}). Do: "
            "convert them, for example by array.astype('float32')."
        )
    return array
