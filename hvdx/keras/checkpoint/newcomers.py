"""State of a training, from the memory of a rank that has it to ranks that join."""

import functools
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

from hvdx.comm import Comm
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.checkpoint.contents import Data, Manifest, array_of, snapshot, variables_of
from hvdx.keras.checkpoint.files import ArraysInMemory
from hvdx.keras.checkpoint.restoring import LoadedCheckpoint
from hvdx.keras.fit import data, replacing
from hvdx.keras.fit.attachment import Attachment


class _Received:
    """State that a rank has received; the same as `Saved` for a checkpoint of one rank."""

    path = Path("the state of another rank")

    def __init__(self, manifest: Manifest, shared: Mapping[str, np.ndarray], mine: dict[str, np.ndarray]):
        self.manifest, self._shared, self._mine = manifest, shared, ArraysInMemory(mine)

    def shared(self) -> Mapping[str, np.ndarray]:
        return self._shared

    def rank(self, rank: int) -> ArraysInMemory:
        return self._mine


def give(model: keras.Model, comm: Comm, attachment: Attachment, is_new: bool) -> None:
    """Give ranks that have joined what a checkpoint of the first rank would restore; see `replacing.use`.

    Their residuals are zero. All ranks open their exchanges anew, as after a restart.
    """

    def content() -> tuple[Manifest, dict[str, np.ndarray], list[str]]:
        found = snapshot(model, comm, Data(data.state()[0]))
        return found.manifest | {"ranks": 1, "epoch": 0, "step": 0}, found.mine, list(found.shared)

    manifest, mine, names = replacing.first(comm, content, is_new)
    # One by one: they may be large.
    shared = {name: replacing.first(comm, functools.partial(_value, model, name), is_new) for name in names}
    if is_new:
        loaded = LoadedCheckpoint(model, _Received(manifest, shared, mine), comm.world_ranks[comm.rank], comm.size)
        loaded.assign()
        loaded.reopen()
        loaded.restore_states()
        data.set_orders(manifest["drawn"])
        return
    adapters = [adapter_of(optimizer) for optimizer in optimizers_of(model)]
    kept = [a for a, entry in zip(adapters, manifest["optimizers"], strict=True) if a is not None and entry["strategy"]]
    if kept:
        attachment.keep_costs()
    # Copies, since the exchanges that are closed own the originals.
    states = [{name: np.array(array) for name, array in adapter.state_dict().items()} for adapter in kept]
    for adapter in kept:
        adapter.reopen(adapter.exchanged)
    for adapter, state in zip(kept, states, strict=True):
        adapter.load_state_dict(state)


def _value(model: keras.Model, name: str) -> np.ndarray:
    """Return a variable by its name in a checkpoint."""
    group, _, index = name.partition(".")
    return array_of(variables_of(model)[group][int(index)])
