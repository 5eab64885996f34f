"""Which variables belong to a rank: one answer for the broadcast, the guard, checkpoints and what is restored."""

from collections.abc import Callable
from typing import Any

from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.adapters.optimizer_state import local_variables


def accumulated(model: Any) -> list[Any]:
    """Gradients that a model's optimisers are still accumulating."""
    return [v for optimizer in optimizers_of(model) for v in local_variables(optimizer)]


def rank_local_ids(
    model: Any,
    within_epoch: bool = False,
    now: bool = True,
    of: Callable[[int, Adapter], bool] = lambda i, adapter: True,
) -> set[int]:
    """`id` of the variables of a model and its optimisers that belong to this rank; all others are alike on all ranks.

    Args:
        model: with its optimisers.
        within_epoch: weights that no gradient reaches (moving averages and the like) count as well: they become one at
            the end of an epoch.
        now: variables that belong to this rank at this moment; else those that may come to.
        of: which of the adapters count, by the number of the optimiser.
    """
    found = accumulated(model) + (list(model.non_trainable_weights) if within_epoch else [])
    for i, optimizer in enumerate(optimizers_of(model)):
        adapter = adapter_of(optimizer)
        if adapter is not None and of(i, adapter):
            found += adapter.rank_local_variables(now)
    return {id(v) for v in found}
