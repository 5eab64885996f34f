"""AutoGraph, and functions and graphs that TensorFlow has traced."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from hvdx.keras.backend import tf

#: What `tf.function` makes, and its trace for one signature; both are graphs to call.
TracedFunction: TypeAlias = "tf.types.experimental.PolymorphicFunction"
ConcreteFunction: TypeAlias = "tf.types.experimental.ConcreteFunction"


def leave_to_python(*packages: str, convert: Sequence[str] = ()) -> None:
    """Make AutoGraph call the functions of packages as they are, except those of the packages in `convert`.

    Relies on: `tensorflow.python.autograph.core.config.CONVERSION_RULES`, of which the first that fits counts.
    TensorFlow has a public way for single functions only (`do_not_convert`).
    """
    config: Any = importlib.import_module("tensorflow.python.autograph.core.config")
    rules = (*map(config.Convert, convert), *map(config.DoNotConvert, packages))
    config.CONVERSION_RULES = (*rules, *config.CONVERSION_RULES)


def traces_for_xla() -> bool:
    """Return whether the function that is being traced is for XLA.

    Relies on: `Graph._get_control_flow_context`, its `IsXLAContext` and `outer_context`, and `FuncGraph.outer_graph`.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return False


def functions_in(thing: object, depth: int = 4) -> Iterator[TracedFunction]:
    """Yield the `tf.function`s in the closures of a training function, or the `tf.function` itself.

    Relies on: Keras keeps those of a training step in closures; `Function._list_all_concrete_functions`.
    """
    if hasattr(thing, "_list_all_concrete_functions"):
        yield thing
    elif depth and callable(thing):
        for value in closure_of(thing):
            yield from functions_in(value, depth - 1)


def traces_of(function: TracedFunction) -> list[ConcreteFunction]:
    """Return the concrete functions of a `tf.function` that were traced.

    Relies on: `Function._list_all_concrete_functions`.
    """
    return list(function._list_all_concrete_functions())


def closure_of(function: object) -> list[Any]:
    return list(inspect.getclosurevars(function).nonlocals.values()) if inspect.isfunction(function) else []
