"""Rank-local variables: one definition for the broadcast, the comparison of replicas, and checkpoints."""

import weakref
from collections.abc import Callable
from typing import TypeAlias

import keras

from hvdx.errors import ConfigError
from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.optimizer_state import accumulated_gradients
from hvdx.keras.seams.layers import KerasVariable
from hvdx.keras.types import Variable

#: Variable, or layer for all its weights without a gradient.
Owner: TypeAlias = keras.Variable | keras.layers.Layer
# For each model, the weights that `Distribute` was given as `local` and as `summed`, as variables or layers.
_declared: "weakref.WeakKeyDictionary[keras.Model, tuple[list[Owner], list[Owner]]]" = weakref.WeakKeyDictionary()


def declare(model: keras.Model, local: list[Owner], summed: list[Owner]) -> None:
    """Set the weights without a gradient that each rank keeps for itself, and those that are summed over the ranks.

    Args:
        model: model that is to be trained.
        local, summed: variables, or layers for all their weights without a gradient. Layers may be built later.

    Raises:
        ConfigError: if a variable is not a weight of the model, is trainable, or is in both lists.
    """
    _declared[model] = local, summed
    known, trained = {id(v) for v in model.weights}, {id(v) for v in model.trainable_weights}
    mine = {id(v) for v in _without_gradient(local)}
    for option, variables in (("local", _without_gradient(local)), ("summed", _without_gradient(summed))):
        for variable in variables:
            if id(variable) not in known or id(variable) in trained:
                what = "a trainable one" if id(variable) in trained else "one that the model does not track"
                raise ConfigError.on_all_ranks(
                    f"Distribute: {option}: variable {variable.path}: expected a weight that no gradient reaches, got "
                    f"{what}. Do: make it with add_weight(..., trainable=False), or train local layers by "
                    "hvdx.keras.PartialDistributedOptimizer."
                )
            if option == "summed" and id(variable) in mine:
                raise ConfigError.on_all_ranks(
                    f"Distribute: variable {variable.path}: expected in local or in summed, got it in both. Leave it "
                    "out of one."
                )


def declared(model: keras.Model) -> tuple[list[Variable], list[Variable]]:
    """Return the weights of a model that `declare` made local, and those that it made summed."""
    local, summed = _declared.get(model, ([], []))
    return _without_gradient(local), _without_gradient(summed)


def _without_gradient(items: list[Owner]) -> list[Variable]:
    parts = [[item] if isinstance(item, KerasVariable) else item.non_trainable_weights for item in items]
    return list({id(v): v for part in parts for v in part}.values())


def accumulated(model: keras.Model) -> list[Variable]:
    """Return the gradients that a model's optimisers are still accumulating."""
    return [v for optimizer in optimizers_of(model) for v in accumulated_gradients(optimizer)]


def rank_local_ids(
    model: keras.Model,
    within_epoch: bool = False,
    now: bool = True,
    of: Callable[[int, Adapter], bool] = lambda i, adapter: True,
) -> set[int]:
    """Return the `id` of each variable of a model and its optimisers that is rank-local.

    All other variables are the same on all ranks.

    Args:
        model: model with its optimisers.
        within_epoch: include weights that no gradient reaches (moving averages and the like), which ranks combine only
            at the end of an epoch. Those that are summed are not included: call `state.add_up` before.
        now: True for variables that are rank-local at this moment; False for those that may become so.
        of: filter that takes the index of an optimiser and its adapter, and returns whether the adapter counts.
    """
    local, summed = declared(model)
    found = accumulated(model) + local
    if within_epoch:
        counted = {id(v) for v in summed}
        found += [v for v in model.non_trainable_weights if id(v) not in counted]
    for i, optimizer in enumerate(optimizers_of(model)):
        adapter = adapter_of(optimizer)
        if adapter is not None and of(i, adapter):
            found += adapter.rank_local_variables(now)
    return {id(v) for v in found}
