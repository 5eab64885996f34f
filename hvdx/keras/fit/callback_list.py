"""Order of the callbacks of a `fit`, callbacks that run on rank 0 only, and access to the data iterator of `fit`."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdx.errors import ConfigError
from hvdx.keras.fit import py_datasets

# These callbacks write files or lines that one rank should write for all. All other callbacks run on every rank: they
# act on the training (early stopping, learning rates), and receive the same metrics on every rank.
RANK_0_ONLY = tuple(
    getattr(keras.callbacks, name)
    for name in (
        "ModelCheckpoint",
        "BackupAndRestore",
        "OrbaxCheckpoint",
        "TensorBoard",
        "CSVLogger",
        "RemoteMonitor",
        "ProgbarLogger",
    )
    if hasattr(keras.callbacks, name)  # older versions of Keras lack some
)


def find(callback: Any) -> Any:
    """Return the `CallbackList` that is calling `callback.set_model`, or None.

    Keras gives a callback the model but not the list, so this function searches the frames of the callers.
    """
    frame = inspect.currentframe()
    for _ in range(4):
        frame = frame.f_back if frame is not None else None
        caller = frame.f_locals.get("self") if frame is not None else None
        if isinstance(caller, keras.callbacks.CallbackList) and callback in caller.callbacks:
            return caller
    return None


def arrange(callbacks: Any, first: Any, last: Any, replaced: type, rank: int) -> list[Any]:
    """Put `first` before and `last` after all other callbacks; on ranks above 0, remove callbacks of `RANK_0_ONLY`.

    Args:
        callbacks: the `CallbackList`.
        first, last: callbacks; `first` is in the list already.
        replaced: class of callbacks that `first` replaces; they are removed.
        rank: this rank.

    Returns:
        The callbacks whose `set_model` was disabled; `unmute` enables it again.

    Raises:
        ConfigError: if the list holds another callback of the class of `first`.
    """
    # A new list: Keras is iterating over the old one.
    others = [c for c in callbacks.callbacks if c is not first and c is not last and not isinstance(c, replaced)]
    if any(isinstance(c, type(first)) for c in others):
        raise ConfigError(f"callbacks: {type(first).__name__} is there twice. One is enough for all optimizers.")
    muted = []
    if rank != 0:
        muted = [c for c in others if isinstance(c, RANK_0_ONLY)]
        for callback in muted:
            # TensorBoard opens its files in set_model, which Keras may still call.
            callback.set_model = lambda model: None
        others = [c for c in others if not isinstance(c, RANK_0_ONLY)]
        for callback in others:
            if isinstance(getattr(callback, "verbose", None), int) and type(callback).__module__.startswith("keras"):
                callback.verbose = 0
    callbacks.callbacks = [first, *others, last]
    return muted


def move(callbacks: Any, callback: Any, last: type) -> None:
    """Put a callback after all others except those of the class `last`."""
    # `sorted` keeps the order otherwise. A new list: Keras is iterating over the old one.
    callbacks.callbacks = sorted(callbacks.callbacks, key=lambda c: 2 * isinstance(c, last) + (c is callback))


def extend_epochs(callback: Any, steps: int) -> Callable[[], None] | None:
    """Let each epoch of the current `fit` take up to `steps` steps, and repeat its data if necessary.

    Args:
        callback: a callback, in its `on_train_begin`.
        steps: largest number of steps in an epoch; an epoch ends earlier if `model.stop_training` is set.

    Returns:
        A function to call after the last step; None if the data of the `fit` cannot be repeated.
    """
    iterator = epoch_iterator(callback)
    dataset: Any = getattr(iterator, "_distributed_dataset", None)
    if hasattr(dataset, "repeat"):
        # The prefetch that TensorFlow injects would start the next pass, and draw its order, before this pass ends.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        repeated, finish = py_datasets.repeat(iterator, dataset.prefetch(tf.data.AUTOTUNE))
        iterator._distributed_dataset, iterator._num_batches = repeated.with_options(options), None
        iterator.steps_per_epoch = steps
        # Keras up to 3.6 has this attribute only if it was created with a number of steps.
        iterator._current_iterator = None
        return finish
    return None


def epoch_is_one_pass(callback: Any) -> bool:
    """Return whether each epoch of the current `fit` is one pass through the data.

    Args:
        callback: a callback, in its `on_train_begin`.
    """
    return getattr(epoch_iterator(callback), "steps_per_epoch", None) is None


def start_at_step(callback: Any, step: int, skip: int, ready: Callable[[Any], None]) -> bool:
    """Let the first epoch of the current `fit` start at a later step.

    Args:
        callback: a callback, in its `on_train_begin`.
        step: number of the first step, counted from 0.
        skip: number of batches to discard before the first step.
        ready: function that is called right before the first step, with the last discarded batch, or None if no batch
            was discarded.

    Returns:
        True if this version of Keras allows it.
    """
    iterator = epoch_iterator(callback)
    # The generator of the steps of `fit`, as newer and as older versions of Keras name it.
    name = next((n for n in ("_enumerate_iterator", "enumerate_epoch") if hasattr(iterator, n)), None)
    if name is None:
        return False
    all_steps = getattr(iterator, name)

    def rest() -> Any:
        delattr(iterator, name)
        batch, items = None, all_steps()
        for item in items:
            if item[0] == 0:
                for _ in range(skip):
                    batch = next(item[-1], batch)
                # The iterator has counted one batch for each step, `step` in all, but `skip` batches were taken.
                iterator._steps_seen += skip - step
            if item[0] >= step:
                ready(batch)
                yield item
                break
        yield from items

    setattr(iterator, name, rest)
    return True


def epoch_iterator(callback: Any) -> Any:
    """Return the iterator over the batches of `fit` or `evaluate`, whichever calls a callback, or None.

    Keras gives a callback no access to the data, so this function searches the frames of the callers.
    """
    return _local(callback, "epoch_iterator")


def validation_inputs(callback: Any) -> Any:
    """Return the inputs of the validation data of the `fit` that calls a callback, or None: a dataset or arrays."""
    return _local(callback, "val_x")


def _local(callback: Any, name: str) -> Any:
    """Return a local variable of the `fit` or `evaluate` that calls a callback; None if it has none."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_locals.get("self") is not callback.model:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


def show_steps_of_all_ranks(callbacks: Any, taken: Callable[[], int], steps: int) -> None:
    """Make the progress bar show the steps of all ranks together.

    Args:
        callbacks: the `CallbackList`.
        taken: function that returns the number of steps of this epoch that all ranks have taken.
        steps: number of steps of all ranks in an epoch.
    """
    for bar in [c for c in callbacks.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]:
        bar.target = steps
        bar.on_train_batch_end = _batch_end_for_all_ranks(bar, taken)


def show_steps_of_this_rank(callbacks: Any) -> None:
    """Make the progress bar show the steps of this rank again."""
    for bar in [c for c in callbacks.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]:
        vars(bar).pop("on_train_batch_end", None)


def _batch_end_for_all_ranks(bar: Any, taken: Callable[[], int]) -> Callable[..., None]:
    def on_train_batch_end(batch: int, logs: Any = None) -> None:
        # Keras counts from 0.
        type(bar).on_train_batch_end(bar, max(taken() - 1, 0), logs)

    return on_train_batch_end


def append_to_logs(callbacks: list[Any]) -> None:
    """Make `CSVLogger` append to its file; by default Keras empties the file when training begins."""
    for logger in [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger)]:
        logger.append = True


def unmute(callbacks: list[Any]) -> None:
    """Enable `set_model` of the callbacks that `arrange` returned."""
    for callback in callbacks:
        vars(callback).pop("set_model", None)
