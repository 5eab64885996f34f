"""Looks into the frames of the callers: Keras gives a callback the model, but neither its list nor the data."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import keras

from hvdx.keras.backend import tf
from hvdx.keras.types import Arrays

if TYPE_CHECKING:
    from keras.src.trainers.epoch_iterator import EpochIterator


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
    model = callback.model
    return next((f.f_locals.get(name) for f in _frames() if f.f_locals.get("self") is model), None)


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the callers, the nearest first."""
    frame = inspect.currentframe()
    frame = None if frame is None else frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_fits(model: keras.Model) -> int:
    """Count the calls of Keras' `fit` of a model that have not returned.

    Relies on: `Model.fit` has the local variables `self` and `epoch_iterator`; a subclass that calls it has not.
    """
    fits = (f.f_locals for f in _frames() if f.f_code.co_name == "fit")
    return sum(local.get("self") is model and "epoch_iterator" in local for local in fits)


def loss_scale_calls() -> bool:
    """Return whether a method of a `LossScaleOptimizer` is among the callers.

    Relies on: its method calls that of the inner optimiser while the step is traced.
    """
    return any(isinstance(f.f_locals.get("self"), keras.optimizers.LossScaleOptimizer) for f in _frames())


def class_weight() -> dict[int, float] | None:
    """Return the argument `class_weight` of the `fit` that begins a pass; None elsewhere.

    Relies on: `Model.fit`, `evaluate` and `predict` have the local variables `self` and `epoch_iterator`.
    """
    for frame in _frames():
        if isinstance(frame.f_locals.get("self"), keras.Model) and "epoch_iterator" in frame.f_locals:
            return frame.f_locals.get("class_weight")
    return None


def is_build() -> bool:
    """Return whether a batch is read to build a model, on JAX and PyTorch: the first pass begins with it again.

    Relies on: `Model._symbolic_build` reads the batch.
    """
    return any(f.f_code.co_name == "_symbolic_build" for f in _frames())
