"""The other callbacks of a `fit`: their order, and which of them speak on rank 0 only."""

import inspect
from typing import Any

import keras

# These write files or lines that one rank should write for all. Everything else runs on every rank, since it acts
# on the training (early stopping, learning rates) and sees the same metrics there.
RANK_0_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)


def find(callback: Any) -> Any:
    """The `CallbackList` that is calling `callback.set_model`, or None.

    Keras hands a callback the model and never its neighbours, so the caller's own frame is asked.
    """
    frame = inspect.currentframe()
    for _ in range(4):
        frame = frame.f_back if frame is not None else None
        caller = frame.f_locals.get("self") if frame is not None else None
        if isinstance(caller, keras.callbacks.CallbackList) and callback in caller.callbacks:
            return caller
    return None


def arrange(neighbours: Any, first: Any, last: Any, rank: int) -> None:
    """Put `first` in front and `last` behind all others, and silence what only rank 0 should say.

    Args:
        neighbours: the `CallbackList`.
        first, last: callbacks; `first` is in the list already.
        rank: of this process.
    """
    # A new list: Keras is iterating over the old one.
    others = [c for c in neighbours.callbacks if c is not first and c is not last]
    if rank != 0:
        for callback in others:
            if isinstance(callback, RANK_0_ONLY):
                callback.set_model = lambda model: None
            elif isinstance(getattr(callback, "verbose", None), int) and type(callback).__module__.startswith("keras"):
                callback.verbose = 0
        others = [c for c in others if not isinstance(c, RANK_0_ONLY)]
    neighbours.callbacks = [first, *others, last]
