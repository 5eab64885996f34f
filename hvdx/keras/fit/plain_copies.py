"""`ModelCheckpoint` for models with split layers: rank 0 writes a plain copy with whole weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import keras

from hvdx.errors import ConfigError
from hvdx.keras.fit.part import Part
from hvdx.keras.gathering import gather_to
from hvdx.keras.joining import join
from hvdx.keras.seams.callbacks import steps_since_saving
from hvdx.keras.types import Logs
from hvdx.keras.weight_parts import has_parts

# These callbacks load weights on rank 0 alone.
_REFUSED = ("BackupAndRestore", "OrbaxCheckpoint")


class PlainCopies(Part):
    """Plain copy of a model for the callbacks of rank 0 that save it."""

    def __init__(self) -> None:
        super().__init__()
        self._savers: list[keras.callbacks.ModelCheckpoint] = []
        self._refused: list[str] = []
        self._counters: list[_Counter] = []
        self._to_refuse: Sequence[str] = ()
        self._copy: keras.Model | None = None

    def serve(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Serve the callbacks of a `fit`, before those that run on rank 0 only are removed elsewhere."""
        self._savers = [c for c in callbacks if isinstance(c, keras.callbacks.ModelCheckpoint)]
        self._refused = [type(c).__name__ for c in callbacks if type(c).__name__ in _REFUSED]

    def offer(self) -> tuple[list[tuple[Literal["epoch"] | int, int, int]], list[str]]:
        """Return the frequency and the counts of each callback that saves, and the callbacks that are refused."""
        return [(c.save_freq, *steps_since_saving(c)) for c in self._savers], self._refused

    def agree(self, offered: list[tuple[list[tuple[Literal["epoch"] | int, int, int]], list[str]]]) -> None:
        """Count the steps of rank 0's callbacks on all ranks.

        Raises:
            ConfigError: on all ranks, if a callback of rank 0 cannot handle split layers.
        """
        described, self._to_refuse = offered[0]
        self._counters, self._copy = [_Counter(*counts) for counts in described], None
        self._refuse()

    def _refuse(self) -> None:
        if self._to_refuse and has_parts(self.model):
            raise ConfigError.on_all_ranks(
                f"callbacks: {self._to_refuse[0]}: it saves and loads on rank 0 alone, which holds a part of the split "
                "layers. Use hvdx.keras.Checkpoint."
            )

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Gather the weights if a callback saves after this step. Collective."""
        # Layers that are built in the first step were unknown before it.
        self._refuse()
        # Every counter must count the step.
        due = [counter.saves(batch) for counter in self._counters]
        if any(due):
            self._gather()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Gather the weights if a callback saves after each epoch. Collective."""
        if any(counter.frequency == "epoch" for counter in self._counters):
            self._gather()

    def _gather(self) -> None:
        mesh = join().mesh
        if mesh is None or mesh.index or not has_parts(self.model):
            return
        keep = mesh.position == 0
        self._copy = gather_to(self.model, self._copy, keep)
        if keep:
            for callback in self._savers:
                callback.set_model(self._copy)


@dataclass
class _Counter:
    """Steps of a `ModelCheckpoint`, counted in the same way, on all ranks.

    Attributes:
        frequency: its `save_freq`.
        seen: number of steps since it saved last.
        last: number of the last step in its epoch.
    """

    frequency: Literal["epoch"] | int
    seen: int
    last: int

    def saves(self, batch: int) -> bool:
        """Count a step, and return whether the callback saves after it."""
        self.seen += batch + 1 if batch <= self.last else batch - self.last
        self.last = batch
        if self.frequency == "epoch" or self.seen < self.frequency:
            return False
        self.seen = 0
        return True
