"""Variables, layers, losses, metrics, and files of models."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import keras

from hvdx.keras.backend import tf
from hvdx.keras.seams.replacing import Method, override
from hvdx.keras.types import Store, Variable

#: Class of the variables that layers and optimisers make. `keras.Variable` derives from it; in Keras 3.6, variables of
#: layers are not instances of `keras.Variable`. Relies on: `keras.Variable.__mro__`.
KerasVariable: type[keras.Variable] = keras.Variable.__mro__[1]


def raw_variable(variable: Variable) -> tf.Variable:
    """Return the `tf.Variable` of a Keras variable; `value` would be a cast copy under another compute dtype.

    Relies on: `Variable._value`.
    """
    return variable._value if isinstance(variable, KerasVariable) else variable


def on_assign(variable: Variable, function: Callable[[], object]) -> None:
    """Make a Keras variable call a function before it is assigned; do nothing with a plain `tf.Variable`.

    Relies on: `Variable.assign_add` and `assign_sub` call `assign`; Keras applies constraints by it.
    """

    def assign(_: Variable, original: Method, value: object) -> object:
        function()
        return original(value)

    if isinstance(variable, KerasVariable):
        override(variable, "assign", assign)


class CombinedBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation by `combine(inputs, mask, axes, mean, variance)` of a batch's own mean and variance.

    Relies on: `BatchNormalization.call` normalises by `_moments(inputs, mask)` in training; `_reduction_axes`.
    """

    def combine(
        self, inputs: tf.Tensor, mask: tf.Tensor | None, axes: list[int], mean: tf.Tensor, variance: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance of all samples.

        Args:
            inputs, mask: see `keras.layers.BatchNormalization.call`.
            axes: axes of the inputs over which the means are taken.
            mean, variance: of this batch.
        """
        raise NotImplementedError

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        return self.combine(inputs, mask, self._reduction_axes, *super()._moments(inputs, mask))


def set_mask(losses: tf.Tensor, valid: tf.Tensor) -> None:
    """Leave losses out of the mean that a `keras.losses.Loss` takes.

    Relies on: `Loss.__call__` reads `_keras_mask` of the tensor that `call` returns.
    """
    losses._keras_mask = valid


def set_metric_function(metric: keras.metrics.Metric, function: Method) -> None:
    """Set the function of labels and predictions whose mean a metric is.

    Relies on: `MeanMetricWrapper._fn`.
    """
    metric._fn = function


def name_in_files(kind: type, plain: type) -> None:
    """Make files name a class like another one of Keras.

    Relies on: the class name, and `keras.src.api_export.REGISTERED_OBJS_TO_NAMES`, which Keras looks up when it saves.
    """
    kind.__name__ = plain.__name__
    names = importlib.import_module("keras.src.api_export").REGISTERED_OBJS_TO_NAMES
    names[kind] = names[plain]


# Functions of Keras that write a model, their first argument, to a file.
_SAVING = (
    *((keras.Model, name) for name in ("save", "save_weights", "export")),
    *((keras.saving, name) for name in ("save_model", "save_weights")),
    (keras.models, "save_model"),
)


def guard_saving(check: Callable[[keras.Model], None]) -> None:
    """Call `check(model)` before Keras writes a model to a file, from now on; it may raise.

    Relies on: Keras' functions that save call each other, or the wrapped names, with the model first.
    """

    def guarded(save: Method) -> Method:
        @functools.wraps(save)
        def function(model: keras.Model, *args: object, **named: object) -> object:
            check(model)
            return save(model, *args, **named)

        return function

    for owner, name in _SAVING:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, guarded(original))


def change_loaded_state(change: Callable[[keras.optimizers.Optimizer, Store], Store]) -> None:
    """Make each optimiser load `change(optimizer, store)` in place of the values in a file, from now on.

    Relies on: `Optimizer.load_own_variables(store)`, whose keys are the numbers of `Optimizer.variables`.
    """
    original = keras.optimizers.Optimizer.load_own_variables

    @functools.wraps(original)
    def load_own_variables(self: keras.optimizers.Optimizer, store: Store) -> None:
        original(self, change(self, store))

    keras.optimizers.Optimizer.load_own_variables = load_own_variables
