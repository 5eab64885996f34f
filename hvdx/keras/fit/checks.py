"""Checks of the weights: finite, and the same bits on all ranks."""

from typing import Literal

from hvdx.comm import Comm
from hvdx.errors import ConfigError
from hvdx.keras.adapters import finite
from hvdx.keras.fit import replicas
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.counting import Counting
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.sync_callback import SyncCallback
from hvdx.keras.types import Logs
from hvdx.keras.weight_parts import by_ranks


class Checks(Part):
    """Check the weights at the end of each epoch, and every few steps.

    Args:
        comm: the ranks.
        every: `check_every` of `Distribute`.
        counting: counts of the fit.
        attachment: optimisers of the fit.
        sync: knows whether a `TerminateOnNaN` stops the fit, which is no error then.

    Raises:
        ConfigError: if `every` is something else, or a number of steps under an asynchronous strategy.
    """

    def __init__(
        self,
        comm: Comm,
        every: int | Literal["epoch"] | None,
        counting: Counting,
        attachment: Attachment,
        sync: SyncCallback,
    ):
        super().__init__()
        if every not in ("epoch", None) and not (isinstance(every, int) and every > 0):
            raise ConfigError(f"check_every: expected 'epoch', a positive number of steps or None, got {every!r}.")
        if attachment.strategy.asynchronous and isinstance(every, int):
            raise ConfigError(
                f"check_every={every}: under {attachment.strategy!r}, workers have different weights until the end of "
                "an epoch. Use check_every='epoch'."
            )
        self._comm, self._every, self._counting, self._attachment = comm, every, counting, attachment
        self._sync = sync

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Check the weights if that is due."""
        if isinstance(self._every, int) and (batch + 1) % self._every == 0:
            for adapter in self._attachment.adapters:
                adapter.drain()
            self._attachment.rejoin()
            self._check(f"after step {batch + 1} of epoch {self._counting.epoch + 1}")
            for adapter in self._attachment.adapters:
                adapter.go_on()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Check the weights; if `every` is None, only whether they are finite."""
        self._check(f"after epoch {epoch + 1}")

    def _check(self, when: str) -> None:
        firsts = [adapter.first_bad() for adapter in self._attachment.adapters]
        bad = finite.check(self.model.trainable_weights, firsts, self._comm, when, self._sync.terminates)
        if bad or self._every is None:
            return
        for ranks, some in by_ranks(replicas.shared_state_of(self.model), self._comm):
            replicas.check_identical(some, ranks, when)
