"""`ModelCheckpoint` for models with split layers: rank 0 writes a plain copy with whole weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from hvdx.errors import ConfigError
from hvdx.keras.gathering import gather_to
from hvdx.keras.joining import join
from hvdx.keras.seams.callbacks import steps_since_saving
from hvdx.keras.shards import has_parts

# These callbacks load weights on rank 0 alone.
_REFUSED = ("BackupAndRestore", "OrbaxCheckpoint")


class PlainCopies:
    """Plain copy of a model for the callbacks of rank 0 that save it.

    Args:
        callbacks: all callbacks of `fit` on this rank, also those that run on rank 0 only.
    """

    def __init__(self, callbacks: Sequence[Any] = ()):
        self._savers = [c for c in callbacks if isinstance(c, keras.callbacks.ModelCheckpoint)]
        #: For each saver, its frequency and its counts from earlier fits.
        self.described = [(c.save_freq, *steps_since_saving(c)) for c in self._savers]
        self.refused = [type(c).__name__ for c in callbacks if type(c).__name__ in _REFUSED]
        self._counters: list[_Counter] = []
        self._to_refuse: Sequence[str] = ()
        self._copy: Any = None

    def begin(self, model: Any, described: Sequence[tuple[Any, int, int]], refused: Sequence[str]) -> None:
        """Begin a fit. Collective.

        Args:
            model: model that is trained.
            described: `described` of rank 0, whose callbacks save.
            refused: `refused` of rank 0.

        Raises:
            ConfigError: on all ranks, if a callback of rank 0 cannot handle split layers.
        """
        self._counters = [_Counter(*counts) for counts in described]
        self._to_refuse, self._copy = refused, None
        self._refuse(model)

    def _refuse(self, model: Any) -> None:
        if self._to_refuse and has_parts(model):
            raise ConfigError.on_all_ranks(
                f"callbacks: {self._to_refuse[0]}: it saves and loads on rank 0 alone, which holds a part of the split "
                "layers. Use hvdx.keras.Checkpoint."
            )

    def after_step(self, model: Any, batch: int) -> None:
        """Gather the weights if a callback saves after this step. Collective.

        Args:
            model: model that is trained.
            batch: argument of `on_train_batch_end`.

        Raises:
            ConfigError: see `begin`.
        """
        # Layers that are built in the first step were unknown before it.
        self._refuse(model)
        # Every counter must count the step.
        due = [counter.saves(batch) for counter in self._counters]
        if any(due):
            self._gather(model)

    def after_epoch(self, model: Any) -> None:
        """Gather the weights if a callback saves after each epoch. Collective."""
        if any(counter.frequency == "epoch" for counter in self._counters):
            self._gather(model)

    def _gather(self, model: Any) -> None:
        mesh = join().mesh
        if mesh is None or mesh.index or not has_parts(model):
            return
        keep = mesh.position == 0
        self._copy = gather_to(model, self._copy, keep)
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

    frequency: Any
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
