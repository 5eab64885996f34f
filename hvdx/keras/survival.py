"""A fit that goes on after ranks have died: spares that take their places, their samples, and the duties of rank 0."""

from collections.abc import Sequence

import keras

from hvdx.comm import Comm, supervision
from hvdx.errors import ConfigError
from hvdx.keras import saving
from hvdx.keras.checkpoint.restoring import first, give_state
from hvdx.keras.fit import callback_list, data
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.part import Part, Parts
from hvdx.keras.fit.positions import all_gather_at
from hvdx.keras.fit.sync_callback import SyncCallback
from hvdx.keras.seams.callbacks import numbers_of, set_numbers
from hvdx.keras.seams.models import set_initial_epoch
from hvdx.keras.seams.optimizers import is_of_keras

# Attributes of callbacks of Keras that may differ between ranks.
_OWN = ("verbose", "params")


class Survival:
    """Work of the ranks that are left after others have died, between the steps and epochs of a fit.

    Args:
        comm: the ranks.
        attachment: optimisers of the fit.
        sync: part of the fit whose hooks Keras calls.
        leader: the callback that calls this object.
    """

    def __init__(self, comm: Comm, attachment: Attachment, sync: SyncCallback, leader: Parts):
        self._comm, self._attachment, self._sync, self._leader = comm, attachment, sync, leader
        # Callbacks of the fit, and those among them that write, which other ranks than 0 do not call.
        self._list: keras.callbacks.CallbackList | None = None
        self._muted: list[keras.callbacks.Callback] = []
        self._is_new = False
        # Whether this was another rank than 0 before the last callbacks.
        self._follows = False
        # Recoveries after which the duties of rank 0, and the samples, have been distributed.
        self._taken = self._dealt = comm.recoveries
        # The last epoch that has ended, and its logs.
        self._ended: tuple[int | None, dict[str, object] | None] = None, None

    def arrange(self, callbacks: keras.callbacks.CallbackList, metrics: type[Part]) -> None:
        """Order the callbacks of a fit, and mute those that only rank 0 calls.

        Args:
            callbacks: all callbacks of the fit.
            metrics: class of the part that replaces this rank's metrics by those of all ranks.
        """
        self._list = callbacks
        self._muted = callback_list.arrange(callbacks, self._leader, self._sync, metrics, self._comm.rank)

    def begin(self) -> None:
        """Begin a fit."""
        callback_list.unmute(self._muted)
        self._taken, self._dealt = self._comm.recoveries, 0
        # Workers may have died in the last epoch of the fit before.
        self.deal()
        self._ended = None, None

    def wait(self) -> None:
        """Wait for a place, if this rank is a spare.

        Raises:
            ConfigError: if the model is not built.
            SystemExit: if the job has ended without this rank.
        """
        if not self._comm.waits:
            return
        model = self._leader.model
        if not model.built:
            raise ConfigError(
                f"--spares: expected a model that is built, since a spare receives its weights before the first "
                f"step; got {model.name} without weights. Do: give it an Input, or call it on a batch before fit."
            )
        if not self._comm.wait(saving.fits()):
            raise SystemExit(0)
        self._is_new = True
        self._give(None)

    def begin_epoch(self, epoch: int) -> None:
        """Before the other callbacks begin an epoch: let spares join, and deal the samples."""
        if self._is_new:
            self._is_new = False
            # Keras has read it; the next fit has its own.
            set_initial_epoch(self._leader.model, None)
        # The exchanges of a provisional strategy measure steps of the same ranks.
        elif not self._attachment.strategy.provisional and self._comm.can_admit(saving.fits()):
            for part in self._parts():
                part.before_newcomers()
            self._comm.admit()
            self._give(epoch)
        self.deal()
        # Rank 0 may have died in its callbacks at the end of the last epoch.
        self.take_over(*self._ended)

    def deal(self) -> None:
        """Deal the samples of the next pass among the ranks that are left."""
        if self._dealt != self._comm.recoveries:
            self._dealt = self._comm.recoveries
            data.deal(self._comm.rank, self._comm.size)

    def take_over(self, epoch: int | None, ended: dict[str, object] | None = None) -> None:
        """On the rank that has become rank 0, run the callbacks that write.

        Args:
            epoch: current epoch; None between two.
            ended: logs of the epoch, if it has ended.
        """
        if self._taken == self._comm.recoveries:
            return
        self._taken = self._comm.recoveries
        if self._comm.rank == 0 and self._list is not None and self._muted:
            muted, self._muted = self._muted, []
            callback_list.revive(self._leader, muted, self._leader.model, epoch, ended)
            callback_list.insert(self._list, self._leader, muted)

    def end_epoch(self, epoch: int, logs: dict[str, object]) -> None:
        """After the other callbacks have ended an epoch."""
        self.take_over(epoch)
        self._ended = epoch, logs

    def begin_end(self) -> None:
        """Finish the last epoch, before the other callbacks end the fit."""
        self.take_over(*self._ended)

    def end(self) -> None:
        """After the parts of hvdx have ended the fit."""
        if self._list is not None:
            callback_list.show_no_costs([*self._list.callbacks, *self._muted])
        self._follows = self._comm.rank > 0

    def end_fit(self) -> None:
        """Where ranks may die, the rank that has become rank 0 runs the last callbacks again. Collective."""
        if not self._comm.survives or self._list is None:
            return
        all_gather_at(self._comm, "the end of fit")
        if self._comm.rank or not self._follows:
            return
        # Rank 0 has run its callbacks at the end of the last epoch. Keras is at the end of the list.
        callback_list.revive(self._leader, self._muted, self._leader.model, self._ended[0])
        for callback in self._muted:
            callback.on_train_end()
        if any(map(callback_list.may_write, self._list.callbacks)):
            supervision.report("unwritten")

    def _parts(self) -> list[Part]:
        """Return the parts of `Distribute`, and those among the other callbacks, such as `Checkpoint`."""
        others = self._callbacks()
        own = (self._leader, self._sync)
        return [*self._leader.parts, *(c for c in others if isinstance(c, Part) and c not in own)]

    def _callbacks(self) -> Sequence[keras.callbacks.Callback]:
        return [] if self._list is None else self._list.callbacks

    def _give(self, epoch: int | None) -> None:
        """Give the ranks that have joined the state of the training, between two epochs. Collective.

        Args:
            epoch: number of the epoch that begins; None on a rank that is new.

        Raises:
            HvdxError: on a rank that is new, if all others have died.
        """
        comm, attachment, model, is_new = self._comm, self._attachment, self._leader.model, epoch is None
        parts = self._parts()
        strategy = first(comm, lambda: attachment.strategy, is_new)
        if is_new:
            attachment.follow(strategy)
        give_state(model, comm, attachment, is_new)
        kept = [c for c in self._callbacks() if _has_numbers(c)]
        begun, states, numbers = first(
            comm, lambda: (epoch, [part.now() for part in parts], [_state_of(c) for c in kept]), is_new
        )
        if is_new:
            set_initial_epoch(model, begun)
            for part, theirs in zip(parts, states, strict=True):
                part.begin_late(theirs)
            for callback, theirs in zip(kept, numbers, strict=True):
                set_numbers(callback, theirs)


def _has_numbers(callback: keras.callbacks.Callback) -> bool:
    return is_of_keras(type(callback)) and not isinstance(callback, Part) and not callback_list.writes(callback)


def _state_of(callback: keras.callbacks.Callback) -> dict[str, object]:
    return {name: value for name, value in numbers_of(callback).items() if name not in _OWN}
