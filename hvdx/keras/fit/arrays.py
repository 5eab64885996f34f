"""Arrays that `shard` accepts: those that Keras' `fit` accepts, and lists of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.backend import is_a, on_cpu, tf
from hvdx.keras.fit.samples import SINGLE, Rows, columns_of, is_plain, is_source
from hvdx.keras.types import Arrays, Structure, TensorLike

_SPARSE = "Give a tf.data.Dataset.from_tensor_slices(...) of a tf.sparse.SparseTensor, or a dense array."

_OWN = (
    "A PyDataset or a generator divides the data itself, by hvdx.rank() and hvdx.size(): give it to fit directly, a "
    "generator with steps_per_epoch=."
)
_REMEDIES = {
    "grain": "Give fit a DataLoader of Grain with ShardOptions(hvdx.rank(), hvdx.size()), and steps_per_epoch=.",
    "torch": "On JAX and PyTorch, give fit DataLoader(data, batch_sampler=hvdx.shard(range(len(data)), n)).",
}

_SCALAR = "shard: data: expected arrays with a sample in each row, got the single value {!r}."

# Bytes of an array that stays where it is. A smaller one is copied once: a batch through Python takes 70 us longer if
# its rows are short.
_LARGE = 1 << 26


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
    if isinstance(data, list) and not is_plain(data):
        return tuple(_converted(value) for value in data)
    if data is None:
        return None
    return columns_of(data) if is_source(data) else _tensor(data)


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
    elif not hasattr(array, "__array__") and not isinstance(array, (list, *SINGLE)):
        remedy = _REMEDIES.get(kind.partition(".")[0], _OWN)
        raise ConfigError(
            f"shard: data: expected arrays, a tf.data.Dataset or a map-style dataset, got {kind}. {remedy}"
        )
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
