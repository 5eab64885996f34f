"""`Checkpoint`: a callback that saves a training, at any step, and resumes it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, NoReturn

import keras
import numpy as np

from hvdx.comm import Comm
from hvdx.comm.preemption import REQUEUE_CODE, PreemptionListener, acknowledge
from hvdx.errors import ConfigError
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.backend import tf
from hvdx.keras.checkpoint.contents import Data, random_states, set_random_states, snapshot
from hvdx.keras.checkpoint.folder import Folder, Position, positions_in
from hvdx.keras.checkpoint.restoring import Restored, restore_newest
from hvdx.keras.checkpoint.writer import Writer, wait_for_all
from hvdx.keras.fit import callback_list, data, state
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.positions import all_gather_at
from hvdx.keras.fit.sync_callback import SyncCallback
from hvdx.keras.joining import join
from hvdx.keras.seams.frames import calling_list
from hvdx.keras.seams.models import build_metrics, set_initial_epoch
from hvdx.keras.types import Logs, Structure
from hvdx.log import Log

_log = Log(__name__)

# Seconds between two polls, which delay the response to a signal, in addition to the current step.
_SECONDS_BETWEEN_POLLS = 1.0
# Largest number of steps between two polls: if steps become slower, the next poll is still not far away.
_MOST_STEPS = 64

_UNITS = {"epoch": "epochs", "step": "steps", "minute": "minutes", "min": "minutes"}


@dataclass(frozen=True)
class Every:
    """Interval between checkpoints; exactly one of the attributes is above 0.

    Attributes:
        epochs, steps: numbers of epochs and steps.
        minutes: minutes by the clock of rank 0.
    """

    epochs: int = 0
    steps: int = 0
    minutes: float = 0.0


def parse(every: int | str) -> Every:
    """Read the option `every`.

    Args:
        every: a number of epochs, or a text such as "500 steps", "10 minutes" or "2 epochs".

    Raises:
        ConfigError: if it is neither.

    Example:
        >>> parse(2).epochs, parse("500 steps").steps, parse("2.5 minutes").minutes
        (2, 500, 2.5)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", every) if isinstance(every, str) else None
    unit = _UNITS.get(match[2]) if match else None
    if match and unit == "minutes" and float(match[1]) > 0:
        return Every(minutes=float(match[1]))
    if match and unit and match[1].isdigit() and int(match[1]) > 0:
        return Every(**{unit: int(match[1])})
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return Every(epochs=every)
    raise ConfigError(
        f"Checkpoint: every: expected 1 or more epochs, or a text such as '500 steps' or '10 minutes', got {every!r}."
    )


class Polls:
    """Steps at which the ranks poll each other, about once a second; the same steps on all ranks.

    Args:
        clock: function that returns seconds since any fixed time.

    Example:
        >>> polls = Polls()
        >>> polls.due()
        True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._calls, self._last, self._next, self._pause = clock, 0, 0, 1, 1
        self._since = clock()

    def now(self) -> tuple[int, int, int, int]:
        """Return the state, for `begin_late` on another rank."""
        return self._calls, self._last, self._next, self._pause

    def begin_late(self, theirs: tuple[int, int, int, int]) -> None:
        """Poll at the steps of the others.

        Args:
            theirs: result of `now` on another rank.
        """
        self._calls, self._last, self._next, self._pause = theirs

    def due(self) -> bool:
        """Count a step, and return whether to poll now; the same on all ranks after the same number of steps."""
        self._calls += 1
        return self._calls >= self._next

    @property
    def pace(self) -> float:
        """Mean seconds a step since the last poll."""
        return (self._clock() - self._since) / max(self._calls - self._last, 1)

    def adjust(self, paces: Sequence[float]) -> None:
        """Choose the step of the next poll.

        Args:
            paces: `pace` of each rank.
        """
        # The interval at most doubles: the first steps, which are traced and compiled, say little about later steps.
        wanted = min(int(_SECONDS_BETWEEN_POLLS / max(*paces, 1e-9)), _MOST_STEPS)
        self._pause = max(1, min(2 * self._pause, wanted))
        self._last, self._next, self._since = self._calls, self._calls + self._pause, self._clock()


class _Status(NamedTuple):
    """Combined status of all ranks.

    Attributes:
        signal: first preemption signal and its rank, such as "SIGTERM on rank 1"; "" if none was received.
        minutes_over: whether the interval in minutes is over, by the clock of rank 0.
        stops: whether a rank wants to end the training with this epoch.
    """

    signal: str = ""
    minutes_over: bool = False
    stops: bool = False


_NO_STATUS = _Status()


class Checkpoint(Part):
    """Save a training, and resume it from its newest checkpoint.

    The callback may stand anywhere in the list, with or without `Distribute`. A checkpoint holds the weights, the
    optimiser, the rank-local state (momenta, residual, generators of random numbers) and the position in the data of
    `hvdx.shard`. With the same number of ranks, all of it is restored to the bit. With another number, residuals are
    redistributed, and the momenta of all ranks become their mean. The parts of split layers are joined and cut if the
    ranks form other groups; residuals are dropped then.

    Training waits for a copy in memory, and continues while the copy is written. If a batch system announces the end of
    the job to any rank by SIGUSR1 or SIGTERM, all ranks save at the end of a step and leave with exit code 75
    (`hvdx.comm.preemption.REQUEUE_CODE`), which tells a job script that training is not finished.

    Args:
        directory: directory for this training alone, visible to all hosts.
        every: number of epochs between checkpoints, or an interval such as "500 steps" or "10 minutes".
        keep: number of newest checkpoints to keep.
        resume: whether `fit` begins from the newest checkpoint, if there is one.
        on_signal: whether to handle SIGUSR1 and SIGTERM, from the creation of this callback to the end of training.

    Raises:
        ConfigError: if a number is not positive or a unit is unknown; or, when training begins, if another job saves to
            the directory.

    Example:
        >>> import keras, tempfile
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     history = model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=3, verbose=0,
        ...                         callbacks=[Checkpoint(directory)])
        ...     sorted(os.listdir(directory))
        ['epoch-0002', 'epoch-0003']
    """

    saves = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: int | str = 1,
        keep: int = 2,
        resume: bool = True,
        on_signal: bool = True,
    ):
        super().__init__()
        self._every = parse(every)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"Checkpoint: keep: expected 1 or more, got {keep!r}.")
        self.directory, self.every, self.keep, self.resume = directory, every, keep, resume
        self._preemption = PreemptionListener() if on_signal else None
        # Listen from now on: the job may be preempted while the data are being loaded.
        if self._preemption is not None:
            self._preemption.listen()
        self._sync: SyncCallback | None = None
        self._writer: Writer | None = None
        self._epoch = self._steps_done = 0

    def set_model(self, model: keras.Model) -> None:
        """Move this callback to the end, before `SyncCallback`, since others may change weights and learning rates."""
        super().set_model(model)
        found = calling_list(self)
        if found is not None:
            others = [c for c in found.callbacks if c is not self]
            if any(isinstance(c, Checkpoint) for c in others):
                raise ConfigError("callbacks: Checkpoint is there twice. One saves everything.")
            callback_list.move(found, self, SyncCallback)
            with contextlib.suppress(OSError):  # `Folder.check` reports these errors on all ranks
                # This must be set here: loggers open their files before this callback restores a checkpoint.
                if self.resume and positions_in(self.directory):
                    callback_list.append_to_logs(others)

    # -- fit ----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Logs = None) -> None:
        """Resume from the newest checkpoint. Collective."""
        wait_for_all()
        if self._preemption is not None:
            self._preemption.listen()
        self._comm: Comm = join()
        self._folder = Folder(os.fspath(self.directory), self._comm)
        if not self._comm.waits:
            self._folder.check()
        found = calling_list(self)
        others = [] if found is None else found.callbacks
        self._sync = next((c for c in others if isinstance(c, SyncCallback)), None)
        self._polls, self._saved_at, self._steps = Polls(), time.monotonic(), 0
        # Position of the checkpoint that was begun last.
        self._last: Position | None = None
        adapters = [adapter_of(o) for o in optimizers_of(self.model)]
        self._asynchronous = any(b is not None and b.strategy.asynchronous for b in adapters)
        if self._asynchronous and not self._every.epochs:
            raise ConfigError.on_all_ranks(
                f"Checkpoint: every={self.every!r}: workers of an asynchronous strategy are not at the same step. "
                "Give a number of epochs; a signal saves in between."
            )
        self._one_pass = callback_list.epoch_is_one_pass(self)
        self._writer = Writer(self._folder, self.keep)
        # Epochs of the shares, and random states, when this pass through the data began.
        self._drawn: list[int] | None = None
        self._held: list[tf.Variable | None] = []
        self._random: Mapping[str, np.ndarray] = {}
        # Index of the share that this fit trains on.
        self._share: int | None = None
        self._share_checked = False
        # Of the batches of this pass, `_trained` counts those that were trained, and `_skip` those before this fit. Of
        # the steps of the epoch, `_step` and `_start_step` count the same.
        self._trained = self._skip = self._step = self._start_step = self._steps_done = 0
        if self._comm.waits:
            return  # a spare receives the state of the others
        if self.resume:
            restored = restore_newest(self._folder, self.model)
            if restored is not None:
                self._resume_from(restored)
        else:
            self._refuse_existing()

    def before_newcomers(self) -> None:
        """Finish the checkpoint that is being written. Collective."""
        if self._writer is not None and not self._writer.finish() and self._last is not None:
            self._save(self._last)
            self._writer.finish()

    def now(self) -> object:
        """Return when the next checkpoint and the next poll are due."""
        return self._polls.now(), self._steps, self._last, time.monotonic() - self._saved_at

    def begin_late(self, theirs: tuple[tuple[int, int, int, int], int, Position | None, float]) -> None:
        """Save with the others."""
        polls, self._steps, self._last, seconds = theirs
        self._polls.begin_late(polls)
        self._saved_at = time.monotonic() - seconds

    def _resume_from(self, restored: Restored) -> None:
        position, skip = self._convert_position(restored)
        set_initial_epoch(self.model, position.epoch)
        if self._comm.rank == 0:
            _log.info(f"resuming after {position}, from {self.directory}.")
        self._steps_done = position.step
        if self._asynchronous or not (position.step or skip):
            return
        self._skip, self._start_step = skip, position.step

        # With these states, data pipelines that draw their order when a pass begins draw the same order again.
        self._random = restored.data.random
        if self._random:
            set_random_states(self._random)

        def ready(batch: Structure) -> None:
            set_random_states(restored.random)
            self._restore_metrics(restored.metrics, batch)

        if not callback_list.start_at_step(self, position.step, skip, ready):
            raise ConfigError.on_all_ranks(
                f"{self.directory}: the checkpoint was made in mid-epoch, and this version of Keras does not let an "
                "epoch begin at a later step. Remove this checkpoint; the one before it is used then."
            )

    def _convert_position(self, restored: Restored) -> tuple[Position, int]:
        """Convert a saved position to steps of this job, which may have another number of samples. Collective.

        Returns:
            The position, and the number of batches to skip.
        """
        position, saved = restored.position, restored.data
        share = data.samples_per_step(saved.share) if saved.samples else None
        everyone = self._comm.all_gather_object((self._steps_an_epoch, share), "the steps of an epoch")
        steps: int | None = min((steps for steps, _ in everyone if steps), default=None)
        samples = everyone[0][1]
        ratio = Fraction(restored.ranks, self._comm.size)
        if saved.samples and samples:
            ratio = Fraction(saved.samples, samples)
        # If the data are the same, the steps of an epoch have this ratio too, with a difference below one step.
        if self._one_pass and saved.steps and steps and abs(ratio * saved.steps - steps) > max(ratio, Fraction(1)):
            ratio = Fraction(steps, saved.steps)
        if self._asynchronous:
            return position, saved.skip
        step, skip = int(position.step * ratio), int(saved.skip * ratio)
        remainder = step % self.model.steps_per_execution
        if position.step and steps and step - remainder >= steps:
            return Position(position.epoch + 1), 0 if self._one_pass else skip
        return Position(position.epoch, step - remainder), max(skip - remainder, 0)

    def _restore_metrics(self, values: list[np.ndarray], batch: Structure) -> None:
        """Restore the metrics of an epoch that the saved job had begun."""
        if not values:
            return
        if len(self.model.metrics_variables) != len(values) and batch is not None:
            # Keras makes these variables in the first step, which has not run yet.
            build_metrics(self.model, batch)
        variables = self.model.metrics_variables
        if [tuple(v.shape) for v in variables] == [value.shape for value in values]:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _refuse_existing(self) -> None:
        """Refuse a directory with checkpoints, which would be mixed with those of this training. Collective."""
        existing = self._folder.positions()
        if existing:
            raise ConfigError.on_all_ranks(
                "Checkpoint: resume=False: expected a directory without checkpoints, got "
                f"{self._folder.at(existing[-1])}. Remove them, or give another directory."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Record the position in the data if a pass through them begins."""
        # Keras has read the attribute. It is cleared here, so that the next fit uses its own `initial_epoch` even if an
        # exception ends this one.
        set_initial_epoch(self.model, None)
        self._epoch, self._step = epoch, self._start_step
        if self._one_pass or self._drawn is None:
            # Shares of earlier fits may be collected at any time, and the position counts on their places.
            self._held = data.hold_shares()
            self._drawn, self._trained = data.state()[0], self._skip
            self._random = (self._skip and self._random) or random_states()
        self._start_step = self._skip = 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Save if a checkpoint is due or the job is about to end."""
        if self._asynchronous:
            return  # `SyncCallback` calls `save_and_leave`
        if not self._share_checked and self._drawn is not None:
            # Determine the share now: a later validation begins a pass through a share of its own.
            self._share, self._share_checked = data.started_share(self._drawn), True
        # `batch` cannot be used as the count: if several steps are executed together, it is the first or the last of
        # them, depending on the version of Keras.
        executed = self.model.steps_per_execution
        self._trained += executed
        self._steps += executed
        self._step += executed
        if self._steps_an_epoch and self._step >= self._steps_an_epoch:
            return  # `on_epoch_end` saves
        due = bool(self._every.steps) and self._steps >= self._every.steps
        status = (
            self._exchange_status(f"step {self._step} of epoch {self._epoch + 1}") if self._polls.due() else _NO_STATUS
        )
        if due or status.minutes_over or status.signal:
            self._save(Position(self._epoch, self._step))
        # If training is to end with this epoch anyway, no other job is needed.
        if status.signal and not status.stops:
            self._leave(status.signal)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Save if a checkpoint is due, or if the job or the training is about to end."""
        status = self._exchange_status(f"the end of epoch {epoch + 1}")
        over = status.stops or epoch + 1 >= self.params.get("epochs", 0)
        due = status.minutes_over or (bool(self._every.epochs) and (epoch + 1) % self._every.epochs == 0)
        due = due or (bool(self._every.steps) and self._steps >= self._every.steps)
        if due or over or status.signal:
            self._save(Position(epoch + 1))
        if status.signal and not over:
            self._leave(status.signal)

    def on_train_end(self, logs: Logs = None) -> None:
        """Wait until the last checkpoint is published, and release the folder. Collective."""
        set_initial_epoch(self.model, None)
        self._held = []
        try:
            if self._writer is not None:
                while not self._writer.finish() and self._last is not None:
                    self._save(self._last)
                self._folder.release()
        finally:
            if self._preemption is not None:
                self._preemption.close()

    # -- saving -------------------------------------------------------------------------------------------------------

    def _exchange_status(self, place: str) -> _Status:
        """Exchange the status of all ranks. Collective."""
        stops = self.model.stop_training if self._sync is None else self._sync.wants_stop
        mine = {
            "signal": "" if self._preemption is None else self._preemption.received,
            "pace": self._polls.pace,
            "problem": "" if self._writer is None else self._writer.problem,
            "minutes": (time.monotonic() - self._saved_at) / 60,
            "stops": bool(stops),
        }
        everyone = all_gather_at(self._comm, place, mine)
        self._polls.adjust([rank["pace"] for rank in everyone])
        if any(rank["problem"] for rank in everyone) and self._writer is not None:
            self._writer.finish()  # raises
        signals = [f"{rank['signal']} on rank {i}" for i, rank in enumerate(everyone) if rank["signal"]]
        minutes = self._every.minutes
        return _Status(
            "".join(signals[:1]),
            bool(minutes) and everyone[0]["minutes"] >= minutes,
            any(rank["stops"] for rank in everyone),
        )

    def _save(self, position: Position) -> None:
        adapters = [adapter for o in optimizers_of(self.model) if (adapter := adapter_of(o)) is not None]
        for adapter in adapters:
            adapter.drain() if position.step else adapter.before_saving()
        state.add_up(self.model, self._comm)
        self._steps, self._saved_at, self._last = 0, time.monotonic(), position
        assert self._writer is not None
        self._writer.start(position, snapshot(self.model, self._comm, self._data(position), bool(position.step)))
        for adapter in adapters:
            adapter.go_on()

    @property
    def _steps_an_epoch(self) -> int | None:
        return self.params.get("steps") if self._sync is None else self._sync.steps

    def _data(self, position: Position) -> Data:
        """Return the position in the data, between two passes or within a pass."""
        drawn = data.state()[0]
        share = None if self._share is None or len(drawn) <= self._share else self._share - len(drawn)
        sizes = self._steps_an_epoch, share, data.samples_per_step(share)
        histories = [division.history for division in data.divisions()]
        if not self._one_pass and self._drawn is not None:
            return Data(*data.position_after(self._drawn, self._trained, self._share), *sizes, divisions=histories)
        if not position.step:
            return Data(drawn, 0, *sizes, divisions=histories)
        return Data(self._drawn or (), self._trained, *sizes, self._random, histories)

    @property
    def steps_done(self) -> int:
        """As the checkpoint has it from which this fit resumes."""
        return self._steps_done

    @property
    def preempted(self) -> bool:
        """True after SIGUSR1 or SIGTERM."""
        return self._preemption is not None and bool(self._preemption.received)

    def save_and_leave(self, steps: int) -> None:
        """Save and leave, after a signal has made an asynchronous strategy hand out no more steps. Collective."""
        status = self._exchange_status(f"the end of steps in epoch {self._epoch + 1}")
        self._save(Position(self._epoch, steps))
        if not status.stops:
            self._leave(status.signal)

    def _leave(self, signal: str) -> NoReturn:
        assert self._writer is not None
        self._writer.finish()
        self._folder.release()
        if self._comm.rank == 0:
            _log.info(f"{signal}: saved to {self.directory}, to resume later; ending with exit code {REQUEUE_CODE}.")
        # When the first rank ends, a launcher sends signals to the others.
        PreemptionListener.ignore()
        acknowledge()
        raise SystemExit(REQUEUE_CODE)
