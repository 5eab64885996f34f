"""Order of the callbacks of a `fit`, callbacks that run on rank 0 only, and access to the data iterator of `fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import keras

from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.backend import tf
from hvdx.keras.fit import py_datasets
from hvdx.keras.fit.part import Part
from hvdx.keras.seams import iterators
from hvdx.keras.seams.callbacks import (
    group_scalars,
    mute_set_model,
    show_own_steps,
    show_steps,
    ungroup_scalars,
    unmute_set_model,
)
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.keras.seams.iterators import count_batches, dataset_of, take_steps, wrap_steps
from hvdx.keras.seams.optimizers import is_of_keras
from hvdx.keras.types import Structure

# These callbacks write files or lines that one rank should write for all. All other callbacks run on every rank: they
# act on the training (early stopping, learning rates), and receive the same metrics on every rank.
_RANK_0_ONLY = tuple(
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
# So do all callbacks of these packages.
_LOGGERS = {"mlflow", "wandb"}


def writes(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback runs on rank 0 only."""
    packages = {kind.__module__.partition(".")[0] for kind in type(callback).__mro__}
    return isinstance(callback, _RANK_0_ONLY) or bool(packages & _LOGGERS)


def arrange(
    callbacks: keras.callbacks.CallbackList,
    first: keras.callbacks.Callback,
    last: keras.callbacks.Callback,
    replaced: type,
    rank: int,
) -> list[keras.callbacks.Callback]:
    """Put `first` before and `last` after all other callbacks; on ranks above 0, remove callbacks that write.

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
        muted = [c for c in others if writes(c)]
        for callback in muted:
            mute_set_model(callback)
        others = [c for c in others if not writes(c)]
        for callback in others:
            if isinstance(getattr(callback, "verbose", None), int) and is_of_keras(type(callback)):
                callback.verbose = 0
    callbacks.callbacks = [first, *others, last]
    return muted


def insert(
    callbacks: keras.callbacks.CallbackList,
    first: keras.callbacks.Callback,
    revived: Sequence[keras.callbacks.Callback],
) -> None:
    """Put callbacks behind the first, in a hook of the first; Keras calls their hook next."""
    # In the same list: Keras is iterating over it, and calls those behind the present one.
    place = callbacks.callbacks.index(first) + 1
    callbacks.callbacks[place:place] = revived


def revive(
    first: keras.callbacks.Callback,
    muted: Sequence[keras.callbacks.Callback],
    model: keras.Model,
    epoch: int | None,
    ended: dict[str, object] | None = None,
) -> None:
    """Call the hooks that callbacks which `arrange` removed have missed.

    Args:
        first: first callback of the list.
        muted: callbacks that `arrange` returned.
        model: model of the fit.
        epoch: epoch that has begun; None if Keras begins the first now.
        ended: logs with which this epoch has ended; None if it goes on.
    """
    append_to_logs(list(muted))
    for callback in muted:
        unmute_set_model(callback)
        callback.set_params(first.params)
        callback.set_model(model)
        callback.on_train_begin()
        if epoch is not None:
            callback.on_epoch_begin(epoch)
        if epoch is not None and ended is not None:
            callback.on_epoch_end(epoch, dict(ended))


def may_write(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback runs code of the user's own, which may write on rank 0 only."""
    kind = type(callback)
    own = issubclass(kind, keras.callbacks.LambdaCallback) or not is_of_keras(kind)
    return own and not isinstance(callback, Part) and not writes(callback)


def append(callbacks: keras.callbacks.CallbackList, callback: keras.callbacks.Callback) -> None:
    """Put a callback after all others. Keras does not call its `set_model` any more."""
    # A new list: Keras is iterating over the old one.
    callbacks.callbacks = [*callbacks.callbacks, callback]


def move(callbacks: keras.callbacks.CallbackList, callback: keras.callbacks.Callback, last: type) -> None:
    """Put a callback after all others except those of the class `last`."""
    # `sorted` keeps the order otherwise. A new list: Keras is iterating over the old one.
    callbacks.callbacks = sorted(callbacks.callbacks, key=lambda c: 2 * isinstance(c, last) + (c is callback))


def extend_epochs(callback: keras.callbacks.Callback, steps: int) -> Callable[[], None] | None:
    """Let each epoch of the current `fit` take up to `steps` steps, and repeat its data if necessary.

    Args:
        callback: a callback, in its `on_train_begin`.
        steps: largest number of steps in an epoch; an epoch ends earlier if `model.stop_training` is set.

    Returns:
        A function to call after the last step; None if the data of the `fit` cannot be repeated.
    """
    iterator = epoch_iterator(callback)
    if backend.name() != "tensorflow":
        return py_datasets.begin_passes(iterator, steps)
    dataset: tf.data.Dataset = dataset_of(iterator)
    if hasattr(dataset, "repeat"):
        # The prefetch that TensorFlow injects would start the next pass, and draw its order, before this pass ends.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        repeated, finish = py_datasets.repeat(iterator, dataset.prefetch(tf.data.AUTOTUNE))
        take_steps(iterator, repeated.with_options(options), steps)
        return finish
    return None


def epoch_is_one_pass(callback: keras.callbacks.Callback) -> bool:
    """Return whether each epoch of the current `fit` is one pass through the data.

    Args:
        callback: a callback, in its `on_train_begin`.
    """
    return iterators.epoch_is_one_pass(epoch_iterator(callback))


def start_at_step(callback: keras.callbacks.Callback, step: int, skip: int, ready: Callable[[Structure], None]) -> bool:
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

    def rest(items: Iterator[iterators.Step]) -> Iterator[iterators.Step]:
        batch = None
        for item in items:
            if item[0] == 0:
                for _ in range(skip):
                    batch = next(item[-1], batch)
                # The iterator has counted one batch for each step, `step` in all, but `skip` batches were taken.
                count_batches(iterator, skip - step)
            if item[0] >= step:
                ready(batch)
                yield item
                break
        yield from items

    return wrap_steps(iterator, rest)


def show_steps_of_all_ranks(callbacks: keras.callbacks.CallbackList, taken: Callable[[], int], steps: int) -> None:
    """Make the progress bar show the steps of all ranks together.

    Args:
        callbacks: the `CallbackList`.
        taken: function that returns the number of steps of this epoch that all ranks have taken.
        steps: number of steps of all ranks in an epoch.
    """
    for bar in [c for c in callbacks.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]:
        show_steps(bar, taken, steps)


def show_params(callbacks: keras.callbacks.CallbackList, params: dict[str, object]) -> None:
    """Make the progress bar show other parameters of the fit, such as its steps."""
    for bar in [c for c in callbacks.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]:
        bar.set_params(params)


def show_steps_of_this_rank(callbacks: keras.callbacks.CallbackList) -> None:
    """Make the progress bar show the steps of this rank again."""
    for bar in [c for c in callbacks.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]:
        show_own_steps(bar)


def show_costs(callbacks: Sequence[keras.callbacks.Callback], numbers: Callable[[], dict[str, float]]) -> None:
    """Make TensorBoard show numbers of each epoch in the group "hvdx"."""
    for board in [c for c in callbacks if isinstance(c, keras.callbacks.TensorBoard)]:
        group_scalars(board, "hvdx", numbers)


def show_no_costs(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Undo `show_costs`."""
    for board in [c for c in callbacks if isinstance(c, keras.callbacks.TensorBoard)]:
        ungroup_scalars(board)


def append_to_logs(callbacks: list[keras.callbacks.Callback]) -> None:
    """Make `CSVLogger` append to its file; by default Keras empties the file when training begins."""
    for logger in [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger)]:
        logger.append = True


def unmute(callbacks: list[keras.callbacks.Callback]) -> None:
    """Enable `set_model` of the callbacks that `arrange` returned."""
    for callback in callbacks:
        unmute_set_model(callback)
