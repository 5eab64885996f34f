"""Losses: the reduction of the values of a batch to one number."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator

import keras

from hvdx.keras.backend import tf
from hvdx.keras.seams.replacing import Method

_MODULE = "keras.src.losses.loss"


@contextlib.contextmanager
def reduced_by(function: Method) -> Iterator[None]:
    """Make every `keras.losses.Loss` of this thread reduce its values by `function(original, loss, values, ...)`.

    Relies on: `Loss.__call__` calls `reduce_weighted_values`, a global of its module, with the values first and the
    names `sample_weight`, `mask`, `reduction` and `dtype`; in it, `self` is the loss.
    """
    module, thread = vars(importlib.import_module(_MODULE)), threading.get_ident()
    original = module["reduce_weighted_values"]

    def reduce(values: object, *rest: object, **named: object) -> object:
        if rest or threading.get_ident() != thread:
            return original(values, *rest, **named)
        return function(original, sys._getframe(1).f_locals.get("self"), values, **named)

    module["reduce_weighted_values"] = reduce
    try:
        yield
    finally:
        module["reduce_weighted_values"] = original


def is_builtin(loss: object) -> bool:
    """Return whether a loss belongs to Keras or hvdx, whose values have the rows of its arguments.

    Relies on: the module of its class, and of the attribute `fn` that wraps a function.
    """
    of_function = getattr(loss, "fn", loss)
    modules = type(loss).__module__, getattr(of_function, "__module__", "")
    return all(str(module).startswith(("keras.", "hvdx.")) for module in modules)


def weights_of(
    values: tf.Tensor, sample_weight: object, mask: object, reduction: str | None
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Return the values and the weights that Keras multiplies, brought to shapes that fit; None without weights.

    Relies on: `apply_mask` and `squeeze_or_expand_to_same_rank` of the same module, which Keras calls in this order.

    Args:
        values: values of a loss.
        sample_weight, mask: as a loss takes them, or None.
        reduction: reduction of the loss.
    """
    module = importlib.import_module(_MODULE)
    if sample_weight is not None:
        sample_weight = keras.ops.cast(keras.ops.convert_to_tensor(sample_weight), values.dtype)
    if mask is not None:
        mask = keras.ops.cast(mask, values.dtype)
    weights = module.apply_mask(sample_weight, mask, dtype=values.dtype, reduction=reduction)
    return (values, None) if weights is None else module.squeeze_or_expand_to_same_rank(values, weights)
