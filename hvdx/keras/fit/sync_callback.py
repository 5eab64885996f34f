"""Length of the epochs and end of training: what the ranks agree on after all other callbacks.

N ranks take one N-th of the steps of one process, so learning-rate schedules that count steps may not end in a fit.
"""

from __future__ import annotations

from collections.abc import Callable

import keras

from hvdx.comm import Comm
from hvdx.errors import HvdxError, ReplicaError
from hvdx.keras.adapters import finite
from hvdx.keras.adapters.optimizer import optimizers_of
from hvdx.keras.adapters.rank_local import rank_local_ids
from hvdx.keras.backend import tf
from hvdx.keras.fit import callback_list, py_datasets
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.counting import Counting
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.positions import all_gather_at
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.frames import calling_list, epoch_iterator
from hvdx.keras.seams.iterators import batches_of_pass
from hvdx.keras.seams.models import initial_epoch
from hvdx.keras.seams.optimizers import rate_of, step_counter
from hvdx.keras.types import Logs
from hvdx.log import Log
from hvdx.strategies import StepClient

_log = Log(__name__)

# Numbers of steps in the schedules of Keras, and in those of others that name them so. `boundaries` is a list.
_COUNTS = ("decay_steps", "first_decay_steps", "boundaries", "warmup_steps", "total_steps")


class SyncCallback(Part):
    """Callback by which the ranks agree on the length of an epoch and on the end of training."""

    def __init__(self, comm: Comm, counting: Counting, attachment: Attachment, parts: Part):
        super().__init__()
        self._comm, self._counting, self._attachment = comm, counting, attachment
        self._parts = parts
        self._limit: int | None = None
        self._step_client: StepClient | None = None
        # Ends the repeated data of an asynchronous strategy; None if they cannot be repeated.
        self._finish_data: Callable[[], None] | None = None
        self._cut_short = False
        self._stop_wanted = False
        self._callback_list: keras.callbacks.CallbackList | None = None
        # Parts among the other callbacks, such as `Checkpoint`.
        self._others: list[Part] = []
        self._steps_before = 0
        # Batches of a pass through the data, if all ranks have as many, and those taken in the present pass.
        self._batches: int | None = None
        self._passed = 0
        # True after a step in which the weights of all ranks became NaN.
        self._diverged = False
        #: True if all ranks have a `TerminateOnNaN`.
        self.terminates = False

    @property
    def has_others(self) -> bool:
        """True if there are parts among the other callbacks, such as `Checkpoint`."""
        return bool(self._others)

    @property
    def steps(self) -> int | None:
        """Number of steps of each rank in an epoch, or None if unknown."""
        return self._limit or self.params.get("steps")

    @property
    def steps_done(self) -> int:
        """As the other parts have it, one of which may have resumed a training."""
        return max((part.steps_done for part in self._others), default=0)

    def offer(self) -> tuple[int | None, int | None, bool]:
        """Return the numbers of batches in an epoch and in a pass of this rank, or None, and whether NaN ends it."""
        callbacks = [] if self._callback_list is None else self._callback_list.callbacks
        terminates = any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in callbacks)
        return self.params.get("steps"), batches_of_pass(epoch_iterator(self)), terminates

    def agree(self, offered: list[tuple[int | None, int | None, bool]]) -> None:
        """Set the length of an epoch. Collective under an asynchronous strategy."""
        self._limit = self._step_client = self._finish_data = None
        self._cut_short = self._stop_wanted = self._diverged = False
        self._steps_before, self._passed = -self.steps_done, 0
        steps, batches, terminate = zip(*offered, strict=True)
        self._batches = batches[0] if len(set(batches)) == 1 else None
        self.terminates = all(terminate)
        unknown = [rank for rank, number in enumerate(steps) if number is None]
        if unknown:
            raise ReplicaError(
                f"fit: the number of steps is not known beforehand on ranks {unknown}, so the ranks could end an epoch "
                "at different times and wait for each other. Give fit steps_per_epoch=, or the dataset a size: "
                "hvdx.shard(dataset, ..., steps=...) or dataset.apply(tf.data.experimental.assert_cardinality(n))."
            )
        known = [number for number in steps if number is not None]
        if self._attachment.strategy.asynchronous:
            self._share_steps(known, self.model.steps_per_execution)
        else:
            self._limit_steps(known, self.model.steps_per_execution)

    def _limit_steps(self, known: list[int], steps_per_execution: int) -> None:
        """End every epoch when the rank with the fewest batches has no more, unless such ranks idle."""
        if len(set(known)) == 1:
            return
        if self._attachment.plan.idles:
            # A rank without a batch takes part in the steps of the others, which the progress bar has read too early.
            if self._callback_list is not None:
                callback_list.show_params(self._callback_list, self.params)
            return
        fewest = min(known) // steps_per_execution * steps_per_execution
        if fewest == 0:
            raise ReplicaError(
                f"fit: a rank has no full step: {known} steps on the ranks. Give each its share of data."
            )
        self._limit = fewest
        if self._comm.rank == 0:
            _log.warning(
                f"the ranks have {min(known)} to {max(known)} steps; every epoch ends after {fewest}. "
                "hvdx.shard distributes the data evenly."
            )

    def _share_steps(self, known: list[int], steps_per_execution: int) -> None:
        """End every epoch when the ranks together have taken all their steps; a fast rank takes more. Collective."""
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
        begun = self.steps_done // steps_per_execution
        # Each step of the client is one execution.
        self._step_client = client = self._attachment.strategy.step_client(self._comm, total, begun)
        self._finish_data = callback_list.extend_epochs(self, total * steps_per_execution)
        if self._callback_list is not None:
            callback_list.show_steps_of_all_ranks(
                self._callback_list, lambda: client.taken * steps_per_execution, client.steps * steps_per_execution
            )

    def on_train_begin(self, logs: Logs = None) -> None:
        """Let the parts agree; all other callbacks have run their `on_train_begin`."""
        found = self._callback_list = calling_list(self)
        callbacks = [] if found is None else found.callbacks
        self._others = [c for c in callbacks if isinstance(c, Part) and c is not self]
        self._parts.agree(all_gather_at(self._comm, "the start of fit", self._parts.offer()))

    def on_train_end(self, logs: Logs = None) -> None:
        """End the last pass through repeated data; all other callbacks have run their `on_train_end`."""
        finish, self._finish_data = self._finish_data, None
        if finish is not None:
            finish()
        if self._callback_list is not None:
            callback_list.show_steps_of_this_rank(self._callback_list)
            self._parts.end_fit(logs)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begin to hand out the steps of an epoch, if the strategy does so; all other callbacks have begun it."""
        if self._step_client is not None:
            self._step_client.begin()
        self._parts.begin_steps()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Postpone a stop to the end of the epoch, and end an epoch whose steps are taken.

        Without the postponement, a rank would stop in mid-epoch, and the others would wait for it. All ranks have the
        same weights: if these are NaN, `TerminateOnNaN` stops the ranks together.
        """
        if self._weights_are_nan():
            self._diverged = self._cut_short = self._stop_wanted = self.model.stop_training = True
            return
        if self.model.stop_training:
            self._stop_wanted = True
            self.model.stop_training = False
        over = self._limit is not None and batch + 1 >= self._limit
        client = self._step_client
        if over or (client is not None and not client.request_step(any(part.preempted for part in self._others))):
            self._cut_short = self.model.stop_training = True
            if client is None:
                py_datasets.end_epoch(epoch_iterator(self))
        if client is not None and client.stopped:
            for part in self._others:
                part.save_and_leave(client.taken * self.model.steps_per_execution)

    def _weights_are_nan(self) -> bool:
        strategy = self._attachment.strategy
        # Otherwise each rank has its own weights between two exchanges, or the weights of its group.
        if (
            not self.terminates
            or strategy.placement != "gradient"
            or strategy.asynchronous
            or self._comm.mesh is not None
        ):
            return False
        own = rank_local_ids(self.model)
        return any(finite.are_bad([v for v in self.model.trainable_weights if id(v) not in own]))

    def end_steps(self) -> None:
        """Check that this rank took all steps of the epoch, and continue the training if this callback ended it."""
        taken = self._counting.counters.steps_of_epoch
        if self.model.steps_per_execution > 1 and (total := self._attachment.steps) is not None:
            # Keras counts the last execution as full, even if it ran out of data.
            taken, self._steps_before = total - self._steps_before, total
        if not self._diverged:
            self.check_enough(taken)
        if self._cut_short:
            self._cut_short = self.model.stop_training = False

    def check_enough(self, taken: int) -> None:
        """End the job if this rank ran out of data, since the others wait for it in mid-epoch.

        Where a pass has the same number of batches on all ranks, they end it together, and the next epoch begins anew.

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
        self._passed += taken
        ended = self._batches is not None and self._passed >= self._batches
        if ended:
            self._passed = 0
        if expected and taken < expected and not ended:
            raise HvdxError(
                f"rank {self._comm.rank} of {self._comm.size} ran out of data after {taken} of {expected} steps of an "
                "epoch. Give fit a dataset that repeats: dataset.repeat(), or a steps_per_epoch= that divides the "
                "batches of every rank."
            )

    @property
    def wants_stop(self) -> bool:
        """True if this rank asks to end the training after this epoch."""
        return bool(self.model.stop_training and not self._cut_short) or self._stop_wanted

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Stop all ranks if one wants to stop. Collective."""
        wanted = bool(self.model.stop_training or self._stop_wanted)
        self.model.stop_training = any(all_gather_at(self._comm, f"the end of epoch {epoch + 1}", wanted))


class Schedules(Part):
    """Remark on schedules that end after this fit."""

    def __init__(self, comm: Comm, sync: SyncCallback):
        super().__init__()
        self._comm, self._sync = comm, sync

    def agree(self, offered: list[object]) -> None:
        """Print the remarks, now that the length of an epoch is known."""
        epochs = (self.params.get("epochs") or 0) - (initial_epoch(self.model) or 0)
        tell(self.model, epochs * (self._sync.steps or 0) - self._sync.steps_done, self._comm)


def remark(schedule: keras.optimizers.schedules.LearningRateSchedule, steps: int, size: int) -> str:
    """Return a remark on a schedule that counts more steps than a rank takes, but no more than one process would.

    Args:
        steps: steps of each rank in the fit.
        size: number of ranks.

    Example:
        >>> remark(keras.optimizers.schedules.CosineDecay(0.1, 1000), 1000, 4)
        ''
    """
    counts = {name: value for name in _COUNTS if (value := _last(getattr(schedule, name, None)))}
    # A cosine warms up only to a target, and decays after the warm-up.
    if getattr(schedule, "warmup_target", counts) is None:
        counts.pop("warmup_steps", None)
    end = max([counts.get("warmup_steps", 0) + counts.get("decay_steps", 0), *counts.values()])
    if not steps < end <= steps * size:
        return ""
    listed = ", ".join(f"{name}={value:,}" for name, value in counts.items())
    return (
        f"the learning-rate schedule {type(schedule).__name__} ({listed}) counts {end:,} steps, but this fit has "
        f"{steps:,} steps on each of {size} ranks. Divide the schedule's steps by hvdx.size(), unless more fits follow."
    )


def tell(model: keras.Model, steps: int, comm: Comm) -> None:
    """Print the remarks on the schedules of a model's optimisers on rank 0, before their first step; see `remark`."""
    if comm.rank != 0:
        return
    for optimizer in map(innermost, optimizers_of(model)):
        schedule = rate_of(optimizer)
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            done = int(step_counter(optimizer))
            # In a later fit it is not known how many steps the script has planned.
            text = remark(schedule, steps, comm.size) if done == 0 else ""
            if text:
                _log.warning(text)


def _last(count: int | tf.Tensor) -> int:
    """Return a number of steps, or the last of a list; 0 for anything else."""
    if isinstance(count, list | tuple) and count:
        count = count[-1]
    return int(count) if isinstance(count, int | float) else 0
