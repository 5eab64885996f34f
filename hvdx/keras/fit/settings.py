"""Settings of a fit: arguments, limit, and orders of data that must be the same on all ranks."""

from typing import Any

from hvdx.errors import ReplicaError
from hvdx.keras.fit import data, limits
from hvdx.keras.fit.limits import Limit
from hvdx.keras.fit.part import Part
from hvdx.keras.seams.models import initial_epoch, set_initial_epoch


class Settings(Part):
    """Compare the settings of the ranks, and make the first epoch and the orders of data the same."""

    def __init__(self, limit: Limit):
        super().__init__()
        self._limit = limit

    def offer(self) -> dict[str, object]:
        """Return the settings of this rank."""
        return {
            "steps_per_execution": self.model.steps_per_execution,
            "epochs": self.params.get("epochs"),
            "built": self.model.built,
            limits.VARIABLE: self._limit.text,
            "initial_epoch": initial_epoch(self.model),
            "shares": data.state(),
        }

    def agree(self, offered: list[dict[str, Any]]) -> None:
        """Compare the settings.

        Raises:
            ReplicaError: on all ranks, if they differ.
        """
        for name in ("steps_per_execution", "epochs", "built", limits.VARIABLE):
            values = [theirs[name] for theirs in offered]
            if len(set(values)) > 1:
                raise ReplicaError(f"fit: {name} differs between ranks: {values}. Every rank must be given the same.")
        data.agree_on_orders([theirs["shares"] for theirs in offered])
        set_initial_epoch(self.model, offered[0]["initial_epoch"])
