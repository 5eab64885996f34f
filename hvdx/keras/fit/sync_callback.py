"""Keeps the ranks' `fit` in step: the half of `Distribute` that runs after all other callbacks."""

import sys
from collections.abc import Callable
from typing import Any

import keras

from hvdx.comm import Comm
from hvdx.errors import HvdxError, ReplicaError
from hvdx.keras.fit import callback_list
from hvdx.strategies import StepClient, Strategy


def all_gather_at(comm: Comm, place: str, payload: Any = None) -> list[Any]:
    """Call the roll before ranks exchange anything in a hook, so that two hooks never wait for each other. Collective.

    Args:
        comm: the ranks.
        place: where this rank is, for people.
        payload: picklable; what the others get to see.

    Returns:
        The payloads in rank order.

    Raises:
        ReplicaError: on all ranks, if they are in different places.
    """
    everyone = comm.all_gather_object((place, payload), place)
    places = [where for where, _ in everyone]
    if len(set(places)) > 1:
        listed = "; ".join(f"rank {rank} is at {where}" for rank, where in enumerate(places))
        raise ReplicaError(
            f"the ranks are in different places: {listed}. Give fit the same arguments on every rank: validation "
            "data, epochs and initial_epoch too."
        )
    return [said for _, said in everyone]


class SyncCallback(keras.callbacks.Callback):
    """Agrees over the ranks on where they are, how long an epoch is, and when to stop.

    Args:
        comm: the ranks.
        agree: called when every other callback has restored what it wanted to restore.
    """

    def __init__(self, comm: Comm, agree: Callable[[], None]):
        super().__init__()
        self._comm = comm
        self._agree = agree
        self._limit: int | None = None
        self._step_client: StepClient | None = None
        self._endless = False
        self._cut = False
        self._stop_wanted = False
        self.renew()

    def renew(self) -> None:
        """A fit begins, and nothing is known of it yet."""
        #: Steps of the first epoch that were taken before.
        self.begun = 0
        #: Whether this rank wants the steps that are dealt out to end, so that all can save; and what all do then.
        self.ending: Callable[[], bool] = bool
        self.save: Callable[[int], None] = lambda steps: None

    @property
    def steps(self) -> int | None:
        """Steps that each rank takes in an epoch; None where nobody knows."""
        return self._limit or self.params.get("steps")

    def all_gather_at(self, place: str, payload: Any = None) -> list[Any]:
        """See `hvdx.keras.fit.sync_callback.all_gather_at`."""
        return all_gather_at(self._comm, place, payload)

    def limit_steps(self, steps: list[int | None], steps_per_execution: int) -> None:
        """Have every epoch end where the rank with the fewest batches ends.

        Args:
            steps: batches an epoch on each rank; None where nobody knows.
            steps_per_execution: as compiled.

        Raises:
            ReplicaError: on all ranks, if a number is not known, or too small.
        """
        self._limit = self._step_client = None
        self._cut = self._stop_wanted = False
        known = self._known(steps)
        if len(set(known)) == 1:
            return
        fewest = min(known) // steps_per_execution * steps_per_execution
        if fewest == 0:
            raise ReplicaError(
                f"fit: a rank has no full step: {known} steps on the ranks. Give each its share of data."
            )
        self._limit = fewest
        if self._comm.rank == 0:
            print(
                f"hvdx: the ranks have {min(known)} to {max(known)} steps; every epoch ends after {fewest}. "
                "hvdx.shard deals the data out evenly.",
                file=sys.stderr,
            )

    def share_steps(self, steps: list[int | None], steps_per_execution: int, strategy: Strategy) -> StepClient:
        """Have every epoch end when the ranks together have taken their steps: a fast one takes more of them.

        Args:
            steps, steps_per_execution: see `limit_steps`.
            strategy: deals the steps out.

        Returns:
            What deals them out; a ticket is for one execution.

        Raises:
            ReplicaError: see `limit_steps`.
        """
        self._limit = None
        self._cut = self._stop_wanted = False
        known = self._known(steps)
        if min(known) == 0:
            raise ReplicaError(f"fit: a rank has no step: {known} steps on the ranks. Give each its share of data.")
        total = sum(-(-number // steps_per_execution) for number in known)
        self._step_client = strategy.deal_out(self._comm, total, self.begun // steps_per_execution)
        self._endless = callback_list.prolong_epochs(self, total * steps_per_execution)
        return self._step_client

    def _known(self, steps: list[int | None]) -> list[int]:
        unknown = [rank for rank, number in enumerate(steps) if number is None]
        if unknown:
            raise ReplicaError(
                f"fit: the number of steps is not known beforehand on ranks {unknown}, so the ranks could end an epoch "
                "at different times and wait for each other. Give fit steps_per_epoch=, or the dataset a size: "
                "hvdx.shard(dataset, ..., steps=...) or dataset.apply(tf.data.experimental.assert_cardinality(n))."
            )
        return [number for number in steps if number is not None]

    def on_train_begin(self, logs: Any = None) -> None:
        """Every other callback has had its say."""
        if self._comm.size > 1:
            self._agree()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """All its steps are to be dealt out."""
        if self._step_client is not None:
            self._step_client.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A stop in mid-epoch on one rank would leave the others waiting: keep it for the end of the epoch."""
        if self.model.stop_training:
            self._stop_wanted = True
            self.model.stop_training = False
        over = self._limit is not None and batch + 1 >= self._limit
        if over or (self._step_client is not None and not self._step_client.another(self.ending())):
            self._cut = self.model.stop_training = True
        if self._step_client is not None and self._step_client.stopped:
            self.save(self._step_client.taken * self.model.steps_per_execution)

    def check_enough(self, taken: int) -> None:
        """End the job if this rank's data ran out: the others are in mid-epoch, waiting for it.

        Args:
            taken: steps of this epoch.

        Raises:
            HvdxError: on this rank.
        """
        if self._step_client is not None:
            if self._endless and not self._step_client.over and not self._stop_wanted:
                raise HvdxError(
                    f"rank {self._comm.rank} of {self._comm.size} ran out of data after {taken} steps of an epoch, in "
                    "which others may be slower. Give fit a dataset that can be gone through again, not a generator."
                )
            return
        expected = self._limit or self.params.get("steps")
        if expected and taken < expected:
            raise HvdxError(
                f"rank {self._comm.rank} of {self._comm.size} ran out of data after {taken} of {expected} steps of an "
                "epoch. Give fit a smaller steps_per_epoch=, or a dataset that repeats: dataset.repeat()."
            )

    @property
    def stops(self) -> bool:
        """Whether this rank wants to end the training with this epoch."""
        return bool(self.model.stop_training and not self._cut) or self._stop_wanted

    def restart_timer(self) -> None:
        """The epoch that was cut short is over; go on with the next."""
        if self._cut:
            self._cut = self.model.stop_training = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """All ranks stop, or none."""
        wanted = bool(self.model.stop_training or self._stop_wanted)
        self.model.stop_training = any(self.all_gather_at(f"the end of epoch {epoch + 1}", wanted))
