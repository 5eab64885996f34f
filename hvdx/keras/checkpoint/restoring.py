"""Restoring of a model from a checkpoint."""

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import keras
import numpy as np

from hvdx.comm import Comm, supervision
from hvdx.errors import CheckpointError, ConfigError, HvdxError, ReplicaError
from hvdx.keras.adapters.base import Adapter
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.adapters.rank_local import accumulated, declared, rank_local_ids
from hvdx.keras.checkpoint.contents import (
    Data,
    Manifest,
    described,
    division,
    set_random_states,
    snapshot,
    value_of,
    variables_of,
)
from hvdx.keras.checkpoint.files import Arrays, ArraysInMemory
from hvdx.keras.checkpoint.folder import Folder, Position, Saved
from hvdx.keras.checkpoint.parts import PREFIX, Division
from hvdx.keras.fit import data, noise, replicas
from hvdx.keras.fit.attachment import Attachment
from hvdx.keras.joining import join
from hvdx.keras.seams.models import common_generator
from hvdx.keras.types import Variable
from hvdx.keras.variables import dtype_of, is_float
from hvdx.keras.weight_parts import part_of, whole_shape
from hvdx.log import Log

T = TypeVar("T")

_log = Log(__name__)


class _Received:
    """State that a rank has received; the same as `Saved` for a checkpoint of one rank."""

    path = Path("the state of another rank")

    def __init__(self, manifest: Manifest, shared: Mapping[str, np.ndarray], mine: dict[str, np.ndarray]):
        self.manifest, self._shared, self._mine = manifest, shared, ArraysInMemory(mine)

    def shared(self) -> Mapping[str, np.ndarray]:
        return self._shared

    def rank(self, rank: int) -> ArraysInMemory:
        return self._mine


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


def give_state(model: keras.Model, comm: Comm, attachment: Attachment, is_new: bool) -> None:
    """Give ranks that have joined what a checkpoint of the first rank would restore. Collective.

    Their residuals are zero. All ranks open their exchanges anew, as after a restart.
    """

    def content() -> tuple[Manifest, dict[str, np.ndarray], list[str]]:
        found = snapshot(model, comm, Data(data.state()[0]))
        mine = {name: value_of(value) for name, value in found.mine.items()}
        return found.manifest | {"ranks": 1, "epoch": 0, "step": 0}, mine, list(found.shared)

    manifest, mine, names = first(comm, content, is_new)
    # One by one: they may be large.
    shared = {name: first(comm, functools.partial(_value, model, name), is_new) for name in names}
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
    return value_of(variables_of(model)[group][int(index)])


Assignments = list[tuple[Variable, np.ndarray]]

_OTHER_MODEL = "The checkpoint is of another model: give another directory, or the model that was saved."


@dataclass(frozen=True)
class Restored:
    """State from which a training resumes.

    Attributes:
        position: position in the training.
        data: position in the data.
        ranks: number of ranks that saved the checkpoint.
        metrics: values of the metrics' variables in mid-epoch; empty between two epochs.
        random: result of `random_states` when the checkpoint was made.
    """

    position: Position
    data: Data
    ranks: int
    metrics: list[np.ndarray]
    random: dict[str, np.ndarray]


def restore(directory: str | os.PathLike[str], model: keras.Model) -> int | None:
    """Restore a model from its newest checkpoint, for a training loop of your own. Collective.

    Args:
        directory: directory of `save`.
        model: built model with optimisers of the saved classes: `model.compile(optimizer)`, or `model.optimizer =
            optimizer`.

    Returns:
        Number of epochs that the model was trained, or None without a checkpoint.

    Raises:
        ConfigError: if the checkpoint is of another model or optimiser.
        ReplicaError: on all ranks, if one cannot see the directory, or if all checkpoints are damaged.
    """
    folder = Folder(os.fspath(directory), join())
    folder.check_to_read()
    restored = restore_newest(folder, model)
    return None if restored is None else restored.position.epoch


def restore_newest(folder: Folder, model: keras.Model) -> Restored | None:
    """Restore a model from the newest intact checkpoint, and set newer, damaged ones aside. Collective.

    Args:
        folder: folder of the checkpoints.
        model: as for `restore`.

    Returns:
        The restored state, or None without a checkpoint.

    Raises:
        ConfigError: if the checkpoint is of another model or optimiser; on all ranks, if this job has been started
            again, and the checkpoints that it has saved are gone.
        ReplicaError: on all ranks, if all checkpoints are damaged, or if reading fails on some ranks.
    """
    positions = folder.positions()
    for position in reversed(positions):
        restored = _restore_or_set_aside(folder, position, model)
        if restored is not None:
            return restored
    if positions:
        raise ReplicaError(
            f"{folder.path}: all checkpoints are damaged: {', '.join(map(str, positions))}. They were set aside as "
            "damaged-...; start again to train from the beginning."
        )
    if supervision.has_saved(folder.path):
        raise ConfigError.on_all_ranks(
            f"{folder.path}: expected the checkpoints that this job has saved before its restart, got none. Do: bring "
            "the folder back; or begin anew: hvdx run --checkpoint-lost restart"
        )
    return None


def _restore_or_set_aside(folder: Folder, position: Position, model: keras.Model) -> Restored | None:
    """Restore a checkpoint, or set it aside and return None if it is damaged. Collective."""
    comm, path, place = folder.comm, folder.at(position), f"restoring {position}"
    reading, problem, failed = folder.attempt(place, lambda: LoadedCheckpoint(model, Saved(path), comm.rank, comm.size))
    if reading is not None and not failed:
        return reading.apply(folder, place)
    if not all(failure.damaged for failure in failed.values()):
        folder.fail(place, problem, failed, "Nothing was changed.")
    listed = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in failed.items())
    if comm.rank == 0:
        _log.warning(f"{path}: {listed}. It is set aside, and the checkpoint before it is used.")

    def set_aside() -> None:
        if comm.rank == 0:
            folder.set_aside(position)

    folder.on_all_ranks(place, set_aside, "Remove it.")
    return None


class Source(Protocol):
    """A checkpoint in a folder (`Saved`) or in memory."""

    path: Path
    manifest: Manifest

    def shared(self) -> Mapping[str, np.ndarray]:
        """Return the shared arrays."""

    def rank(self, rank: int) -> Arrays | ArraysInMemory:
        """Return the arrays of one rank."""


class LoadedCheckpoint:
    """State of one rank, read from a checkpoint and checked before any of it is assigned.

    The constructor exchanges nothing with other ranks.

    Args:
        model: model to restore.
        saved: checkpoint to read.
        rank, size: this rank, and the number of ranks in this job.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        ConfigError: if it is of another model.
    """

    def __init__(self, model: keras.Model, saved: Source, rank: int, size: int):
        self._model, self._saved, self._manifest = model, saved, saved.manifest
        self._rank, self._size, self._saved_size = rank, size, int(saved.manifest["ranks"])
        self._remarks: list[str] = []
        self._division = Division.from_manifest(self._manifest.get("split", {}))
        self._variables = self._assignments()
        self._adapters = self._states()
        mine = self._rank_file()
        self._random, self._pass = dict(mine.part("random.")), dict(mine.part("pass."))
        metrics: Mapping[str, np.ndarray] = mine.part("metrics.") if size == self._saved_size else {}
        self._metrics = [metrics[str(i)] for i in range(len(metrics))]

    def apply(self, folder: Folder, place: str) -> Restored:
        """Assign the state to the model. Collective; every rank must have read its state.

        Args:
            folder: folder of the checkpoint, which gathers failures.
            place: name of the work for messages.

        Raises:
            ConfigError, ReplicaError: if the saved state of a strategy does not fit the strategy.
        """
        for remark in self._remarks:
            if folder.comm.rank == 0:
                _log.warning(f"{remark}.")
        self.assign()
        self.reopen()
        folder.on_all_ranks(
            place, self.restore_states, "Give another directory, or the strategy that it was saved with."
        )
        manifest = self._manifest
        data.set_orders(manifest["drawn"])
        histories = manifest.get("divisions", [])
        for of_share, history in zip(reversed(data.divisions()), reversed(histories), strict=False):
            of_share.resume(history)
        position = Position(int(manifest["epoch"]), int(manifest["step"]))
        saved_data = Data(
            random=self._pass, **{name: manifest[name] for name in ("drawn", "skip", "steps", "share", "samples")}
        )
        return Restored(position, saved_data, self._saved_size, self._metrics, self._random)

    def assign(self) -> None:
        """Assign the variables."""
        for variable, value in self._variables:
            variable.assign(value)

    def reopen(self) -> None:
        """Open the exchanges anew. Collective."""
        for adapter, _, weights in self._adapters:
            adapter.reopen(weights)

    def restore_states(self) -> None:
        """Restore the states of the strategies, and of the global generators of random numbers."""
        for adapter, arrays, _ in self._adapters:
            adapter.load_state_dict(arrays)
        set_random_states(self._random)

    def _assignments(self) -> Assignments:
        """Pair every variable with its saved value."""
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
        lists = {"weights": model.weights, "optimizer": state}
        present = division(model, lists, join())
        # True if each rank has the parts that the rank of the same number saved, or no variable is split.
        self._same_parts = present == self._division
        self._is_split = bool(present.parts or self._division.parts)
        found = self._accumulated() + self._generators()
        for name, variables in lists.items():
            own = set(manifest["own"][name])
            found += [(v, self._shared_value(f"{name}.{i}", v)) for i, v in enumerate(variables) if i not in own]
            found += self._rank_local_values(name, {i: v for i, v in enumerate(variables) if i in own})
        return [(variable, self._checked(variable, value)) for variable, value in found]

    def _shared_value(self, name: str, variable: Variable) -> np.ndarray:
        """Return the saved value of a variable, or this rank's part of it."""

        def read(position: int) -> np.ndarray:
            if name not in self._division.parts:
                return self._saved.shared()[name]
            return self._saved.rank(self._division.groups[0][position])[f"{PREFIX}{name}"]

        return self._division.assemble(name, whole_shape(variable), part_of(variable), read)

    def _compare(self, group: str, saved: Sequence[str], variables: Sequence[Variable]) -> None:
        """Compare shapes and dtypes with the manifest; names are not compared, since they differ between processes."""
        present = [described(v) for v in variables]
        for i, (a, b) in enumerate(zip(saved, present, strict=False)):
            if _kind(a) != _kind(b):
                raise ConfigError(f"{self._saved.path}: {group}: expected {a}, got {b} (number {i}). {_OTHER_MODEL}")
        if len(saved) != len(present):
            raise ConfigError(
                f"{self._saved.path}: {group}: expected {len(saved)} variables, got {len(present)}. {_OTHER_MODEL}"
            )

    def _build_optimizers(self) -> None:
        saved, present = self._manifest["optimizers"], optimizers_of(self._model)
        names = [o["class"] for o in saved], [type(o).__name__ for o in present]
        if names[0] != names[1]:
            raise ConfigError(f"{self._saved.path}: expected optimizers {names[0]}, got {names[1]}. {_OTHER_MODEL}")
        weights = self._model.weights
        for entry, optimizer in zip(saved, present, strict=True):
            if entry["trains"] is not None and not optimizer.built:
                optimizer.build([weights[i] for i in entry["trains"]])

    def _rank_local_values(self, name: str, variables: Mapping[int, Variable]) -> Assignments:
        """Pair rank-local variables with their saved values.

        If the number of ranks or the parts have changed, or if the variables are shared now, the values are means over
        the ranks. Weights that `Distribute(local=...)` names have no mean: if n ranks saved, rank r reads those of rank
        r mod n.
        """
        kept = {id(v) for v in declared(self._model)[0]}
        ours = [(v, self._rank_file()[f"{name}.{i}"]) for i, v in variables.items() if id(v) in kept]
        return ours + self._combined_values(name, {i: v for i, v in variables.items() if id(v) not in kept})

    def _combined_values(self, name: str, variables: Mapping[int, Variable]) -> Assignments:
        kinds = [entry["kind"] for entry in self._manifest["optimizers"]]
        still = rank_local_ids(
            self._model, bool(self._manifest["step"]), now=False, of=lambda i, b: b.state_key == kinds[i]
        )
        if self._size == self._saved_size and self._same_parts and all(id(v) in still for v in variables.values()):
            mine = self._saved.rank(self._rank)
            return [(v, mine[f"{name}.{i}"]) for i, v in variables.items()]
        return [(v, self._mean(f"{name}.{i}", v)) for i, v in variables.items()]

    def _mean(self, name: str, variable: Variable) -> np.ndarray:
        """Return the mean of a rank-local variable over the ranks that saved the same part of it.

        For non-floating-point variables, and for a loss scale (a power of two), it is the value of the first of them.
        """
        holders = self._division.holders(name, self._saved_size)
        first_counts = not is_float(variable) or variable.path.endswith("dynamic_scale")

        def read(position: int) -> np.ndarray:
            values = [self._saved.rank(rank)[name] for rank in holders[position]]
            if first_counts:
                return values[0]
            if any(v.shape != values[0].shape for v in values):
                raise CheckpointError(f"{name}: its files are from different checkpoints")
            return np.mean([v.astype(np.float64) for v in values], axis=0).astype(dtype_of(variable.dtype))

        return self._division.assemble(name, whole_shape(variable), part_of(variable), read)

    def _accumulated(self) -> Assignments:
        """Pair the variables of half-accumulated gradients with their saved values."""
        present = accumulated(self._model)
        saved = len(self._rank_file().part("accumulated."))
        if saved != len(present):
            raise ConfigError(
                f"{self._saved.path}: expected {saved} variables of accumulated gradients, got {len(present)}. Give "
                "the optimizer the gradient_accumulation_steps it was saved with."
            )
        return self._rank_local_values("accumulated", dict(enumerate(present)))

    def _generators(self) -> Assignments:
        """Pair the states of random generators with their saved values."""
        mine, present = self._rank_file(), noise.generators(self._model)
        saved = len(mine.part("generators."))
        if saved != len(present):
            self._remarks.append(
                f"{self._saved.path} holds {saved} random generators, the model {len(present)}: they are not restored"
            )
        found = [(v, mine[f"generators.{i}"]) for i, v in enumerate(present)] if saved == len(present) else []
        common = [(common_generator(make=True).state, mine["generator"])] if "generator" in mine else []
        if self._size != self._saved_size:
            # Two ranks may have read the file of one rank.
            found = [(v, noise.of_rank(value, self._rank)) for v, value in found]
            common = [(v, noise.common_of_rank(value, self._rank)) for v, value in common]
        alike = [(v, value) for v, value in found + common if value.dtype == dtype_of(v.dtype)]
        if len(alike) < len(found + common):
            # JAX has unsigned seeds, PyTorch signed ones, TensorFlow ones of 64 bits.
            self._remarks.append(
                f"{self._saved.path} holds random generators of another backend of Keras: they are not restored"
            )
        return alike

    def _rank_file(self) -> Arrays | ArraysInMemory:
        """Return the saved arrays of this rank. If n ranks saved, rank r reads those of rank r mod n."""
        return self._saved.rank(self._rank % self._saved_size)

    def _checked(self, variable: Variable, value: np.ndarray) -> np.ndarray:
        """Return the value if it has the dtype and shape of the variable."""
        dtype = dtype_of(variable.dtype)
        if not value.shape and value.dtype.kind == dtype.kind == "i":
            return value.astype(dtype)  # a counter; see `_kind`
        if value.shape != tuple(variable.shape) or value.dtype != dtype:
            raise CheckpointError(
                f"{self._saved.path}: {variable.path}: expected {described(variable)}, got {value.dtype}"
                f"{list(value.shape)}: its files are from different checkpoints"
            )
        return value

    def _states(self) -> list[tuple[Adapter, dict[str, np.ndarray], list[Variable]]]:
        """Return each adapter to restore, with the saved state of its strategy and the weights that it exchanges."""
        found, weights = [], self._model.weights
        for i, (entry, optimizer) in enumerate(
            zip(self._manifest["optimizers"], optimizers_of(self._model), strict=True)
        ):
            adapter = adapter_of(optimizer)
            if entry["strategy"] is None:
                continue
            if adapter is None or adapter.state_key != entry["kind"] or entry["exchanges"] is None:
                now = "one process trains alone" if adapter is None else f"the strategy is {adapter.strategy!r}"
                self._remarks.append(f"{self._saved.path}: the state of {entry['strategy']} is dropped, since {now}")
                continue
            if self._is_split and not (self._same_parts and self._size == self._saved_size):
                self._remarks.append(
                    f"{self._saved.path}: the state of {entry['strategy']} is dropped, since the model is split over "
                    "other ranks now"
                )
                continue
            found.append((adapter, self._state(i, adapter), [weights[k] for k in entry["exchanges"]]))
        return found

    def _state(self, i: int, adapter: Adapter) -> dict[str, np.ndarray]:
        prefix = f"strategy.{i}."
        if self._size == self._saved_size:
            return dict(self._rank_file().part(prefix))
        saved = [self._saved.rank(rank).part(prefix) for rank in range(self._saved_size)]
        return adapter.merge([dict(arrays) for arrays in saved], self._rank, self._size)


def _kind(text: str) -> str:
    """Return dtype and shape of a variable that `described` has described; counters have 32 or 64 bits, by the backend.

    Example:
        >>> _kind("float32[6x8] dense/kernel"), _kind("int64[] iteration")
        ('float32[6x8]', 'int[]')
    """
    return re.sub(r"^int(32|64)\[\]$", "int[]", text.partition(" ")[0])
