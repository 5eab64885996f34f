"""A `fit` inside another `fit` that trains with the same optimiser."""

from hvdx.errors import ConfigError
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.fit.part import Part
from hvdx.keras.seams.frames import running_fits
from hvdx.keras.types import Logs


class Nested(Part):
    """Refuse a nested `fit` with `Distribute`: its end would detach the optimiser of the outer one."""

    def on_train_begin(self, logs: Logs = None) -> None:
        """Refuse the `fit`.

        Raises:
            ConfigError: if an outer `fit` with `Distribute` is training the model, or a model that it is a part of.
        """
        model = self.model
        adapters = [adapter_of(optimizer) for optimizer in optimizers_of(model)]
        outer = [a.owner.model for a in adapters if a is not None and a.owner is not None]
        # After an exception the optimiser is attached too, but the `fit` is not running.
        if any(running_fits(other) > (other is model) for other in outer):
            raise ConfigError.on_all_ranks(
                f"fit: model {model.name}: expected one fit with Distribute at a time, got one inside another. "
                "Do: train the model again after the outer fit has ended."
            )
