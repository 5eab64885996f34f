"""Synchronisation of the ranks' `fit`: the part of `Distribute` that runs after all other callbacks."""

import sys
from collections.abc import Callable
from typing import Any

import keras

from hvdx.comm import Comm
from hvdx.errors import HvdxError, ReplicaError
from hvdx.keras.fit import callback_list, py_datasets
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.strategies import StepClient, Strategy


def all_gather_at(comm: Comm, place: str, payload: Any = None) -> list[Any]:
    """Gather a payload from all ranks, and check that they are in the same hook. Collective.

    Every hook that exchanges data begins with this call. If two ranks are in different hooks, they receive an error
    and do not deadlock.

    Args:
        comm: the ranks.
        place: name of the place for messages, such as "the end of epoch 3".
        payload: any picklable object.

    Returns:
        The payloads in rank order.

    Raises:
        ReplicaError: on all ranks, if their places differ.
    """
    everyone = comm.all_gather_object((place, payload), place)
    places = [where for where, _ in everyone]
    if len(set(places)) > 1:
        listed = "; ".join(f"rank {rank} is at {where}" for rank, where in enumerate(places))
        raise ReplicaError(
            f"the ranks are in different places: {listed}. Give fit the same arguments on every rank: validation "
            "data, epochs and initial_epoch too."
        )
    return [theirs for _, theirs in everyone]


class SyncCallback(keras.callbacks.Callback):
    """Callback by which the ranks agree on the length of an epoch and on the end of training.

    Args:
        comm: the ranks.
        agree: function to call after `on_train_begin` of all other callbacks, if there are several ranks.
        begin_epoch: function to call after `on_epoch_begin` of all other callbacks.
    """

    def __init__(self, comm: Comm, agree: Callable[[], None], begin_epoch: Callable[[], None]):
        super().__init__()
        self._comm = comm
        self._agree, self._begin_epoch = agree, begin_epoch
        self._limit: int | None = None
        self._step_client: StepClient | None = None
        # Ends the repeated data of an asynchronous strategy; None if they cannot be repeated.
        self._finish_data: Callable[[], None] | None = None
        self._cut_short = False
        self._stop_wanted = False
        self.reset()

    def reset(self) -> None:
        """Reset the attributes that belong to one fit."""
        #: Number of steps of the first epoch that were taken before this fit.
        self.steps_done = 0
        #: Function that returns True once this rank has received a preemption signal. No rank then receives more steps.
        self.preempted: Callable[[], bool] = bool
        #: Function that each rank then calls, with the number of steps that all ranks took in the epoch.
        self.save_and_leave: Callable[[int], None] = lambda steps: None

    @property
    def steps(self) -> int | None:
        """Number of steps of each rank in an epoch, or None if unknown."""
        return self._limit or self.params.get("steps")

    def all_gather_at(self, place: str, payload: Any = None) -> list[Any]:
        """Call `all_gather_at` with the ranks of this callback. Collective."""
        return all_gather_at(self._comm, place, payload)

    def limit_steps(self, steps: list[int | None], steps_per_execution: int) -> None:
        """End every epoch when the rank with the fewest batches has no more.

        Args:
            steps: number of batches in an epoch on each rank, or None if unknown.
            steps_per_execution: `steps_per_execution` of the compiled model.

        Raises:
            ReplicaError: on all ranks, if a number is unknown or too small.
        """
        self._limit = self._step_client = self._finish_data = None
        self._cut_short = self._stop_wanted = False
        known = self._require_known(steps)
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
                "hvdx.shard distributes the data evenly.",
                file=sys.stderr,
            )

    def share_steps(self, steps: list[int | None], steps_per_execution: int, strategy: Strategy) -> StepClient:
        """End every epoch when the ranks together have taken all their steps; a fast rank takes more. Collective.

        Args:
            steps, steps_per_execution: as for `limit_steps`.
            strategy: asynchronous strategy that hands out the steps.

        Returns:
            The client that requests steps; each of its steps is one execution, of `steps_per_execution` steps.

        Raises:
            ReplicaError: on all ranks, if a number is unknown or 0.
        """
        self._limit = None
        self._cut_short = self._stop_wanted = False
        known = self._require_known(steps)
        if min(known) == 0:
            raise ReplicaError(f"fit: a rank has no step: {known} steps on the ranks. Give each its share of data.")
        numbers = [-(-number // steps_per_execution) for number in known]
        if self._comm.mesh is not None:
            # The ranks of a group take their steps together: as many as the one with the fewest batches.
            for group in self._comm.mesh.groups:
                fewest = min(numbers[rank] for rank in group)
                for rank in group:
                    numbers[rank] = fewest
        total = sum(numbers)
        self._step_client = strategy.step_client(self._comm, total, self.steps_done // steps_per_execution)
        self._finish_data = callback_list.extend_epochs(self, total * steps_per_execution)
        return self._step_client

    def _require_known(self, steps: list[int | None]) -> list[int]:
        unknown = [rank for rank, number in enumerate(steps) if number is None]
        if unknown:
            raise ReplicaError(
                f"fit: the number of steps is not known beforehand on ranks {unknown}, so the ranks could end an epoch "
                "at different times and wait for each other. Give fit steps_per_epoch=, or the dataset a size: "
                "hvdx.shard(dataset, ..., steps=...) or dataset.apply(tf.data.experimental.assert_cardinality(n))."
            )
        return [number for number in steps if number is not None]

    def on_train_begin(self, logs: Any = None) -> None:
        """Call `agree`; all other callbacks have run their `on_train_begin`."""
        if self._comm.size > 1:
            self._agree()

    def on_train_end(self, logs: Any = None) -> None:
        """End the last pass through repeated data."""
        finish, self._finish_data = self._finish_data, None
        if finish is not None:
            finish()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to hand out the steps of an epoch, if the strategy does so; all other callbacks have begun it."""
        if self._step_client is not None:
            self._step_client.begin()
        self._begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Postpone a stop to the end of the epoch, and end an epoch whose steps are taken.

        Without the postponement, a rank would stop in mid-epoch, and the others would wait for it.
        """
        if self.model.stop_training:
            self._stop_wanted = True
            self.model.stop_training = False
        over = self._limit is not None and batch + 1 >= self._limit
        if over or (self._step_client is not None and not self._step_client.another(self.preempted())):
            self._cut_short = self.model.stop_training = True
            if self._step_client is None:
                py_datasets.end_epoch(epoch_iterator(self))
        if self._step_client is not None and self._step_client.stopped:
            self.save_and_leave(self._step_client.taken * self.model.steps_per_execution)

    def check_enough(self, taken: int) -> None:
        """End the job if this rank ran out of data, since the others wait for it in mid-epoch.

        Args:
            taken: number of steps that this rank took in this epoch.

        Raises:
            HvdxError: on this rank alone.
        """
        if self._step_client is not None:
            if self._finish_data is not None and not self._step_client.over and not self._stop_wanted:
                raise HvdxError(
                    f"rank {self._comm.rank} of {self._comm.size} ran out of data after {taken} steps of an epoch, in "
                    "which others may be slower. Give fit a dataset that can be iterated again, not a generator."
                )
            return
        expected = self._limit or self.params.get("steps")
        if expected and taken < expected:
            raise HvdxError(
                f"rank {self._comm.rank} of {self._comm.size} ran out of data after {taken} of {expected} steps of an "
                "epoch. Give fit a smaller steps_per_epoch=, or a dataset that repeats: dataset.repeat()."
            )

    @property
    def wants_stop(self) -> bool:
        """True if this rank asks to end the training after this epoch."""
        return bool(self.model.stop_training and not self._cut_short) or self._stop_wanted

    def reset_cut(self) -> None:
        """Reset the stop by which this callback ended an epoch, so that training continues."""
        if self._cut_short:
            self._cut_short = self.model.stop_training = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop all ranks if one wants to stop. Collective."""
        wanted = bool(self.model.stop_training or self._stop_wanted)
        self.model.stop_training = any(self.all_gather_at(f"the end of epoch {epoch + 1}", wanted))
