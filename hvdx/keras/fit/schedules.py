"""Learning-rate schedules that are counted in steps: N ranks take one N-th of the steps of one process."""

import keras
import tensorflow as tf

from hvdx.comm import Comm
from hvdx.keras.adapters.optimizer import optimizers_of
from hvdx.keras.fit.part import Part
from hvdx.keras.fit.sync_callback import SyncCallback
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.models import initial_epoch
from hvdx.keras.seams.optimizers import rate_of, step_counter
from hvdx.log import Log

_log = Log(__name__)

# Numbers of steps in the schedules of Keras, and in those of others that name them so. `boundaries` is a list.
_COUNTS = ("decay_steps", "first_decay_steps", "boundaries", "warmup_steps", "total_steps")


class Schedules(Part):
    """Remark on schedules that end after this fit."""

    def __init__(self, comm: Comm, sync: SyncCallback):
        super().__init__()
        self._comm, self._sync = comm, sync

    def agree(self, offered: list[object]) -> None:
        """Print the remarks, now that the length of an epoch is known."""
        epochs = (self.params.get("epochs") or 0) - (initial_epoch(self.model) or 0)
        tell(self.model, epochs * (self._sync.steps or 0) - self._sync.steps_done, self._comm)


def remark(schedule: keras.optimizers.schedules.LearningRateSchedule, steps: int, size: int) -> str:
    """Return a remark on a schedule that counts more steps than a rank takes, but no more than one process would.

    Args:
        schedule: schedule of an optimiser.
        steps: steps of each rank in the fit.
        size: number of ranks.

    Example:
        >>> remark(keras.optimizers.schedules.CosineDecay(0.1, 1000), 1000, 4)
        ''
    """
    counts = {name: value for name in _COUNTS if (value := _last(getattr(schedule, name, None)))}
    # A cosine warms up only to a target, and decays after the warm-up.
    if getattr(schedule, "warmup_target", counts) is None:
        counts.pop("warmup_steps", None)
    end = max([counts.get("warmup_steps", 0) + counts.get("decay_steps", 0), *counts.values()])
    if not steps < end <= steps * size:
        return ""
    listed = ", ".join(f"{name}={value:,}" for name, value in counts.items())
    return (
        f"the learning-rate schedule {type(schedule).__name__} ({listed}) counts {end:,} steps, but this fit has "
        f"{steps:,} steps on each of {size} ranks. Divide the schedule's steps by hvdx.size(), unless more fits follow."
    )


def tell(model: keras.Model, steps: int, comm: Comm) -> None:
    """Print the remarks on the schedules of a model's optimisers on rank 0, before their first step.

    Args:
        model: compiled model at the start of a fit.
        steps: steps of each rank in this fit.
        comm: the ranks.
    """
    if comm.rank != 0:
        return
    for optimizer in map(innermost, optimizers_of(model)):
        schedule = rate_of(optimizer)
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            done = int(step_counter(optimizer))
            # In a later fit it is not known how many steps the script has planned.
            text = remark(schedule, steps, comm.size) if done == 0 else ""
            if text:
                _log.warning(text)


def _last(count: int | tf.Tensor) -> int:
    """Return a number of steps, or the last of a list; 0 for anything else."""
    if isinstance(count, list | tuple) and count:
        count = count[-1]
    return int(count) if isinstance(count, int | float) else 0
