"""The checkpoint of `hvdx run --checkpoint` in a script that has none, and the report that training has begun."""

import os

import keras

from hvdx.comm import Comm, supervision
from hvdx.errors import ConfigError
from hvdx.keras.checkpoint import Checkpoint
from hvdx.keras.fit import callback_list
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.part import Part
from hvdx.keras.types import Logs

#: Environment variable: directory of the checkpoints.
VARIABLE = "HVDX_CHECKPOINT"
#: Environment variable: the interval, see `Checkpoint`.
EVERY_VARIABLE = "HVDX_CHECKPOINT_EVERY"
_EVERY = "1 minute"

# Fits of this process under `Distribute` that have begun. A script that starts again calls them in the same order.
_fits = 0


def fits() -> int:
    """Return the number of fits of this process under `Distribute` that have begun."""
    return _fits


class Saving(Part):
    """Add a `Checkpoint` to the callbacks of a fit, and tell the supervisor of the job that the fit trains.

    Args:
        comm: the ranks.
        attachment: knows the strategy.
    """

    alone = True

    def __init__(self, comm: Comm, attachment: Attachment):
        super().__init__()
        self._comm, self._attachment = comm, attachment
        self._saves = self._added = False

    def add_checkpoint(self, callbacks: keras.callbacks.CallbackList) -> Part | None:
        """Add the `Checkpoint` that the environment asks for, unless the list has one.

        The first fit of the process saves to the directory, and the N-th to its folder `fit-N`.

        Returns:
            The new callback, whose `set_model` is to be called.

        Raises:
            ConfigError: if the interval is not one of `Checkpoint`, or not one for the strategy.
        """
        folder = os.environ.get(VARIABLE)
        self._added = False
        self._saves = any(isinstance(c, Part) and c.saves for c in callbacks.callbacks)
        if self._saves or not folder:
            return None
        if _fits:
            folder = os.path.join(folder, f"fit-{_fits + 1}")
        every = os.environ.get(EVERY_VARIABLE) or ("1 epoch" if self._attachment.strategy.asynchronous else _EVERY)
        try:
            added = Checkpoint(folder, every)
        except ConfigError as error:
            raise ConfigError(f"{EVERY_VARIABLE}={every}: {error}") from error
        callback_list.append(callbacks, added)
        self._saves = self._added = True
        return added

    def on_train_begin(self, logs: Logs = None) -> None:
        """Count the fit.

        Raises:
            ConfigError: if the model is not built, since a restart could not restore it.
        """
        global _fits
        if self._added and not self.model.built:
            raise ConfigError.on_all_ranks(
                f"{VARIABLE}: expected a model that is built, since a restart restores it before the first step; got "
                f"{self.model.name} without weights. Do: give it an Input, or call it on a batch before fit."
            )
        _fits += 1

    def end_first_step(self) -> None:
        """Report that training has begun."""
        if self._comm.rank == 0:
            supervision.report("training", saves=self._saves)
