"""Notices a `fit` whose ranks train apart: there are several, and nothing combines what they learn."""

import functools
import os
import sys
import weakref
from typing import Any

import keras

from hvdx.comm import Comm, graph_calls
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of

#: Set to 1 by those who mean it.
VARIABLE = "HVDX_ALLOW_SEPARATE"

# Models that nothing need be said of: a first step has combined something, or it has been said.
_settled: "weakref.WeakSet[Any]" = weakref.WeakSet()
_watching = False


def watch(comm: Comm) -> None:
    """Look at each `fit` of this process from now on, where there are several ranks.

    A model's `fit` is told apart by what its callbacks and its optimisers are: no callback has to be given, which is
    the point. Keras has one place that every `fit` goes through, `CallbackList.on_train_begin`.

    Args:
        comm: the ranks that train.
    """
    global _watching
    if comm.size == 1 or _watching:
        return
    _watching = True
    plain = keras.callbacks.CallbackList.on_train_begin

    @functools.wraps(plain)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        plain(self, logs)
        model = next((c.model for c in self.callbacks if getattr(c, "model", None) is not None), None)
        if model is not None and model not in _settled and not _combined(model):
            self.callbacks.append(_FirstStep(model, comm, self))

    keras.callbacks.CallbackList.on_train_begin = on_train_begin


def _combined(model: Any) -> bool:
    """Whether an optimiser of a model is tied to the other ranks, by `Distribute` or by the script."""
    return model.optimizer is None or any(adapter_of(optimizer) is not None for optimizer in optimizers_of(model))


class _FirstStep(keras.callbacks.Callback):
    """Did the first step of a `fit` combine anything: by a `DistributedGradientTape`, or a collective of its own?"""

    def __init__(self, model: Any, comm: Comm, callbacks: Any):
        super().__init__()
        self.set_model(model)
        self._comm, self._callbacks, self._before = comm, callbacks, graph_calls()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Say so if it did not, and look no further."""
        self._callbacks.callbacks = [c for c in self._callbacks.callbacks if c is not self]
        _settled.add(self.model)
        if graph_calls() > self._before or _combined(self.model) or os.environ.get(VARIABLE) == "1":
            return
        if self._comm.rank == 0:
            print(
                f"\nhvdx: WARNING: {self._comm.size} ranks each train a model of their own: nothing combines what they "
                "learn, and in the end their weights differ. Add the callback, model.fit(..., "
                "callbacks=[hvdx.keras.Distribute()]), or compile the model with "
                "hvdx.keras.DistributedOptimizer(optimizer); an optimizer that was made anew from a configuration or "
                f"a file has to be distributed again. {VARIABLE}=1 says that this is meant.",
                file=sys.stderr,
                flush=True,
            )
