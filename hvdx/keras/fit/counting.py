"""Steps and epochs of a fit: counts, and the position of this rank for reports of a stall."""

from hvdx.comm import Comm, progress
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.recording import Recording
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.keras.seams.iterators import count_map_dataset
from hvdx.keras.types import Logs
from hvdx.report.counters import Counters


class Counting(Part):
    """Counts of a fit.

    Args:
        comm: the ranks.
        attachment: knows the present strategy.
        recording: recording of the fits, which measures the steps.

    Attributes:
        counters: counters of the last fit.
        epoch: number of the present epoch, from 0.
        trained: True once an epoch has begun.
    """

    alone = True

    def __init__(self, comm: Comm, attachment: Attachment, recording: Recording):
        super().__init__()
        self._comm, self._attachment, self._recording = comm, attachment, recording
        self.counters = Counters()
        self.epoch, self.trained = 0, False
        # Epoch and number in it of the first step of this fit; the number is above 0 after a checkpoint in mid-epoch.
        self._first: tuple[int, int] | None = None

    @property
    def steps_of_fit(self) -> int:
        """Steps of this rank since the fit began."""
        return self.counters.steps - self.begin[1]

    @property
    def begin(self) -> tuple[int, int]:
        """Epochs before this fit, and steps of the next one; not (0, 0) after a checkpoint."""
        return self._first or (0, 0)

    @property
    def ended(self) -> bool:
        """True in the last epoch of the fit."""
        return self.epoch + 1 >= (self.params.get("epochs") or 0)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Begin the counts of a fit."""
        batches = count_map_dataset(epoch_iterator(self))
        # All callbacks have this dictionary.
        self.params["steps"] = self.params.get("steps") or batches
        self.counters = Counters(size=self._comm.size)
        self.counters.start()
        self._first, self.trained = None, False
        progress.first_step(self._comm.size > 1)

    def now(self) -> int:
        """Return the steps of the fit."""
        return self.steps_of_fit

    def begin_late(self, theirs: int) -> None:
        """Count on, since `HVDX_LIMIT` ends all ranks after the same step."""
        self.counters = Counters(size=self._comm.size, steps=theirs)
        self.counters.start()
        self._first = 0, 0

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begin the counts of an epoch."""
        self.epoch, self.trained = epoch, True
        self.counters.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Record the position of this rank."""
        progress.step(f"step {batch + 1} of epoch {self.epoch + 1}", (self.epoch, batch))
        if self._first is None:
            self._first = self.epoch, batch
        if self._recording.on:
            self._recording.step_begins()

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Record the position of this rank in validation."""
        progress.step(f"step {batch + 1} of validation in epoch {self.epoch + 1}")

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Count the steps of the epoch; Keras counts the last execution of several steps as full."""
        progress.first_step(False)
        known = None if self._attachment.strategy.asynchronous else self.params.get("steps")
        self.counters.count(min(batch + 1, known or batch + 1))
        if self._recording.on:
            self._recording.step_ends(self.steps_of_fit)

    def end_steps(self) -> None:
        """Read the counters for the record, before the adapters are flushed."""
        if self._recording.on:
            self._recording.steps_end()

    def on_train_end(self, logs: Logs = None) -> None:
        """Leave the position."""
        progress.step("")
        progress.first_step(False)
