"""Optimisers: their variables, and the parts of their step."""

import functools
from collections.abc import Callable, Sequence

import keras

from hvdx.keras.seams.replacing import Method, override, restore
from hvdx.keras.types import Gradient, Variable


def trained_variables(optimizer: keras.optimizers.Optimizer) -> list[Variable]:
    """Return the variables that an optimiser was built for; [] before.

    Relies on: `Optimizer._trainable_variables`.
    """
    return list(getattr(optimizer, "_trainable_variables", ()))


def step_counter(optimizer: keras.optimizers.Optimizer) -> Variable:
    """Return the variable that counts an optimiser's steps, micro-steps too.

    Relies on: `Optimizer._iterations`; `iterations` divides it by the micro-steps of a step.
    """
    return optimizer._iterations


def rate_of(
    optimizer: keras.optimizers.Optimizer,
) -> Variable | keras.optimizers.schedules.LearningRateSchedule | None:
    """Return the variable of an optimiser's learning rate, or its schedule.

    Relies on: `Optimizer._learning_rate`; `learning_rate` is the schedule's present value.
    """
    return getattr(optimizer, "_learning_rate", None)


def accumulators_of(optimizer: keras.optimizers.Optimizer) -> list[Variable]:
    """Return the variables in which an optimiser accumulates gradients, in the order of `trained_variables`.

    Relies on: `Optimizer._accumulated_gradients`.
    """
    return list(getattr(optimizer, "_accumulated_gradients", ()))


def averages_of(optimizer: keras.optimizers.Optimizer) -> list[Variable | None]:
    """Return the moving averages of weights under `use_ema`, in the order of `trained_variables`; some may be None.

    Relies on: `Optimizer._model_variables_moving_average`.
    """
    return list(getattr(optimizer, "_model_variables_moving_average", None) or ())


def velocity_of(optimizer: keras.optimizers.Optimizer, variable: Variable) -> Variable:
    """Return the second moment that Adam, Nadam or RMSprop keeps of a variable's gradients.

    Relies on: `Optimizer._velocities` and `Optimizer._get_variable_index`.
    """
    return optimizer._velocities[optimizer._get_variable_index(variable)]


def momenta_of(optimizer: keras.optimizers.Optimizer) -> list[Variable]:
    """Return the velocities of an optimiser with momentum, in the order of `trained_variables`.

    Relies on: `SGD.momentums`, `RMSprop._momentums`.
    """
    return list(getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None) or ())


def slot_prefix(variable: Variable) -> str:
    """Return the beginning of the names of an optimiser's variables that belong to a weight.

    Relies on: Keras links a slot to its weight by this name only.
    """
    return f"{variable.path.replace('/', '_')}_"


def is_of_keras(kind: type) -> bool:
    """Return whether a class is one of Keras' own.

    Relies on: `__module__` of its classes begins with "keras.".
    """
    return kind.__module__.startswith("keras.")


def owner_of_update_step(optimizer: keras.optimizers.Optimizer) -> type:
    """Return the class whose `update_step` an optimiser takes.

    Relies on: `update_step` is the method that an optimiser overrides.
    """
    return next(c for c in type(optimizer).__mro__ if "update_step" in vars(c))


# Keras' `apply` calls them: the first accumulates, clips and updates by the others.
_PARTS = (
    *("_backend_apply_gradients", "_clip_gradients", "_backend_update_step"),
    "_overwrite_variables_directly_with_gradients",
)


def has_parts_of_step(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether `wrap_optimizer` can replace the parts of an optimiser's step.

    Relies on: `Optimizer.apply` is the method that calls the parts; a class of Keras with its own `apply` has others.
    """
    kind = type(optimizer)
    present = all(hasattr(optimizer, name) for name in _PARTS)
    return present and not (is_of_keras(kind) and kind.apply is not keras.optimizers.Optimizer.apply)


def wrap_optimizer(
    optimizer: keras.optimizers.Optimizer, *, begin: Method, clip: Method, update: Method, overwrite: Method
) -> None:
    """Replace the parts of an optimiser's step, each by `function(optimizer, original, *arguments)`.

    Relies on: Keras calls overwrite, begin, then (after accumulation) clip with the gradients, then update.

    Args:
        optimizer: Keras optimiser, not a loss-scale optimiser.
        begin: takes gradients and variables; the original accumulates, and calls the next two.
        clip: takes gradients, returns those to apply.
        update: takes gradients, variables and learning rate; the original changes the variables.
        overwrite: takes gradients and variables; the original leaves out variables that gradients overwrite.
    """
    for name, function in zip(_PARTS, (begin, clip, update, overwrite), strict=True):
        override(optimizer, name, function)


def wrap_apply(optimizer: keras.optimizers.Optimizer, function: Method) -> None:
    """Replace an optimiser's `apply` by `function(optimizer, original, gradients, variables)`.

    Relies on: `Trainer.train_step` and users' loops reach `apply` by way of the object.
    """
    override(optimizer, "apply", function)


def watch_applies(function: Callable[[keras.optimizers.Optimizer], None]) -> None:
    """Call `function(optimizer)` before each `apply` of an optimiser in this process, or when it is traced.

    Relies on: `LossScaleOptimizer.apply` calls that of its inner optimiser.
    """
    original = keras.optimizers.Optimizer.apply

    @functools.wraps(original)
    def apply(self: keras.optimizers.Optimizer, *args: object, **named: object) -> object:
        function(self)
        return original(self, *args, **named)

    keras.optimizers.Optimizer.apply = apply


def wrap_overflow_check(optimizer: keras.optimizers.Optimizer, function: Method) -> None:
    """Replace a loss-scale optimiser's check by `function(optimizer, original, gradients)`; it returns a scalar bool.

    Relies on: `LossScaleOptimizer.apply` calls `check_finite` once, and skips the step if the result is False.
    """
    override(optimizer, "check_finite", function)


def add_local_variables_method(optimizer: keras.optimizers.Optimizer, function: Method) -> None:
    """Add Horovod's method `register_local_var` to an optimiser."""
    optimizer.register_local_var = function


def unwrap_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Undo the functions above."""
    restore(optimizer, (*_PARTS, "apply", "check_finite", "register_local_var"))


def divert_assignments(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[Variable], record: Callable[[str, int, Gradient], None]
) -> Method:
    """Make an optimiser's step call `record(method, index, value)` in place of an assignment to one of the variables.

    Relies on: `update_step` changes variables only by `self.assign`, `assign_add` and `assign_sub`; `_var_key`.

    Returns:
        A function that undoes it.
    """
    found = {optimizer._var_key(v): i for i, v in enumerate(variables)}
    methods = ("assign", "assign_add", "assign_sub")

    def divert(name: str) -> None:
        def diverted(self: keras.optimizers.Optimizer, original: Method, variable: Variable, value: Gradient) -> None:
            i = found.get(self._var_key(variable))
            if i is None:
                original(variable, value)
            else:
                record(name, i, value)

        override(optimizer, name, diverted)

    for name in methods:
        divert(name)
    return functools.partial(restore, optimizer, methods)
