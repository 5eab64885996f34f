"""Functions that run at the beginning of each training step, inside the graph."""

from collections.abc import Callable

import keras

from hvdx.keras.seams.models import restore_train_step, wrap_train_step
from hvdx.keras.types import Structure


def precede(model: keras.Model, *functions: Callable[[Structure], None]) -> None:
    """Make each training step of a model call functions first, with the data of the step.

    Args:
        model: compiled model, before its training function is made.
        functions: functions that take what `train_step` takes.
    """

    def train_step(own_step: Callable[..., object], data: Structure, *rest: object, **named: object) -> object:
        for function in functions:
            function(data)
        return own_step(data, *rest, **named)

    restore_train_step(model)
    wrap_train_step(model, train_step)
