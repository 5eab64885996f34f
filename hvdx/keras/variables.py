"""Lists of variables and layers in arguments, and the values of a variable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import UnionType
from typing import Any

import keras
import numpy as np

from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.backend import tf
from hvdx.keras.types import Variable


def listed(value: object, kinds: type | UnionType, expected: str, remedy: str) -> list[Any]:
    """Return one object, or several, as a list.

    Args:
        value: None, an object, or a collection of them.
        kinds: classes of the objects.
        expected: what was expected for which option, for the message.
        remedy: what to give.

    Raises:
        ConfigError: if it is anything else.

    Example:
        >>> [len(listed(given, int, "size: expected integers", "give 1")) for given in (None, 3, [3, 4])]
        [0, 1, 2]
    """
    found = [value] if isinstance(value, kinds) else [] if value is None else value
    if not isinstance(found, Sequence | set | frozenset) or not all(isinstance(item, kinds) for item in found):
        raise ConfigError(f"{expected}, got {value!r}. Do: {remedy}.")
    return list(found)


def dtype_of(named: str | tf.DType) -> np.dtype:
    """Return the NumPy dtype of a dtype of Keras, or of TensorFlow; strings are objects.

    Example:
        >>> dtype_of("bfloat16").itemsize, dtype_of(tf.string)
        (2, dtype('O'))
    """
    name = named if isinstance(named, str) else named.name
    # Keras has registered the names of `ml_dtypes` with NumPy.
    return np.dtype(object if name == "string" else name)


def is_float(variable: Variable) -> bool:
    """Return whether a variable has a floating-point dtype; NumPy does not count bfloat16 and float8."""
    return "float" in dtype_of(variable.dtype).name


def bytes_of(variable: Variable) -> int:
    """Return the bytes of a variable's values."""
    return dtype_of(variable.dtype).itemsize * math.prod(variable.shape)


def rows_within(variable: Variable, limit: int) -> int:
    """Return the number of rows of a variable, which is not empty, in a block of at most `limit` bytes; 1 at least."""
    return max(limit * int(variable.shape[0]) // bytes_of(variable), 1)


def view_of(variable: Variable) -> np.ndarray:
    """Return a variable's values; on a CPU a view of them, so copy it before the variable changes.

    Example:
        >>> view_of(tf.Variable(1.5, dtype=tf.bfloat16)).dtype.name
        'bfloat16'
    """
    if backend.name() != "tensorflow":
        return np.asarray(keras.ops.convert_to_numpy(variable.value))
    tensor = tf.convert_to_tensor(variable)
    # `numpy` copies, and NumPy itself does not take a scalar of bfloat16.
    return np.asarray(tensor) if tensor.shape.rank else np.asarray(tensor.numpy(), tensor.dtype.as_numpy_dtype)
