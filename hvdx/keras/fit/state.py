"""Weights that no gradient reaches, at the end of an epoch: means, sums (`Distribute(summed=...)`), or rank 0's."""

import functools
import weakref
from collections.abc import Sequence

import keras
import numpy as np

from hvdx.comm import Comm
from hvdx.keras.adapters.rank_local import Owner, declare, declared
from hvdx.keras.fit import replicas
from hvdx.keras.fit.part import Part
from hvdx.keras.seams.layers import KerasVariable
from hvdx.keras.types import Logs, Variable
from hvdx.keras.variables import listed, view_of
from hvdx.log import Log

_log = Log(__name__)

# For each model, the values by the `id` of the variable when they were last the same on all ranks.
_common: "weakref.WeakKeyDictionary[keras.Model, dict[int, np.ndarray]]" = weakref.WeakKeyDictionary()


class Declared(Part):
    """Declare the weights that each rank keeps for itself, and those that are summed.

    Args:
        local, summed: as for `Distribute`.

    Raises:
        ConfigError: if they are no variables or layers.
    """

    alone = True

    def __init__(self, local: Owner | Sequence[Owner] | None, summed: Owner | Sequence[Owner] | None):
        super().__init__()
        self._local, self._summed = _listed("local", local), _listed("summed", summed)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Declare them for the model of this fit."""
        declare(self.model, self._local, self._summed)


def _listed(option: str, value: Owner | Sequence[Owner] | None) -> list[Owner]:
    expected = f"Distribute: {option}: expected variables or layers of Keras"
    return listed(value, KerasVariable | keras.layers.Layer, expected, "give a list such as [model.queue]")


class State(Part):
    """Combine the weights that no gradient reaches, before a validation or at the end of an epoch without one."""

    def __init__(self, comm: Comm):
        super().__init__()
        self._comm, self._combined = comm, False

    def agree(self, offered: list[object]) -> None:
        """Remember the values from which the ranks count."""
        begin(self.model)

    def begin_late(self, theirs: None) -> None:
        """Remember the values that this rank has received."""
        begin(self.model)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._combined = False

    def on_test_begin(self, logs: Logs = None) -> None:
        """Combine the weights for the validation."""
        combine(self.model, self._comm)
        self._combined = True

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Combine the weights without a validation."""
        if not self._combined:
            combine(self.model, self._comm)


def combine(model: keras.Model, comm: Comm) -> None:
    """Combine the weights over the ranks, and say once which became those of rank 0. Collective."""
    taken = replicas.average_state(model, comm)
    add_up(model, comm)
    if taken and comm.rank == 0:
        _tell(", ".join(v.path for v in taken))


@functools.cache
def _tell(names: str) -> None:
    _log.warning(
        f"{names}: different on the ranks, and without a mean, because it is no floating-point number; all ranks "
        "get the value of rank 0 after each epoch. Distribute(summed=[...]) adds up counts, Distribute(local=[...]) "
        "leaves each rank its own."
    )


def begin(model: keras.Model) -> None:
    """Remember the values from which the ranks count; all ranks hold the same ones."""
    _common[model] = {id(v): _value(v) for v in declared(model)[1]}


def add_up(model: keras.Model, comm: Comm) -> None:
    """Add the increments of all ranks since the last call, or since `begin`. Collective.

    Weights that were made after `begin` count from 0.

    Args:
        model: model that is trained.
        comm: the ranks.
    """
    variables, common = declared(model)[1], _common.get(model, {})
    if not variables:
        return
    values = [_value(v) for v in variables]
    starts = [common.get(id(v), np.zeros_like(value)) for v, value in zip(variables, values, strict=True)]
    # Objects, since sums of float64 would round large integers.
    mine = starts, [a - b for a, b in zip(values, starts, strict=True)]
    everyone = comm.all_gather_object(mine, "summed weights")
    for variable, start, *more in zip(variables, everyone[0][0], *(theirs for _, theirs in everyone), strict=True):
        variable.assign(start + np.sum(more, axis=0, dtype=start.dtype))
    begin(model)


def _value(variable: Variable) -> np.ndarray:
    return view_of(variable).copy()
