"""What surrounds each training step, inside the graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import keras

from hvdx.keras.seams.models import restore_train_step, wrap_train_step
from hvdx.keras.types import Structure


def surround(model: keras.Model, around: Callable[[Structure], AbstractContextManager[None]]) -> None:
    """Make a model take each training step within a context.

    Args:
        model: compiled model, before its training function is made.
        around: function from what `train_step` takes to the context.
    """

    def train_step(own_step: Callable[..., object], data: Structure, *rest: object, **named: object) -> object:
        with around(data):
            return own_step(data, *rest, **named)

    restore_train_step(model)
    wrap_train_step(model, train_step)
