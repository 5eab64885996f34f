"""The division of each step's rows by the speeds of the ranks, measured while they train."""

from collections.abc import Sequence

import keras

from hvdx.comm import Comm, clock
from hvdx.costs.speeds import Balancer, Speed, divided
from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.adapters import rows
from hvdx.keras.backends import stepped
from hvdx.keras.fit import data
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.batches import in_step
from hvdx.keras.fit.divisions import Division, Position
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.recording import Recording
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.keras.seams.iterators import dataset_of, sampler_of
from hvdx.keras.seams.layers import CombinedBatchNormalization
from hvdx.keras.seams.models import layers_of
from hvdx.keras.types import Logs
from hvdx.log import Log

_log = Log(__name__)

# Seconds over which calls are measured, at least: TensorFlow takes 0.1 ms to read a counter.
_SPAN = 0.01
# Share of a GPU's memory that a step may take. Its peak is taken to grow with the rows as a whole, weights included.
_USABLE = 0.9


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
        # Recoveries after which the rows of the dead have been dealt.
        self._dealt = comm.recoveries
        self._now = clock.timer()
        # At the end of the last call that was measured: time, seconds in exchanges, rows; and calls since.
        self._since = 0
        self._last: tuple[float, float, float] | None = None

    def offer(self) -> int:
        """Return the most rows that this rank may have; 0 if those of its data cannot be divided anew."""
        iterator = epoch_iterator(self)
        self._division = data.division_in(sampler_of(iterator) or dataset_of(iterator))
        shapes = [getattr(tensor, "shape", ()) for tensor in getattr(self.model, "inputs", None) or ()]
        free = all(shape[0] is None for shape in shapes if shape)
        if self._division is not None and not free and (self._comm.survives or not self._division.is_even):
            raise ConfigError(
                "fit: a model with a fixed batch size needs as many rows on all ranks, and cannot take those of a rank "
                "that dies. Do: an Input without batch_size; or a global_batch_size that is a multiple of the ranks, "
                'with hvdx.shard(..., balance="off").'
            )
        return 0 if self._division is None or self._division.planned or not free else self._division.most

    def agree(self, offered: list[int]) -> None:
        """Begin with the rows of the fit before, if the data of all ranks can be divided."""
        if not all(offered) or self._comm.mesh is not None:
            self._division = None
        if self._division is not None:
            self._division.begin()
            self._keep_below(self._division, offered)
            if not self._division.is_even:
                # A checkpoint was restored after the batches were compared.
                self._weigh()
            self._begin_measuring(self._division)

    def _keep_below(self, division: Division, most: Sequence[int]) -> None:
        """Begin with other rows if some ranks may not have as many."""
        latest = division.latest
        if len(most) == len(latest) and any(r > m for r, m in zip(latest, most, strict=True)):
            rows = divided(division.total, [Speed(0.0, 1.0)] * len(most), most=most)
            self._change(division, division.hold(), rows)
            if not self._comm.rank:
                _log.info(f"max_batch: of the {sum(rows)} rows of a step, the workers take {_listed(rows)}.")

    def _begin_measuring(self, division: Division) -> None:
        self._dealt = self._comm.recoveries
        least = max(division.total // self._comm.size // 2, 1) if _normalises(self.model) else 1
        self._balancer = Balancer(division.total, least, compiles=backend.name() == "jax")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Measure no validation; after deaths, the ranks may have different rows from now on."""
        self._last = None
        if self._division is not None and self._dealt != self._comm.recoveries:
            # Ranks that have joined have measured nothing yet.
            self._begin_measuring(self._division)
            self._weigh()
            if self._follows:
                self._meet(self._division)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Measure the computing of the step; after some steps, compare the speeds and divide the rows. Collective."""
        if self._division is None or not self._follows:
            return
        self._add_step(self._division)
        if self._balancer.is_due or self._dealt != self._comm.recoveries:
            begin = self._now()
            self._meet(self._division)
            if self._last is not None:
                # The meeting is no computing.
                self._last = (self._last[0] + self._now() - begin, *self._last[1:])

    @property
    def _follows(self) -> bool:
        """True if a step of all ranks may be divided anew."""
        return not self._attachment.strategy.provisional and in_step(self._attachment.strategy)

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
        mine = division.latest[division.rank] if self._attachment.plan.even else taken
        self._balancer.add(mine, seconds - exchanging, seconds)

    def _meet(self, division: Division) -> None:
        """Tell the others the speed of this rank, and divide the rows anew if that is worth it. Collective."""
        try:
            mine = (division.rank, division.hold(), self._balancer.tell(self._most(division)))
            places, held, told = zip(*self._comm.all_gather_object(mine, "the speeds of the ranks"), strict=True)
            self._dealt = self._comm.recoveries
            present = [division.latest[place] for place in places]
            first = len(division.history) == 1 and max(present) - min(present) <= 1
            wanted = self._balancer.decide(told, present, first)
            if wanted is None:
                return
            after_death = sum(present) < division.total
            if first or after_death:
                self._say(wanted, after_death)
            self._weigh()
            dealt = dict(zip(places, wanted, strict=True))
            by_place = [dealt.get(place, 0) for place in range(len(division.latest))]
            self._change(division, max(held), by_place)
        finally:
            division.release()

    def _change(self, division: Division, position: Position, rows: Sequence[int]) -> None:
        division.change(position, rows)
        self._recording.divide(position, rows)

    def _most(self, division: Division) -> int:
        """Return the most rows that this rank may have, by `max_batch` and by its GPU's memory."""
        memory = None if backend.name() == "tensorflow" else stepped().memory()
        if memory is None:
            return division.most
        peak, limit = memory
        largest = max(rows[division.rank] for _, rows in division.history)
        return min(division.most, max(largest, int(largest * _USABLE * limit / peak)))

    def _weigh(self) -> None:
        if self._attachment.plan.even:
            self._attachment.weigh_by_rows()

    def _say(self, wanted: Sequence[int], after_death: bool) -> None:
        if self._comm.rank:
            return
        rows = f"of the {sum(wanted)} rows of a step, the workers now take {_listed(wanted)}"
        if after_death:
            _log.info(f"{rows}, so a step has as many as before.")
            return
        seconds = [speed.seconds(sum(wanted) / len(wanted)) for speed in self._balancer.speeds]
        slow = max(range(len(seconds)), key=seconds.__getitem__)
        _log.info(
            f"worker {slow} is {seconds[slow] / min(seconds):.1f} times slower than the fastest: {rows}, and the step "
            'is the same. hvdx.shard(..., balance="off") keeps their numbers equal.'
        )


def _listed(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows))


def _normalises(model: keras.Model) -> bool:
    """Return whether each rank normalises its own rows: the statistics of few are noisy, and count as those of many."""
    return any(
        isinstance(layer, keras.layers.BatchNormalization) and not isinstance(layer, CombinedBatchNormalization)
        for layer in layers_of(model)
    )
