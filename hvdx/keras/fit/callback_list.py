"""The other callbacks of a `fit`: their order, and which of them speak on rank 0 only."""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdx.errors import ConfigError

# These write files or lines that one rank should write for all. Everything else runs on every rank, since it acts
# on the training (early stopping, learning rates) and sees the same metrics there.
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
    if hasattr(keras.callbacks, name)  # some came in later versions of Keras
)


def find(callback: Any) -> Any:
    """The `CallbackList` that is calling `callback.set_model`, or None.

    Keras hands a callback the model and never its callbacks, so the caller's own frame is asked.
    """
    frame = inspect.currentframe()
    for _ in range(4):
        frame = frame.f_back if frame is not None else None
        caller = frame.f_locals.get("self") if frame is not None else None
        if isinstance(caller, keras.callbacks.CallbackList) and callback in caller.callbacks:
            return caller
    return None


def arrange(callbacks: Any, first: Any, last: Any, replaced: type, rank: int) -> list[Any]:
    """Put `first` in front and `last` behind all others, and leave out what only rank 0 should do.

    Args:
        callbacks: the `CallbackList`.
        first, last: callbacks; `first` is in the list already.
        replaced: callbacks of this class do what `first` does, and are left out.
        rank: of this process.

    Returns:
        Callbacks that were kept from hearing of the model, which `unmute` sets right again.

    Raises:
        ConfigError: there is another callback of the class of `first`.
    """
    # A new list: Keras is iterating over the old one.
    others = [c for c in callbacks.callbacks if c is not first and c is not last and not isinstance(c, replaced)]
    if any(isinstance(c, type(first)) for c in others):
        raise ConfigError(f"callbacks: {type(first).__name__} is there twice. One is enough for all optimizers.")
    muted = []
    if rank != 0:
        muted = [c for c in others if isinstance(c, RANK_0_ONLY)]
        for callback in muted:
            # TensorBoard opens its files here, and Keras may still come to it.
            callback.set_model = lambda model: None
        others = [c for c in others if not isinstance(c, RANK_0_ONLY)]
        for callback in others:
            if isinstance(getattr(callback, "verbose", None), int) and type(callback).__module__.startswith("keras"):
                callback.verbose = 0
    callbacks.callbacks = [first, *others, last]
    return muted


def prolong_epochs(callback: Any, steps: int) -> bool:
    """Let the `fit` that is beginning take up to so many steps an epoch, going through its data as often as it takes.

    Keras hands a callback nothing of the data, so the frame of `fit` is asked.

    Args:
        callback: in its `on_train_begin`.
        steps: an epoch; it ends sooner when `model.stop_training` is set.

    Returns:
        Whether that was possible.
    """
    iterator = _epoch_iterator(callback)
    dataset: Any = getattr(iterator, "_distributed_dataset", None)
    if hasattr(dataset, "repeat"):
        # What TensorFlow prefetches by itself would begin the next pass, and draw its order, before this one is over.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        repeated = dataset.prefetch(tf.data.AUTOTUNE).repeat().with_options(options)
        iterator._distributed_dataset, iterator._num_batches = repeated, None
        iterator.steps_per_epoch = steps
        return True
    return False


def goes_through(callback: Any) -> bool:
    """Whether an epoch of the `fit` that is beginning goes through its data once, and the next begins anew.

    Args:
        callback: in its `on_train_begin`.
    """
    return getattr(_epoch_iterator(callback), "steps_per_epoch", None) is None


def begin_later(callback: Any, step: int, skip: int, ready: Callable[[Any], None]) -> bool:
    """Let the first epoch of the `fit` that is beginning start with a later step.

    Args:
        callback: in its `on_train_begin`.
        step: the number of the first step, from 0.
        skip: batches to take out of the data before it.
        ready: called right before the first step, with the batch before it; None where there is none.

    Returns:
        Whether that was possible.
    """
    iterator = _epoch_iterator(callback)
    # What `fit` goes through, in Keras of late and before.
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
                # It counts what it hands out.
                iterator._steps_seen += skip - step
            if item[0] >= step:
                ready(batch)
                yield item
                break
        yield from items

    setattr(iterator, name, rest)
    return True


def _epoch_iterator(callback: Any) -> Any:
    """What hands the batches out: Keras gives a callback nothing of the data, so the frame of `fit` is asked."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_locals.get("self") is not callback.model:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("epoch_iterator")


def show_all(callbacks: Any, taken: Callable[[], int], steps: int) -> None:
    """Have the progress bar show the steps of all ranks together.

    Args:
        callbacks: the `CallbackList`.
        taken: so many of an epoch's steps are over.
        steps: in an epoch.
    """
    for bar in [c for c in callbacks.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]:
        bar.target = steps
        bar.on_train_batch_end = _shows_all(bar, taken)


def show_own(callbacks: Any) -> None:
    """Have the progress bar show its rank's steps again."""
    for bar in [c for c in callbacks.callbacks if isinstance(c, keras.callbacks.ProgbarLogger)]:
        vars(bar).pop("on_train_batch_end", None)


def _shows_all(bar: Any, taken: Callable[[], int]) -> Callable[..., None]:
    def on_train_batch_end(batch: int, logs: Any = None) -> None:
        # Keras counts from 0.
        type(bar).on_train_batch_end(bar, max(taken() - 1, 0), logs)

    return on_train_batch_end


def append_to_logs(callbacks: list[Any]) -> None:
    """Have files of metrics go on, which Keras empties where it is not told that a training does."""
    for logger in [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger)]:
        logger.append = True


def unmute(callbacks: list[Any]) -> None:
    """Let callbacks hear of models again."""
    for callback in callbacks:
        vars(callback).pop("set_model", None)
