"""How a model goes on from a checkpoint."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.errors import CheckpointError, ConfigError, ReplicaError
from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.adapters.rank_local import accumulated, rank_local_ids
from hvdx.keras.checkpoint.contents import (
    Data,
    common_generator,
    described,
    generators,
    set_random_states,
)
from hvdx.keras.checkpoint.files import Arrays
from hvdx.keras.checkpoint.folder import Folder, Position, Saved
from hvdx.keras.fit import data, replicas
from hvdx.keras.joining import join

Assignments = list[tuple[Any, np.ndarray]]

_OTHER_MODEL = "It is of another model: give another directory, or the model that was saved."


@dataclass(frozen=True)
class Restored:
    """Where a training goes on.

    Attributes:
        position: in the training.
        data: where it was in its data.
        ranks: how many had come there.
        metrics: of the epoch that was begun; empty between two.
        random: what `random_states` said.
    """

    position: Position
    data: Data
    ranks: int
    metrics: list[np.ndarray]
    random: dict[str, np.ndarray]


def restore(directory: str | os.PathLike[str], model: Any) -> int | None:
    """Have a model go on where its newest checkpoint was made, in a loop of your own. Collective.

    Args:
        directory: what `save` was given.
        model: built, and compiled or given its optimisers as it was when it was saved.

    Returns:
        The number of epochs it was trained; None where there is no checkpoint.

    Raises:
        ConfigError: the checkpoint is of another model or optimiser.
        ReplicaError: on all ranks, if one cannot see the directory, or if all checkpoints are damaged.
    """
    folder = Folder(os.fspath(directory), join())
    folder.check_to_read()
    restored = restore_newest(folder, model)
    return None if restored is None else restored.position.epoch


def restore_newest(folder: Folder, model: Any) -> Restored | None:
    """Take the newest checkpoint that is whole, and set those that are not aside. Collective.

    Args:
        folder: the checkpoints.
        model: see `restore`.

    Returns:
        Where the model goes on; None where there is no checkpoint.

    Raises:
        ConfigError, ReplicaError: see `restore`.
    """
    positions = folder.positions()
    for position in reversed(positions):
        restored = _restore_whole(folder, position, model)
        if restored is not None:
            return restored
    if positions:
        raise ReplicaError(
            f"{folder.path}: all checkpoints are damaged: {', '.join(map(str, positions))}. They were set aside as "
            "damaged-...; start again to begin anew."
        )
    return None


def _restore_whole(folder: Folder, position: Position, model: Any) -> Restored | None:
    """Take a checkpoint, or set it aside, if it is damaged. Collective."""
    comm, path, place = folder.comm, folder.at(position), f"restoring {position}"
    reading, problem, failed = folder.attempt(place, lambda: _Reading(model, Saved(path), comm.rank, comm.size))
    if reading is not None and not failed:
        return reading.apply(folder, place)
    if not all(failure.damaged for failure in failed.values()):
        folder.fail(place, problem, failed, "Nothing was changed.")
    listed = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in failed.items())
    say(f"{path}: {listed}. It is set aside, and the checkpoint before it is taken")

    def set_aside() -> None:
        if comm.rank == 0:
            folder.set_aside(position)

    folder.on_all_ranks(place, set_aside, "Remove it.")
    return None


class _Reading:
    """All that one rank takes from a checkpoint, read and checked before any of it is assigned; it exchanges nothing.

    Args:
        model: what is to go on.
        saved: the checkpoint.
        rank, size: this rank, and the number of ranks now.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfigError: it is of another model.
    """

    def __init__(self, model: Any, saved: Saved, rank: int, size: int):
        self._model, self._saved, self._manifest = model, saved, saved.manifest
        self._rank, self._size, self._ranks = rank, size, int(saved.manifest["ranks"])
        self._remarks: list[str] = []
        self._variables = self._values()
        self._adapters = self._states()
        mine = self._mine()
        self._random, self._pass = dict(mine.part("random.")), dict(mine.part("pass."))
        metrics = mine.part("metrics.") if size == self._ranks else {}
        self._metrics = [metrics[str(i)] for i in range(len(metrics))]

    def apply(self, folder: Folder, place: str) -> Restored:
        """Have the model go on from it. Collective, on ranks that have all read theirs.

        Args:
            folder: tells the others of what goes wrong.
            place: what is done, for people.

        Raises:
            ConfigError, ReplicaError: a strategy's state is of something else.
        """
        for remark in self._remarks:
            say(remark)
        for variable, value in self._variables:
            variable.assign(value)
        for adapter, _, weights in self._adapters:
            adapter.reopen(weights)

        def restore_states() -> None:
            for adapter, arrays, _ in self._adapters:
                adapter.load_state_dict(arrays)
            set_random_states(self._random)

        folder.on_all_ranks(place, restore_states, "Give another directory, or the strategy that it was saved with.")
        manifest = self._manifest
        data.go_on(manifest["drawn"])
        position = Position(int(manifest["epoch"]), int(manifest["step"]))
        was = Data(
            random=self._pass, **{name: manifest[name] for name in ("drawn", "skip", "steps", "share", "samples")}
        )
        return Restored(position, was, self._ranks, self._metrics, self._random)

    def _values(self) -> Assignments:
        """Every variable with its value."""
        model, manifest = self._model, self._manifest
        if not model.built:
            raise ConfigError(
                f"{self._saved.path}: expected a model that is built. Give it an Input, or call it on a batch, before "
                "it is restored."
            )
        self._compare("weights", manifest["weights"], model.weights)
        self._build_optimizers()
        state = replicas.optimizer_state_of(model)
        self._compare("optimizer", manifest["optimizer"], state)
        shared = self._saved.shared()
        found = self._accumulated() + self._generators()
        for name, variables in (("weights", model.weights), ("optimizer", state)):
            own = set(manifest["own"][name])
            found += [(v, shared[f"{name}.{i}"]) for i, v in enumerate(variables) if i not in own]
            found += self._of_ranks(name, {i: v for i, v in enumerate(variables) if i in own})
        return [(variable, self._fitting(variable, value)) for variable, value in found]

    def _compare(self, what: str, there: Sequence[str], variables: Sequence[Any]) -> None:
        """Shapes and dtypes decide; names differ from one process to the next."""
        here = [described(v) for v in variables]
        for i, (a, b) in enumerate(zip(there, here, strict=False)):
            if a.split(" ")[0] != b.split(" ")[0]:
                raise ConfigError(f"{self._saved.path}: {what}: expected {a}, got {b} (number {i}). {_OTHER_MODEL}")
        if len(there) != len(here):
            raise ConfigError(
                f"{self._saved.path}: {what}: expected {len(there)} variables, got {len(here)}. {_OTHER_MODEL}"
            )

    def _build_optimizers(self) -> None:
        there, here = self._manifest["optimizers"], optimizers_of(self._model)
        names = [o["class"] for o in there], [type(o).__name__ for o in here]
        if names[0] != names[1]:
            raise ConfigError(f"{self._saved.path}: expected optimizers {names[0]}, got {names[1]}. {_OTHER_MODEL}")
        weights = self._model.weights
        for says, optimizer in zip(there, here, strict=True):
            if says["trains"] is not None and not optimizer.built:
                optimizer.build([weights[i] for i in says["trains"]])

    def _of_ranks(self, name: str, variables: Mapping[int, Any]) -> Assignments:
        """This rank's own values; the mean over the ranks, where their number was another or they are shared now."""
        kinds = [says["kind"] for says in self._manifest["optimizers"]]
        still = rank_local_ids(
            self._model, bool(self._manifest["step"]), now=False, of=lambda i, b: b.state_key == kinds[i]
        )
        if self._size == self._ranks and all(id(v) in still for v in variables.values()):
            mine = self._saved.rank(self._rank)
            return [(v, mine[f"{name}.{i}"]) for i, v in variables.items()]
        files = [self._saved.rank(rank) for rank in range(self._ranks)] if variables else []
        return [(v, _mean([file[f"{name}.{i}"] for file in files], v)) for i, v in variables.items()]

    def _accumulated(self) -> Assignments:
        """Gradients that were half-accumulated."""
        here = accumulated(self._model)
        there = len(self._mine().part("accumulated."))
        if there != len(here):
            raise ConfigError(
                f"{self._saved.path}: expected {there} variables of accumulated gradients, got {len(here)}. Give the "
                "optimizer the gradient_accumulation_steps it was saved with."
            )
        return self._of_ranks("accumulated", dict(enumerate(here)))

    def _generators(self) -> Assignments:
        """States of random generators: this rank's, or those of a rank that was."""
        mine, here = self._mine(), generators(self._model)
        there = len(mine.part("generators."))
        if there != len(here):
            self._remarks.append(
                f"{self._saved.path} holds {there} random generators, the model {len(here)}: they begin anew"
            )
        found = [(v, mine[f"generators.{i}"]) for i, v in enumerate(here)] if there == len(here) else []
        if "generator" in mine:
            found.append((common_generator(make=True).state, mine["generator"]))
        return found

    def _mine(self) -> Arrays:
        return self._saved.rank(self._rank % self._ranks)

    def _fitting(self, variable: Any, value: np.ndarray) -> np.ndarray:
        """The value, if it is one of the variable's dtype and shape."""
        dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
        if value.shape != tuple(variable.shape) or value.dtype != dtype:
            raise CheckpointError(
                f"{self._saved.path}: {variable.path}: expected {described(variable)}, got {value.dtype}"
                f"{list(value.shape)}: its files do not belong together"
            )
        return value

    def _states(self) -> list[tuple[Adapter, dict[str, np.ndarray], list[Any]]]:
        """Each adapter that goes on, with what its strategy remembered and the weights that it exchanged."""
        found, weights = [], self._model.weights
        for i, (says, optimizer) in enumerate(
            zip(self._manifest["optimizers"], optimizers_of(self._model), strict=True)
        ):
            adapter = adapter_of(optimizer)
            if says["strategy"] is None:
                continue
            if adapter is None or adapter.state_key != says["kind"] or says["exchanges"] is None:
                now = "one process trains alone" if adapter is None else f"this is {adapter.strategy!r}"
                self._remarks.append(f"{self._saved.path}: what {says['strategy']} remembered is dropped, since {now}")
                continue
            found.append((adapter, self._state(i, adapter), [weights[k] for k in says["exchanges"]]))
        return found

    def _state(self, i: int, adapter: Adapter) -> dict[str, np.ndarray]:
        prefix = f"strategy.{i}."
        if self._size == self._ranks:
            return dict(self._mine().part(prefix))
        saved = [self._saved.rank(rank).part(prefix) for rank in range(self._ranks)]
        return adapter.merge([dict(arrays) for arrays in saved], self._rank, self._size)


def say(what: str) -> None:
    """Have rank 0 tell people."""
    if join().rank == 0:
        print(f"hvdx: {what}.", file=sys.stderr, flush=True)


def _mean(values: Sequence[np.ndarray], variable: Any) -> np.ndarray:
    """Rank 0's where a mean would be none of the values' kind, such as a loss scale, which is a power of two."""
    if not tf.as_dtype(variable.dtype).is_floating or variable.path.endswith("dynamic_scale"):
        return values[0]
    odd = [v for v in values if v.shape != tuple(variable.shape)]
    if odd:
        return odd[0]  # which is going to be found not to fit
    dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
    return np.mean([v.astype(np.float64) for v in values], axis=0).astype(dtype)
