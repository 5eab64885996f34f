"""Spares that take the places of ranks that died, between two epochs: what a rank receives that joins then.

`hvdx.keras.checkpoint` has the state of a training; this module and that one meet in `use`.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import keras

from hvdx.comm import Comm
from hvdx.errors import HvdxError
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.fit.callback_list import writes
from hvdx.keras.fit.part import Part
from hvdx.keras.seams.callbacks import numbers_of, set_numbers
from hvdx.keras.seams.models import set_initial_epoch
from hvdx.keras.seams.optimizers import is_of_keras

T = TypeVar("T")

# Attributes of callbacks of Keras that may differ between ranks.
_OWN = ("verbose", "params")

# Gives the state of a model to the ranks that have joined; see `use`.
_give: Callable[[keras.Model, Comm, Attachment, bool], None] | None = None


def use(give: Callable[[keras.Model, Comm, Attachment, bool], None]) -> None:
    """Set the function that gives the state of a model; `hvdx.keras.checkpoint` calls this.

    Args:
        give: function of a model, the ranks, its optimisers, and whether this rank is new. Collective.
    """
    global _give
    _give = give


def give(
    model: keras.Model,
    comm: Comm,
    attachment: Attachment,
    parts: Sequence[Part],
    callbacks: Sequence[keras.callbacks.Callback],
    epoch: int | None,
) -> None:
    """Give the ranks that have joined the state of the training. Collective, between two epochs.

    Args:
        model: model of the fit.
        comm: the ranks; the new ones come last.
        attachment: optimisers of the fit.
        parts: parts of the fit.
        callbacks: all callbacks of the fit.
        epoch: number of the epoch that begins; None on a rank that is new.

    Raises:
        HvdxError: on a rank that is new, if all others have died.
    """
    assert _give is not None
    strategy = first(comm, lambda: attachment.strategy, epoch is None)
    if epoch is None:
        attachment.follow(strategy)
    _give(model, comm, attachment, epoch is None)
    kept = [c for c in callbacks if is_of_keras(type(c)) and not isinstance(c, Part) and not writes(c)]
    begun, states, numbers = first(
        comm, lambda: (epoch, [part.now() for part in parts], [_state_of(c) for c in kept]), epoch is None
    )
    if epoch is None:
        set_initial_epoch(model, begun)
        for part, theirs in zip(parts, states, strict=True):
            part.begin_late(theirs)
        for callback, theirs in zip(kept, numbers, strict=True):
            set_numbers(callback, theirs)


def _state_of(callback: keras.callbacks.Callback) -> dict[str, object]:
    return {name: value for name, value in numbers_of(callback).items() if name not in _OWN}


def first(comm: Comm, value: Callable[[], T], is_new: bool) -> T:
    """Return a value of rank 0. Collective.

    Args:
        comm: the ranks.
        value: called on rank 0; another rank, if that one dies.
        is_new: whether this rank has no value yet.

    Raises:
        HvdxError: if rank 0 has none.
    """

    def work() -> T:
        if comm.rank == 0 and is_new:
            raise HvdxError("all ranks that had the state of the training have died.")
        found = comm.all_gather_object([value()] if comm.rank == 0 else [], "the state of the training")
        return found[0][0]

    return comm.complete(work)
