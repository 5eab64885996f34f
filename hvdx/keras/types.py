"""Names for the objects of Keras and TensorFlow in signatures.

Both libraries come without annotations, so mypy knows nothing about them; the names are for readers and editors.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import keras
import numpy as np
import numpy.typing as npt

from hvdx.keras import backend
from hvdx.keras.backend import tf

if TYPE_CHECKING or backend.name() == "tensorflow":
    #: Variable of a layer or an optimiser of Keras, or of TensorFlow.
    Variable: TypeAlias = keras.Variable | tf.Variable
    #: Gradient of one variable; the slices are the rows of an embedding that a batch reads.
    Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
    #: Argument of TensorFlow that it converts to a tensor.
    TensorLike: TypeAlias = tf.Tensor | keras.Variable | tf.Variable | npt.ArrayLike
    #: Nested tensors: a batch of a dataset, or the arrays of a script after their conversion.
    Structure: TypeAlias = tf.Tensor | tf.RaggedTensor | tuple["Structure", ...] | dict[str, "Structure"] | None
    #: Arrays as `fit` takes them, in tuples, lists and dictionaries; None stands for an input that is absent.
    Arrays: TypeAlias = TensorLike | tuple["Arrays", ...] | list["Arrays"] | Mapping[str, "Arrays"] | None
else:  # names in annotations, which nobody reads while a script runs
    Variable = Gradient = TensorLike = Structure = Arrays = object
#: Metrics by their names: numbers, or what the `train_step` of a user's model returns.
LogValues: TypeAlias = dict[str, Any]
#: Argument `logs` of a callback.
Logs: TypeAlias = LogValues | None
#: Weights of a layer or state of an optimiser in a file, by the numbers of the variables.
Store: TypeAlias = MutableMapping[str, np.ndarray]


class PyDatasetAdapter(Protocol):
    """What Keras reads a `PyDataset` with: its hooks of an epoch."""

    on_epoch_begin: Callable[[], None]
    on_epoch_end: Callable[[], None]


class GeneratorState(Protocol):
    """TensorFlow's record of a Python generator of `Dataset.from_generator`."""

    _generator: Callable[..., object]
