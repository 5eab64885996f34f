"""Warning about ranks that each train a model of their own, because nothing combines gradients or weights."""

import os
import weakref

import keras

from hvdx.comm import Comm, current
from hvdx.keras.adapters.optimizer import adapter_of
from hvdx.keras.seams.optimizers import watch_applies
from hvdx.log import Log

_log = Log(__name__)

#: Environment variable; 1 turns the warning off.
VARIABLE = "HVDX_ALLOW_SEPARATE"

# Optimisers whose first step was checked, with or without a warning, and those that may train separately.
_checked: "weakref.WeakSet[keras.optimizers.Optimizer]" = weakref.WeakSet()
_watching = False
_script_combines = False


def watch(comm: Comm) -> None:
    """Check the first step of each optimiser in this process from now on, in `fit` or not, if there are several ranks.

    Args:
        comm: the ranks that train.
    """
    global _watching
    if comm.size == 1 or _watching:
        return
    _watching = True

    def check(optimizer: keras.optimizers.Optimizer) -> None:
        if optimizer in _checked or adapter_of(optimizer) is not None:
            return
        _checked.add(optimizer)
        now = current()
        # Rank 0 says nothing, since it alone may train a model beside the others, for a figure or a trial.
        if now is not None and now.rank == 1 and not _script_combines and os.environ.get(VARIABLE) != "1":
            _log.warning(_text(optimizer.name, now.size), head="\nhvdx: WARNING: ")

    watch_applies(check)


def allow(optimizer: keras.optimizers.Optimizer) -> None:
    """Let an optimiser train separately on this rank."""
    _checked.add(optimizer)


def script_combines() -> None:
    """Record that the script combines gradients or weights by collectives of its own, such as those of a tape."""
    global _script_combines
    _script_combines = True


def _text(name: str, size: int) -> str:
    return (
        f"{size} ranks each train a model of their own: nothing combines the gradients or weights of optimizer {name}, "
        "and the weights will differ. In fit, add the callback: callbacks=[hvdx.keras.Distribute()]. In a loop of your "
        "own: optimizer = hvdx.keras.prepare(model, optimizer). An optimizer that was made again from a configuration "
        f"or a file has to be prepared again. Set {VARIABLE}=1 if this is intended."
    )
