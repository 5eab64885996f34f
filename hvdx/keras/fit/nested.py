"""A `fit` inside another `fit` of the same model."""

import inspect
from typing import Any

from hvdx.errors import ConfigError
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of


def refuse(callback: Any) -> None:
    """Refuse a nested `fit` with `Distribute`: its end would detach the optimiser of the outer one.

    Args:
        callback: the callback of the nested `fit`, in its `on_train_begin`.

    Raises:
        ConfigError: if the model is being trained by an outer `fit` with `Distribute`.
    """
    adapters = [adapter_of(optimizer) for optimizer in optimizers_of(callback.model)]
    # After an exception the optimiser is attached too, but no other `fit` is running.
    if any(a is not None and a.owner is not None for a in adapters) and _running_fits(callback.model) > 1:
        raise ConfigError.on_all_ranks(
            f"fit: model {callback.model.name}: expected one fit with Distribute at a time, got one inside another. "
            "Do: train the model again after the outer fit has ended."
        )


def _running_fits(model: Any) -> int:
    """Count the calls of Keras' `fit` of a model that have not returned; Keras keeps no count."""
    frame, found = inspect.currentframe(), 0
    while frame is not None:
        # A `fit` of a subclass that calls Keras' own has no such iterator.
        local = frame.f_locals
        found += frame.f_code.co_name == "fit" and local.get("self") is model and "epoch_iterator" in local
        frame = frame.f_back
    return found
