"""Functions that run at the beginning of each training step, inside the graph."""

from collections.abc import Callable
from typing import Any

_MARK = "_hvdx_before"


def precede(model: Any, *functions: Callable[[Any], None]) -> None:
    """Make each training step of a model call functions first, with the data of the step.

    Args:
        model: compiled model, before its training function is made.
        functions: functions that take what `train_step` takes.
    """
    restore(model)
    own_step = model.train_step

    def train_step(data: Any, *rest: Any, **named: Any) -> Any:
        for function in functions:
            function(data)
        return own_step(data, *rest, **named)

    setattr(train_step, _MARK, vars(model).get("train_step"))
    model.train_step = train_step


def restore(model: Any) -> None:
    """Undo `precede`; do nothing if the model has its own training step."""
    step = vars(model).get("train_step")
    if hasattr(step, _MARK):
        original = getattr(step, _MARK)
        if original is None:
            del model.train_step
        else:
            model.train_step = original
