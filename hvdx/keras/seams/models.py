"""Models: their layers, random numbers, steps and results."""

import importlib
from collections.abc import Callable
from typing import Literal, overload

import keras

from hvdx.keras.seams.replacing import Method
from hvdx.keras.types import Structure, Variable


def layers_of(model: keras.Model) -> list[keras.layers.Layer]:
    """Return a model, its layers, and the layers inside of them.

    Relies on: `Layer._flatten_layers`.
    """
    return list(model._flatten_layers())


def direct_layers_of(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Return the layers that a layer holds itself.

    Relies on: `Layer._flatten_layers(include_self=, recursive=)`.
    """
    return list(layer._flatten_layers(include_self=False, recursive=False))


def seed_generators_of(layer: keras.layers.Layer) -> list[keras.random.SeedGenerator]:
    """Return the generators of random numbers that a layer holds, each with a variable `state`: seed and counter.

    Relies on: `Layer._seed_generators`.
    """
    return list(getattr(layer, "_seed_generators", ()))


@overload
def common_generator(make: Literal[True]) -> keras.random.SeedGenerator: ...
@overload
def common_generator(make: bool = False) -> keras.random.SeedGenerator | None: ...
def common_generator(make: bool = False) -> keras.random.SeedGenerator | None:
    """Return the generator that `keras.random` uses without a seed; None if it does not exist and `make` is False.

    Relies on: `keras.src.random.seed_generator.global_seed_generator`, and the attribute that it sets.
    """
    module = importlib.import_module("keras.src.random.seed_generator")
    held = importlib.import_module("keras.src.backend.common.global_state")
    name = getattr(module, "GLOBAL_SEED_GENERATOR", "global_seed_generator")
    return module.global_seed_generator() if make else held.get_global_attribute(name)


def initial_epoch(model: keras.Model) -> int | None:
    """Return the epoch at which a fit begins in place of its argument `initial_epoch`; None for the argument.

    Relies on: `Model._initial_epoch`.
    """
    return getattr(model, "_initial_epoch", None)


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Make a fit begin at an epoch; None for its argument.

    Relies on: `fit` reads `Model._initial_epoch` after `on_train_begin`, as `BackupAndRestore` expects.
    """
    model._initial_epoch = epoch


def build_metrics(model: keras.Model, batch: Structure) -> None:
    """Make the variables of a compiled model's metrics.

    Relies on: `Model._symbolic_build(data_batch=)`.
    """
    model._symbolic_build(data_batch=batch)


def metric_variables(model: keras.Model) -> list[Variable]:
    """Return the variables of a model's metrics.

    Relies on: `Model._compile_metrics` holds what `compile` was given, and shows its variables only once it is `built`,
    in the first step.
    """
    held = getattr(model, "_compile_metrics", None)
    given = [] if held is None or held.built else [held._user_metrics, held._user_weighted_metrics]
    metrics = [*model.metrics, *(m for m in keras.tree.flatten(given) if isinstance(m, keras.metrics.Metric))]
    return list({id(v): v for metric in metrics for v in metric.variables}.values())


# Method of a Keras model that turns the state of its metrics into values.
_RESULT = "_get_metrics_result_or_logs"


def change_result(model: keras.Model, change: Callable[[dict[str, float]], None]) -> None:
    """Let a function change the metrics that the running `evaluate` returns, in place.

    Relies on: `evaluate` returns the result of `Model._get_metrics_result_or_logs`, before `on_test_end`.
    """

    def changed(logs: dict[str, float]) -> dict[str, float]:
        restore_result(model)
        result = dict(getattr(model, _RESULT)(logs))
        change(result)
        return result

    if hasattr(model, _RESULT):
        setattr(model, _RESULT, changed)


def restore_result(model: keras.Model) -> None:
    """Undo `change_result`."""
    model.__dict__.pop(_RESULT, None)


def wrap_train_step(model: keras.Model, function: Method) -> None:
    """Make a model call `function(own_step, data)` as its training step.

    Relies on: `Model.make_train_function` calls `self.train_step`, and an attribute of the object is found first.
    """
    own_step = model.train_step

    def train_step(*args: object, **named: object) -> object:
        return function(own_step, *args, **named)

    train_step._hvdx_before = vars(model).get("train_step")  # type: ignore[attr-defined]
    model.train_step = train_step


def restore_train_step(model: keras.Model) -> None:
    """Undo `wrap_train_step`; do nothing if the model has its own training step."""
    step = vars(model).get("train_step")
    if hasattr(step, "_hvdx_before"):
        if step._hvdx_before is None:
            del model.train_step
        else:
            model.train_step = step._hvdx_before


def use_train_function(model: keras.Model, function: Method | None) -> None:
    """Give a model its training function; None to have one made.

    Relies on: `Model.make_train_function` keeps `self.train_function` unless it is None or `force=True`.
    """
    model.train_function = function
