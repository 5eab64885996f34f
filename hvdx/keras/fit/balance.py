"""The division of each step's rows by the speeds of the ranks, measured while they train."""

from collections.abc import Sequence

import keras

from hvdx.comm import Comm, clock
from hvdx.keras import backend
from hvdx.keras.adapters import rows
from hvdx.keras.fit import data
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.batches import in_step
from hvdx.keras.fit.divisions import Division
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.recording import Recording
from hvdx.keras.fit.speeds import Balancer
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.keras.seams.iterators import dataset_of, sampler_of
from hvdx.keras.seams.layers import CombinedBatchNormalization
from hvdx.keras.seams.models import layers_of
from hvdx.keras.types import Logs
from hvdx.log import Log

_log = Log(__name__)

# Seconds over which calls are measured, at least: TensorFlow takes 0.1 ms to read a counter.
_SPAN = 0.01


class Balance(Part):
    """Divide the rows of each step so that all ranks compute equally long.

    Args:
        comm: the ranks.
        attachment: knows the strategy, and weighs ranks by their rows.
        recording: records the divisions.
    """

    def __init__(self, comm: Comm, attachment: Attachment, recording: Recording):
        super().__init__()
        self._comm, self._attachment, self._recording = comm, attachment, recording
        self._division: Division | None = None
        self._balancer = Balancer(0)
        self._now = clock.timer()
        # At the end of the last call that was measured: time, seconds in exchanges, rows; and calls since.
        self._since = 0
        self._last: tuple[float, float, float] | None = None

    def offer(self) -> bool:
        """Return whether the rows of this rank's data can be divided anew."""
        iterator = epoch_iterator(self)
        self._division = data.division_in(sampler_of(iterator) or dataset_of(iterator))
        shapes = [getattr(tensor, "shape", ()) for tensor in getattr(self.model, "inputs", None) or ()]
        free = all(shape[0] is None for shape in shapes if shape)
        return self._division is not None and not self._division.planned and free and not self._comm.survives

    def agree(self, offered: list[bool]) -> None:
        """Begin with the rows of the fit before, if the data of all ranks can be divided."""
        if not all(offered) or self._comm.mesh is not None:
            self._division = None
        if self._division is not None:
            self._division.begin()
            if self._attachment.plan.even and not self._division.is_even:
                # A checkpoint was restored after the batches were compared.
                self._attachment.weigh_by_rows()
            least = max(self._division.total // self._comm.size // 2, 1) if _normalises(self.model) else 1
            self._balancer = Balancer(self._division.total, least, compiles=backend.name() == "jax")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Measure no validation."""
        self._last = None

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Measure the computing of the step; after some steps, compare the speeds and divide the rows. Collective."""
        strategy = self._attachment.strategy
        if self._division is None or strategy.provisional or not in_step(strategy):
            return
        self._add_step(self._division)
        if self._balancer.is_due:
            begin = self._now()
            self._meet(self._division)
            if self._last is not None:
                # The meeting is no computing.
                self._last = (self._last[0] + self._now() - begin, *self._last[1:])

    def _add_step(self, division: Division) -> None:
        """Measure the calls since the last time: all of their time, except for the exchanges, is computing."""
        self._since += 1
        if self._last is not None and self._now() - self._last[0] < _SPAN:
            self._balancer.skip()
            return
        exchanged = sum(a.seconds_away() for a in self._attachment.adapters) + rows.waited.value()
        before, self._last = self._last, (self._now(), exchanged, rows.taken.value())
        if before is None:
            self._since = 0
            self._balancer.skip()
            return
        steps = (self.model.steps_per_execution or 1) * self._since
        self._since = 0
        seconds, exchanging, taken = ((b - a) / steps for a, b in zip(before, self._last, strict=True))
        mine = division.latest[self._comm.rank] if self._attachment.plan.even else taken
        self._balancer.add(mine, seconds - exchanging, seconds)

    def _meet(self, division: Division) -> None:
        """Tell the others the speed of this rank, and divide the rows anew if that is worth it. Collective."""
        even = self._attachment.plan.even
        try:
            told = self._comm.all_gather_object((self._balancer.tell(), division.hold()), "the speeds of the ranks")
            wanted = self._balancer.decide([theirs for theirs, _ in told], division.latest, even)
            if wanted is None:
                return
            if even:
                self._attachment.weigh_by_rows()
                self._say(wanted)
            at = max(held for _, held in told)
            division.change(at, wanted)
            self._recording.divide(at, wanted)
        finally:
            division.release()

    def _say(self, wanted: Sequence[int]) -> None:
        if self._comm.rank:
            return
        seconds = [speed.seconds(sum(wanted) / len(wanted)) for speed in self._balancer.speeds]
        slow = max(range(len(seconds)), key=seconds.__getitem__)
        _log.info(
            f"worker {slow} is {seconds[slow] / min(seconds):.1f} times slower than the fastest: of the {sum(wanted)} "
            f"rows of a step, the workers now take {', '.join(map(str, wanted))}, and the step is the same. "
            'hvdx.shard(..., balance="off") keeps their numbers equal.'
        )


def _normalises(model: keras.Model) -> bool:
    """Return whether each rank normalises its own rows: the statistics of few are noisy, and count as those of many."""
    return any(
        isinstance(layer, keras.layers.BatchNormalization) and not isinstance(layer, CombinedBatchNormalization)
        for layer in layers_of(model)
    )
