"""`Checkpoint`: a training that can be stopped at any step, and goes on."""

import contextlib
import os
import time
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

import keras
import numpy as np

from hvdx.comm import Comm
from hvdx.comm.preemption import REQUEUE_CODE, PreemptionListener, acknowledge
from hvdx.errors import ConfigError
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.checkpoint.contents import Data, random_states, set_random_states, snapshot
from hvdx.keras.checkpoint.folder import Folder, Position, alike, positions_in
from hvdx.keras.checkpoint.restoring import Restored, restore_newest, say
from hvdx.keras.checkpoint.schedule import Polls, parse
from hvdx.keras.checkpoint.writer import Writer, wait_for_all
from hvdx.keras.fit import callback_list, data
from hvdx.keras.fit.sync_callback import SyncCallback, all_gather_at
from hvdx.keras.joining import join


class _Said(NamedTuple):
    """What the ranks said.

    Attributes:
        ending: the signal that came, and to whom; "" for none.
        minutes_over: whether it is time, by rank 0's clock.
        stops: whether a rank wants to end the training with this epoch.
    """

    ending: str = ""
    minutes_over: bool = False
    stops: bool = False


_NOTHING = _Said()


class Checkpoint(keras.callbacks.Callback):
    """Save a training so that it can go on where it was, and let it go on.

    Beside `Distribute`, anywhere in the list of callbacks. The weights, the optimiser, what each rank keeps for itself
    (momenta, residual, generators of random numbers), and the place in the data of `hvdx.shard` go on to the bit with
    as many ranks; with another number residuals are dealt out anew, and the ranks' momenta become their mean.

    The training waits for a copy in memory, and goes on while that is written. When a batch system announces the end of
    the job by SIGUSR1 or SIGTERM, to any rank, all ranks save at the end of a step and leave with exit code 75
    (`hvdx.comm.preemption.REQUEUE_CODE`), by which a job script knows that there is more to do.

    Args:
        directory: for this training alone; all hosts have to see it.
        every: save at the end of every so many epochs, or after such as "500 steps" or "10 minutes".
        keep: how many of the newest stay.
        resume: let `fit` begin with the newest, if there is one.
        on_signal: take over SIGUSR1 and SIGTERM, from now to the end of training.

    Raises:
        ConfigError: a number that is not positive, an unknown unit; when training begins: another job saves to the
            directory.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     history = model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=3, verbose=0,
        ...                         callbacks=[Checkpoint(directory)])
        ...     sorted(os.listdir(directory))
        ['epoch-0002', 'epoch-0003']
    """

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
        self._announcement = PreemptionListener() if on_signal else None
        # From now on: the job may end while the data are being loaded.
        if self._announcement is not None:
            self._announcement.listen()
        self._lockstep: SyncCallback | None = None
        self._writer: Writer | None = None
        self._epoch = 0

    def set_model(self, model: Any) -> None:
        """Keras: called before training. Takes its place behind all that may change weights and learning rates."""
        super().set_model(model)
        found = callback_list.find(self)
        if found is not None:
            others = [c for c in found.callbacks if c is not self]
            if any(isinstance(c, Checkpoint) for c in others):
                raise ConfigError("callbacks: Checkpoint is there twice. One saves all.")
            last = [c for c in others if isinstance(c, SyncCallback)]
            # A new list: Keras is iterating over the old one.
            found.callbacks = [*(c for c in others if c not in last), self, *last]
            with contextlib.suppress(OSError):  # which `Folder.check` tells of, on all ranks
                # Now, for they open their files before this callback knows where training goes on.
                if self.resume and positions_in(self.directory):
                    callback_list.append_to_logs(others)

    # -- fit ----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on where the newest checkpoint was made."""
        wait_for_all()
        if self._announcement is not None:
            self._announcement.listen()
        self._comm: Comm = join()
        self._folder = Folder(os.fspath(self.directory), self._comm)
        self._folder.check()
        found = callback_list.find(self)
        others = [] if found is None else found.callbacks
        self._lockstep = next((c for c in others if isinstance(c, SyncCallback)), None)
        if self._lockstep is not None:
            self._lockstep.ending, self._lockstep.save = self._is_ending, self._save_and_leave_together
        self._polls, self._saved_at, self._steps = Polls(), time.monotonic(), 0
        adapters = [adapter_of(o) for o in optimizers_of(self.model)]
        self._deals_out = any(b is not None and b.strategy.asynchronous for b in adapters)
        if self._deals_out and not self._every.epochs:
            raise alike(
                f"Checkpoint: every={self.every!r}: workers of a parameter server are not at the same step. Give a "
                "number of epochs; a signal saves in between."
            )
        self._once = callback_list.goes_through(self)
        self._writer = Writer(self._folder, self.keep)
        # Where this pass through the data began and with which random numbers, which share it is, batches of it that
        # were trained, and those that were so before this fit; the step of the epoch, and how many were taken before.
        self._drawn: list[int] | None = None
        self._random: Mapping[str, np.ndarray] = {}
        self._share: int | None = None
        self._looked = False
        self._trained = self._skip = self._step = self._begun = 0
        if self.resume:
            restored = restore_newest(self._folder, self.model)
            if restored is not None:
                self._go_on(restored)
        else:
            self._refuse_what_is_there()

    def _go_on(self, restored: Restored) -> None:
        position, skip = self._now(restored)
        self.model._initial_epoch = position.epoch
        say(f"going on after {position}, from {self.directory}")
        if self._lockstep is not None:
            self._lockstep.begun = position.step
        if self._deals_out or not (position.step or skip):
            return
        self._skip, self._begun = skip, position.step

        # What draws its order when a pass begins, draws the one that was begun.
        self._random = restored.data.random
        if self._random:
            set_random_states(self._random)

        def ready(batch: Any) -> None:
            set_random_states(restored.random)
            self._restore_metrics(restored.metrics, batch)

        if not callback_list.begin_later(self, position.step, skip, ready):
            raise alike(
                f"{self.directory}: the checkpoint was made in mid-epoch, and this version of Keras does not let an "
                "epoch begin later. Remove it, and the one before it is taken."
            )

    def _now(self, restored: Restored) -> tuple[Position, int]:
        """Where that is in steps of today, which may be of more or fewer samples; and batches to skip."""
        position, was = restored.position, restored.data
        share = data.samples_a_step(was.share) if was.samples else None
        known = self._comm.all_gather_object((self._steps_an_epoch, share), "the steps of an epoch")
        steps, samples = min((steps for steps, _ in known if steps), default=None), known[0][1]
        pace = Fraction(restored.ranks, self._comm.size)
        if was.samples and samples:
            pace = Fraction(was.samples, samples)
        # But for a step that is not full they tell the same, unless it is other data than it was.
        if self._once and was.steps and steps and abs(pace * was.steps - steps) > max(pace, 1):
            pace = Fraction(steps, was.steps)
        if self._deals_out:
            return position, was.skip
        step, skip = int(position.step * pace), int(was.skip * pace)
        early = step % self.model.steps_per_execution
        if position.step and steps and step - early >= steps:
            return Position(position.epoch + 1), 0 if self._once else skip
        return Position(position.epoch, step - early), max(skip - early, 0)

    def _restore_metrics(self, values: list[Any], batch: Any) -> None:
        """Let the metrics of the epoch go on, too."""
        if not values:
            return
        if len(self.model.metrics_variables) != len(values) and batch is not None:
            # They are made in the first step, which has not been.
            self.model._symbolic_build(data_batch=batch)
        variables = self.model.metrics_variables
        if [tuple(v.shape) for v in variables] == [value.shape for value in values]:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    def _refuse_what_is_there(self) -> None:
        """Checkpoints of two trainings in one directory would be taken for each other."""
        there = self._folder.positions()
        if there:
            raise alike(
                f"Checkpoint: resume=False: expected a directory without checkpoints, got {self._folder.at(there[-1])}."
                " Remove them, or give another directory."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """A pass through the data begins."""
        # Keras has read it; if an exception ends this fit, the next begins where it is told to.
        self.model._initial_epoch = None
        self._epoch, self._step = epoch, self._begun
        if self._once or self._drawn is None:
            self._drawn, self._trained = data.state()[0], self._skip
            self._random = (self._skip and self._random) or random_states()
        self._begun = self._skip = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save, if it is time, or if the job is about to end."""
        if self._deals_out:
            return  # what deals the steps out calls `_save_and_leave_together`
        if not self._looked and self._drawn is not None:
            # Before a validation goes through its own.
            self._share, self._looked = data.begun(self._drawn), True
        # Counted here: Keras says the first or the last of steps that are executed together, as its version likes.
        executed = self.model.steps_per_execution
        self._trained += executed
        self._steps += executed
        self._step += executed
        if self._steps_an_epoch and self._step >= self._steps_an_epoch:
            return  # at the end of the epoch
        due = bool(self._every.steps) and self._steps >= self._every.steps
        said = self._ask(f"step {self._step} of epoch {self._epoch + 1}") if self._polls.due() else _NOTHING
        if due or said.minutes_over or said.ending:
            self._save(Position(self._epoch, self._step))
        # A training that is to end with this epoch does so, and is not asked for again.
        if said.ending and not said.stops:
            self._leave(said.ending)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, if it is time, or if the job or the training is about to end."""
        said = self._ask(f"the end of epoch {epoch + 1}")
        over = said.stops or epoch + 1 >= self.params.get("epochs", 0)
        due = said.minutes_over or (bool(self._every.epochs) and (epoch + 1) % self._every.epochs == 0)
        due = due or (bool(self._every.steps) and self._steps >= self._every.steps)
        if due or over or said.ending:
            self._save(Position(epoch + 1))
        if said.ending and not over:
            self._leave(said.ending)

    def on_train_end(self, logs: Any = None) -> None:
        """What is being written gets its name; the next `fit` begins where it is told to."""
        self.model._initial_epoch = None
        try:
            if self._writer is not None:
                self._writer.finish()
                self._folder.release()
        finally:
            if self._announcement is not None:
                self._announcement.close()

    # -- saving -------------------------------------------------------------------------------------------------------

    def _ask(self, place: str) -> "_Said":
        """What all ranks know only together. Collective."""
        stops = self.model.stop_training if self._lockstep is None else self._lockstep.stops
        mine = {
            "signal": "" if self._announcement is None else self._announcement.received,
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
        return _Said(
            "".join(signals[:1]),
            bool(minutes) and everyone[0]["minutes"] >= minutes,
            any(rank["stops"] for rank in everyone),
        )

    def _save(self, position: Position) -> None:
        for optimizer in optimizers_of(self.model):
            adapter = adapter_of(optimizer)
            if adapter is not None:
                adapter.drain() if position.step else adapter.before_saving()
        self._steps, self._saved_at = 0, time.monotonic()
        assert self._writer is not None
        self._writer.start(position, snapshot(self.model, self._comm.rank, self._data(position), bool(position.step)))

    @property
    def _steps_an_epoch(self) -> int | None:
        return self.params.get("steps") if self._lockstep is None else self._lockstep.steps

    def _data(self, position: Position) -> Data:
        """Where the data are: between two passes, or in one."""
        drawn = data.state()[0]
        share = None if self._share is None or len(drawn) <= self._share else self._share - len(drawn)
        sizes = self._steps_an_epoch, share, data.samples_a_step(share)
        if not self._once and self._drawn is not None:
            return Data(*data.after(self._drawn, self._trained, self._share), *sizes)
        return Data(self._drawn or (), self._trained, *sizes, self._random) if position.step else Data(drawn, 0, *sizes)

    def _is_ending(self) -> bool:
        return self._announcement is not None and bool(self._announcement.received)

    def _save_and_leave_together(self, steps: int) -> None:
        """Steps that were dealt out have ended because a signal came, to any rank. Collective."""
        said = self._ask(f"the end of steps in epoch {self._epoch + 1}")
        self._save(Position(self._epoch, steps))
        if not said.stops:
            self._leave(said.ending)

    def _leave(self, ending: str) -> NoReturn:
        assert self._writer is not None
        self._writer.finish()
        self._folder.release()
        say(f"{ending}: saved to {self.directory}, to go on later; ending with exit code {REQUEUE_CODE}")
        # A launcher tells the others to end when the first has.
        PreemptionListener.ignore()
        acknowledge()
        raise SystemExit(REQUEUE_CODE)
