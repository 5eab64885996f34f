"""Callbacks and their list."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np

from hvdx.keras.backend import tf
from hvdx.keras.seams.replacing import Method, override, restore
from hvdx.keras.types import Logs


def mute_set_model(callback: keras.callbacks.Callback) -> None:
    """Make `set_model` of a callback do nothing, which Keras may still call; TensorBoard opens its files there.

    Relies on: `CallbackList` reaches `set_model` by way of the object.
    """
    callback.set_model = lambda model: None


def unmute_set_model(callback: keras.callbacks.Callback) -> None:
    """Undo `mute_set_model`."""
    restore(callback, ["set_model"])


def show_steps(bar: keras.callbacks.ProgbarLogger, taken: Callable[[], int], steps: int) -> None:
    """Make a `ProgbarLogger` show `taken()` of `steps` steps.

    Relies on: `ProgbarLogger.target`; `on_train_batch_end` shows its argument, which counts from 0.
    """

    def on_train_batch_end(
        self: keras.callbacks.ProgbarLogger, original: Method, batch: int, logs: Logs = None
    ) -> None:
        original(max(taken() - 1, 0), logs)

    bar.target = steps
    override(bar, "on_train_batch_end", on_train_batch_end)


def show_own_steps(bar: keras.callbacks.ProgbarLogger) -> None:
    """Undo `show_steps`."""
    restore(bar, ["on_train_batch_end"])


def group_scalars(board: keras.callbacks.TensorBoard, group: str, numbers: Callable[[], dict[str, float]]) -> None:
    """Make a `TensorBoard` write `numbers()` of each epoch with the tags GROUP/NAME, and not as epoch_NAME too.

    Relies on: `TensorBoard._log_epoch_metrics(epoch, logs)` writes the logs of an epoch; `_train_writer`.
    """

    def log_epoch_metrics(
        self: keras.callbacks.TensorBoard, original: Method, epoch: int, logs: dict[str, object] | None
    ) -> None:
        grouped = numbers()
        original(epoch, {name: value for name, value in (logs or {}).items() if name not in grouped})
        with self._train_writer.as_default():
            for name, value in grouped.items():
                tf.summary.scalar(f"{group}/{name}", value, step=epoch)

    override(board, "_log_epoch_metrics", log_epoch_metrics)


def ungroup_scalars(board: keras.callbacks.TensorBoard) -> None:
    """Undo `group_scalars`."""
    restore(board, ["_log_epoch_metrics"])


def steps_since_saving(callback: keras.callbacks.Callback) -> tuple[int, int]:
    """Return the steps since a `ModelCheckpoint` saved, and the number of its last step, -1 before the first.

    Relies on: `ModelCheckpoint._batches_seen_since_last_saving` and `_last_batch_seen`.
    """
    last = getattr(callback, "_last_batch_seen", None)
    return getattr(callback, "_batches_seen_since_last_saving", 0), -1 if last is None else last


class GuardedModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`ModelCheckpoint` that saves only where `saves_here()` is true.

    Relies on: `ModelCheckpoint` writes files in `_save_model` only.
    """

    def saves_here(self) -> bool:
        """Return whether this process saves."""
        raise NotImplementedError

    def _save_model(self, *args: object, **named: object) -> None:
        if self.saves_here():
            super()._save_model(*args, **named)


def numbers_of(callback: keras.callbacks.Callback) -> dict[str, object]:
    """Return the state of a callback of Keras, such as the best value so far, the weights that had it, or a history.

    Relies on: it is in attributes that are numbers, texts, arrays, or lists and dictionaries of them.
    """
    return {name: value for name, value in vars(callback).items() if _is_state(value)}


def _is_state(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_state(v) for v in value.values())
    if isinstance(value, list):
        return all(_is_state(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str | np.generic | np.ndarray)


def set_numbers(callback: keras.callbacks.Callback, numbers: dict[str, object]) -> None:
    """Set the state of a callback of Keras.

    Args:
        callback: the callback.
        numbers: result of `numbers_of` for one of the same class.
    """
    vars(callback).update(numbers)
