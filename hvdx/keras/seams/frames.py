"""Looks into the frames of the callers: Keras gives a callback the model, but neither its list nor the data."""

from __future__ import annotations

import inspect

import keras

from hvdx.keras.backend import tf
from hvdx.keras.seams.iterators import EpochIterator
from hvdx.keras.types import Arrays


def calling_list(callback: keras.callbacks.Callback) -> keras.callbacks.CallbackList | None:
    """Return the `CallbackList` that is calling `callback.set_model`, or None.

    Relies on: its method is one of the four nearest frames, and it is the method's `self`.
    """
    frame = inspect.currentframe()
    for _ in range(4):
        frame = frame.f_back if frame is not None else None
        caller = frame.f_locals.get("self") if frame is not None else None
        if isinstance(caller, keras.callbacks.CallbackList) and callback in caller.callbacks:
            return caller
    return None


def epoch_iterator(callback: keras.callbacks.Callback) -> EpochIterator | None:
    """Return the iterator over the batches of `fit` or `evaluate`, whichever calls a callback, or None.

    Relies on: a method of the model has a local variable `epoch_iterator`.
    """
    return _local(callback, "epoch_iterator")


def validation_inputs(callback: keras.callbacks.Callback) -> tf.data.Dataset | Arrays:
    """Return the inputs of the validation data of the `fit` that calls a callback, a dataset or arrays, or None.

    Relies on: `Model.fit` has a local variable `val_x`.
    """
    return _local(callback, "val_x")


def _local(callback: keras.callbacks.Callback, name: str) -> object:
    frame = inspect.currentframe()
    while frame is not None and frame.f_locals.get("self") is not callback.model:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


def running_fits(model: keras.Model) -> int:
    """Count the calls of Keras' `fit` of a model that have not returned.

    Relies on: `Model.fit` has the local variables `self` and `epoch_iterator`; a subclass that calls it has not.
    """
    frame, found = inspect.currentframe(), 0
    while frame is not None:
        local = frame.f_locals
        found += frame.f_code.co_name == "fit" and local.get("self") is model and "epoch_iterator" in local
        frame = frame.f_back
    return found


def loss_scale_calls() -> bool:
    """Return whether a method of a `LossScaleOptimizer` is among the callers.

    Relies on: its method calls that of the inner optimiser while the step is traced.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), keras.optimizers.LossScaleOptimizer):
            return True
        frame = frame.f_back
    return False
