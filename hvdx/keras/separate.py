"""Warning about a `fit` on several ranks in which nothing combines gradients or weights."""

import os
import weakref

import keras

from hvdx.comm import Comm, graph_calls
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.seams.callbacks import watch_fits
from hvdx.keras.types import Logs
from hvdx.log import Log

_log = Log(__name__)

#: Environment variable; 1 turns the warning off.
VARIABLE = "HVDX_ALLOW_SEPARATE"

# Models whose first step was checked, with or without a warning.
_checked: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()
_watching = False


def watch(comm: Comm) -> None:
    """Check the first step of each model's `fit` in this process from now on, if there are several ranks.

    The check needs no callback from the script: see `watch_fits`.

    Args:
        comm: the ranks that train.
    """
    global _watching
    if comm.size == 1 or _watching:
        return
    _watching = True

    def check(callbacks: keras.callbacks.CallbackList) -> None:
        model = next((c.model for c in callbacks.callbacks if getattr(c, "model", None) is not None), None)
        if model is not None and model not in _checked and not _is_distributed(model):
            callbacks.callbacks.append(_FirstStep(model, comm, callbacks))

    watch_fits(check)


def _is_distributed(model: keras.Model) -> bool:
    """Return whether `Distribute` or the script attached an optimiser of the model; True without an optimiser."""
    return model.optimizer is None or any(adapter_of(optimizer) is not None for optimizer in optimizers_of(model))


class _FirstStep(keras.callbacks.Callback):
    """Check whether the first step of a `fit` ran a collective, such as that of a `DistributedGradientTape`."""

    def __init__(self, model: keras.Model, comm: Comm, callbacks: keras.callbacks.CallbackList):
        super().__init__()
        self.set_model(model)
        self._comm, self._callbacks, self._before = comm, callbacks, graph_calls()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Warn if the first step ran no collective, and remove this callback."""
        self._callbacks.callbacks = [c for c in self._callbacks.callbacks if c is not self]
        _checked.add(self.model)
        if graph_calls() > self._before or _is_distributed(self.model) or os.environ.get(VARIABLE) == "1":
            return
        if self._comm.rank == 0:
            _log.warning(
                f"{self._comm.size} ranks each train a model of their own: nothing combines their "
                "gradients or weights, and their weights will differ. Add the callback, model.fit(..., "
                "callbacks=[hvdx.keras.Distribute()]), or compile the model with "
                "hvdx.keras.DistributedOptimizer(optimizer); an optimizer that was made again from a configuration or "
                f"a file has to be distributed again. Set {VARIABLE}=1 if this is intended.",
                head="\nhvdx: WARNING: ",
            )
