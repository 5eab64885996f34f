"""Which variables belong to a rank: one answer for the broadcast, the guard, checkpoints and what is restored."""

from collections.abc import Callable
from typing import Any

from hvdx.keras.binding import Binding
from hvdx.keras.optimizer import binding_of, optimizers_of
from hvdx.keras.optimizer_state import local_variables


def accumulated(model: Any) -> list[Any]:
    """Gradients that a model's optimisers are still accumulating."""
    return [v for optimizer in optimizers_of(model) for v in local_variables(optimizer)]


def own_ids(
    model: Any,
    within_epoch: bool = False,
    now: bool = True,
    of: Callable[[int, Binding], bool] = lambda i, binding: True,
) -> set[int]:
    """`id` of the variables of a model and its optimisers that belong to this rank; all others are alike on all ranks.

    Args:
        model: with its optimisers.
        within_epoch: weights that no gradient reaches (moving averages and the like) count as well: they become one at
            the end of an epoch.
        now: variables that belong to this rank at this moment; else those that may come to.
        of: which of the bindings count, by the number of the optimiser.
    """
    found = accumulated(model) + (list(model.non_trainable_weights) if within_epoch else [])
    for i, optimizer in enumerate(optimizers_of(model)):
        binding = binding_of(optimizer)
        if binding is not None and of(i, binding):
            found += binding.own_variables(now)
    return {id(v) for v in found}
