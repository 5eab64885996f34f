"""The contract of a part of a fit: a callback of Keras with hooks for what the ranks do together."""

from collections.abc import Sequence
from typing import Any

import keras

from hvdx.keras.types import Logs


class Part(keras.callbacks.Callback):
    """Part of what hvdx does in a `fit`; a part overrides the hooks that it needs, and the others do nothing.

    `Distribute` lists its parts. All ranks call their hooks in the order of the list, and `on_train_end` in the reverse
    order. `Checkpoint` and `SyncCallback` are parts too, whose hooks of Keras run after those of all other callbacks.
    Constructors take the ranks, and the parts whose values a part reads.

    Attributes:
        alone: True if the part also runs in a world of one.
        saves: True if the part saves checkpoints of the training.
    """

    alone = saves = False

    @property
    def model(self) -> keras.Model:
        """The model. On JAX the property of Keras would write the state of a step to its variables, even within one."""
        return self._model

    @property
    def steps_done(self) -> int:
        """Number of steps of the first epoch that were taken before this fit."""
        return 0

    @property
    def preempted(self) -> bool:
        """True once this rank has received a preemption signal; no rank then begins another step."""
        return False

    def offer(self) -> object:
        """Return a picklable value of this rank for `agree`, after `on_train_begin` of all callbacks."""

    def agree(self, offered: list[Any]) -> None:
        """Make all ranks begin alike.

        Args:
            offered: result of `offer` on each rank.
        """

    def before_newcomers(self) -> None:
        """Prepare for ranks that join between two epochs. Collective over the ranks before."""

    def now(self) -> object:
        """Return what `begin_late` needs on a rank that joins between two epochs: a picklable value."""

    def begin_late(self, theirs: Any) -> None:
        """Begin between two epochs, on a rank that joins the others, after `agree`.

        Args:
            theirs: result of `now` on rank 0.
        """

    def begin_steps(self) -> None:
        """Prepare the steps of an epoch, after `on_epoch_begin` of all callbacks."""

    def end_steps(self) -> None:
        """Finish the steps of an epoch, before its validation, or before its end if there is none."""

    # In each step, the versions of Keras would call two functions more.
    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Begin a step, or several that are executed together."""

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """End a step, or several that were executed together."""

    def end_first_step(self) -> None:
        """Finish the first step of a fit, right after the `on_train_batch_end` of this part."""

    def end_fit(self, logs: Logs = None) -> None:
        """Finish a fit, after `on_train_end` of all callbacks."""

    def save_and_leave(self, steps: int) -> None:
        """Save the training and end the process, after a rank was `preempted`.

        Args:
            steps: steps of the epoch that all ranks have taken.
        """


class Parts(Part):
    """Parts in the order in which their hooks run.

    Args:
        parts: the parts.

    Attributes:
        parts: the parts.
        called: those whose hooks of Keras run here; Keras itself calls the others.
    """

    def __init__(self, parts: Sequence[Part] = ()):
        super().__init__()
        self.parts = self.called = list(parts)
        self._first_step = True

    def _run(self, hook: str, *args: object) -> None:
        for part in self.called:
            getattr(part, hook)(*args)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        for part in self.parts:
            part.set_model(model)

    def set_params(self, params: dict[str, object]) -> None:
        super().set_params(params)
        for part in self.parts:
            part.set_params(params)

    def offer(self) -> list[object]:
        return [part.offer() for part in self.parts]

    def agree(self, offered: list[list[Any]]) -> None:
        """Call `agree` of each part, with the values that it offered on all ranks."""
        for part, *theirs in zip(self.parts, *offered, strict=True):
            part.agree(theirs)

    def begin_steps(self) -> None:
        for part in self.parts:
            part.begin_steps()

    def end_steps(self) -> None:
        for part in self.parts:
            part.end_steps()

    def on_train_begin(self, logs: Logs = None) -> None:
        self._first_step = True
        self._run("on_train_begin", logs)

    def on_train_end(self, logs: Logs = None) -> None:
        for part in reversed(self.called):
            part.on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._run("on_epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._run("on_epoch_end", epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._run("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        first, self._first_step = self._first_step, False
        for part in self.called:
            part.on_train_batch_end(batch, logs)
            if first:
                part.end_first_step()

    def on_test_begin(self, logs: Logs = None) -> None:
        self._run("on_test_begin", logs)

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._run("on_test_batch_begin", batch, logs)

    def on_test_end(self, logs: Logs = None) -> None:
        self._run("on_test_end", logs)
