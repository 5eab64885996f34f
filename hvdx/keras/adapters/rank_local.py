"""Rank-local variables: one definition for the broadcast, the comparison of replicas, and checkpoints."""

from collections.abc import Callable
from typing import Any

from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.adapters.optimizer_state import accumulated_gradients


def accumulated(model: Any) -> list[Any]:
    """Return the gradients that a model's optimisers are still accumulating."""
    return [v for optimizer in optimizers_of(model) for v in accumulated_gradients(optimizer)]


def rank_local_ids(
    model: Any,
    within_epoch: bool = False,
    now: bool = True,
    of: Callable[[int, Adapter], bool] = lambda i, adapter: True,
) -> set[int]:
    """Return the `id` of each variable of a model and its optimisers that is rank-local.

    All other variables are the same on all ranks.

    Args:
        model: model with its optimisers.
        within_epoch: include weights that no gradient reaches (moving averages and the like), which ranks combine only
            at the end of an epoch.
        now: True for variables that are rank-local at this moment; False for those that may become so.
        of: filter that takes the index of an optimiser and its adapter, and returns whether the adapter counts.
    """
    found = accumulated(model) + (list(model.non_trainable_weights) if within_epoch else [])
    for i, optimizer in enumerate(optimizers_of(model)):
        adapter = adapter_of(optimizer)
        if adapter is not None and of(i, adapter):
            found += adapter.rank_local_variables(now)
    return {id(v) for v in found}
