"""Checkpoints of a training on several workers: what is alike on all of them, and what belongs to each."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras import data, neighbours, replicas
from hvdx.keras.binding import Binding
from hvdx.keras.checkpoint_folder import Arrays, Folder, Saved
from hvdx.keras.lockstep import Lockstep
from hvdx.keras.optimizer import binding_of, optimizers_of, own_ids, own_variables
from hvdx.keras.optimizer_state import innermost, local_variables
from hvdx.strategies import join
from hvdx.version import __version__

Assignments = list[tuple[Any, np.ndarray]]


class Checkpoint(keras.callbacks.Callback):
    """Save a training so that it can go on where it was, and let it go on.

    Beside `Distribute`, anywhere in the list of callbacks. The weights, the optimiser, what each rank keeps for itself
    (momenta, residual, generators of random numbers) and the order of `hvdx.shard` go on to the bit with as many ranks;
    with another number residuals are dealt out anew, and the ranks' momenta become their mean.

    Args:
        directory: for this training alone; all hosts have to see it.
        every: save at the end of every so many epochs.
        keep: how many of the newest stay.
        resume: let `fit` begin with the newest, if there is one.

    Raises:
        ConfigError: a number that is not positive.

    Example:
        >>> import tempfile
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     history = model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=3, verbose=0,
        ...                         callbacks=[Checkpoint(directory)])
        ...     sorted(os.listdir(directory))
        ['epoch-0002', 'epoch-0003']
    """

    def __init__(self, directory: str | os.PathLike[str], every: int = 1, keep: int = 2, resume: bool = True):
        super().__init__()
        for name, value in (("every", every), ("keep", keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"Checkpoint: {name}: expected 1 or more, got {value!r}.")
        self.directory, self.every, self.keep, self.resume = directory, every, keep, resume

    def set_model(self, model: Any) -> None:
        """Keras: called before training. Takes its place behind all that may change weights and learning rates."""
        super().set_model(model)
        found = neighbours.find(self)
        if found is not None:
            others = [c for c in found.callbacks if c is not self]
            if any(isinstance(c, Checkpoint) for c in others):
                raise ConfigError("callbacks: Checkpoint is there twice. One saves all.")
            last = [c for c in others if isinstance(c, Lockstep)]
            # A new list: Keras is iterating over the old one.
            found.callbacks = [*(c for c in others if c not in last), self, *last]

    def on_train_begin(self, logs: Any = None) -> None:
        """Go on where the newest checkpoint was made."""
        if not self.resume:
            _refuse_what_is_there(Folder(self.directory, join()))
            return
        epoch = restore(self.directory, self.model)
        if epoch is not None:
            self.model._initial_epoch = epoch
            _say(f"going on after epoch {epoch}, from {self.directory}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, if it is time."""
        if (epoch + 1) % self.every == 0:
            save(self.directory, self.model, epoch + 1, self.keep)

    def on_train_end(self, logs: Any = None) -> None:
        """The next `fit` begins where it is told to."""
        self.model._initial_epoch = None


def save(directory: str | os.PathLike[str], model: Any, epoch: int, keep: int = 2) -> None:
    """Save a model with its optimisers, and what each rank keeps for itself, in a loop of your own. Collective.

    Args:
        directory: all hosts have to see it.
        model: it holds its optimisers: `model.compile(optimizer)`, or `model.optimizer = optimizer`.
        epoch: how many epochs it was trained.
        keep: how many checkpoints may stay.

    Raises:
        ConfigError: the directory holds later epochs.
        ReplicaError: on all ranks, if one could not write; what was there before still is.
    """
    folder = Folder(directory, join())
    later = [e for e in folder.epochs() if e > epoch]
    if later:
        raise _alike(
            f"save: expected an epoch after {later[-1]}, which {directory} holds, got {epoch}. Restore it before you "
            "train, or give another directory."
        )
    for optimizer in optimizers_of(model):
        binding = binding_of(optimizer)
        if binding is not None:
            binding.before_saving()
    own, groups = (
        own_ids(model),
        {"weights": model.weights, "optimizer": replicas.optimizer_state_of(model)},
    )
    shared: dict[str, np.ndarray] = {}
    mine = _own_arrays(model)
    for name, variables in groups.items():
        shared |= _numbered(name, variables, lambda v: id(v) not in own)
        mine |= _numbered(name, variables, lambda v: id(v) in own)
    folder.write(epoch, _manifest(model, groups, mine), shared, mine, keep)


def restore(directory: str | os.PathLike[str], model: Any) -> int | None:
    """Have a model go on where its newest checkpoint was made, in a loop of your own. Collective.

    Args:
        directory: what `save` was given.
        model: built, and compiled or given its optimisers as it was when it was saved.

    Returns:
        The number of epochs it was trained; None where there is no checkpoint.

    Raises:
        ConfigError: the checkpoint is of another model or optimiser.
        ReplicaError: on all ranks, if one cannot see the directory, or cannot read its part.
    """
    comm = join()
    folder = Folder(directory, comm)
    folder.check()
    epochs = folder.epochs()
    if not epochs:
        return None
    path = folder.at(epochs[-1])
    place, remedy = f"restoring {path.name}", "If it is damaged, remove it, and the one before it is taken."
    saved = folder.together(place, lambda: Saved(path), remedy)
    restoring = _Restoring(model, saved, comm.rank, comm.size)
    values = folder.together(place, restoring.values, remedy)
    for variable, value in values:
        variable.assign(value)
    states = folder.together(place, restoring.states, remedy)

    # Opening an exchange is collective, so all have to have come here; what is saved may be wrong on one rank alone.
    for binding, _, weights in states:
        binding.reopen(weights)

    def restore_all() -> None:
        for binding, arrays, _ in states:
            binding.restore(arrays)

    folder.together(place, restore_all, remedy)
    data.go_on(saved.manifest["drawn"])
    return int(saved.manifest["epoch"])


# -- what is saved ----------------------------------------------------------------------------------------------------


def _manifest(model: Any, groups: Mapping[str, Sequence[Any]], mine: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What a checkpoint says of itself, apart from the arrays; for people as well."""
    return {
        "hvdx": __version__,
        "drawn": data.state()[0],
        **{name: [_described(v) for v in variables] for name, variables in groups.items()},
        # Of which every rank has its own.
        "own": {name: [i for i in range(len(vs)) if f"{name}.{i}" in mine] for name, vs in groups.items()},
        "optimizers": [
            _optimizer_manifest(optimizer, model, any(name.startswith(f"strategy.{i}.") for name in mine))
            for i, optimizer in enumerate(optimizers_of(model))
        ],
    }


def _optimizer_manifest(optimizer: Any, model: Any, remembers: bool) -> dict[str, Any]:
    binding, trained = binding_of(optimizer), innermost(optimizer)._trainable_variables
    says: dict[str, Any] = {
        "class": type(optimizer).__name__,
        "trains": _positions(trained, model) if optimizer.built else None,
        "kind": None if binding is None else binding.kind,
        "strategy": None,
    }
    if binding is not None and remembers:
        says |= {"strategy": repr(binding.strategy), "exchanges": _positions(binding.exchanged, model)}
    return says


def _own_arrays(model: Any) -> dict[str, np.ndarray]:
    """What belongs to this rank, but for the private state of its optimisers."""
    own = _numbered("generators", _generators(model)) | _numbered("accumulated", _accumulated(model))
    common = _common_generator()
    if common is not None:
        own["generator"] = _array(common.state)
    for i, optimizer in enumerate(optimizers_of(model)):
        binding = binding_of(optimizer)
        if binding is not None:
            own |= {f"strategy.{i}.{name}": array for name, array in binding.arrays().items()}
    return own


# -- what is restored -------------------------------------------------------------------------------------------------


class _Restoring:
    """One rank's way from a checkpoint to a model; it exchanges nothing.

    Args:
        model: what is to go on.
        saved: the checkpoint.
        rank, size: this rank, and the number of ranks now.
    """

    def __init__(self, model: Any, saved: Saved, rank: int, size: int):
        self._model, self._saved, self._manifest = model, saved, saved.manifest
        self._rank, self._size, self._ranks = rank, size, int(saved.manifest["ranks"])

    def values(self) -> Assignments:
        """Every variable with its value, all read and checked before the first is assigned."""
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
        here = [_described(v) for v in variables]
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
        still = {id(v) for v in _accumulated(self._model)}
        for says, optimizer in zip(self._manifest["optimizers"], optimizers_of(self._model), strict=True):
            binding = binding_of(optimizer)
            if binding is not None and binding.kind == says["kind"]:
                still |= {id(v) for v in own_variables(optimizer, now=False)}
        if self._size == self._ranks and all(id(v) in still for v in variables.values()):
            mine = self._saved.rank(self._rank)
            return [(v, mine[f"{name}.{i}"]) for i, v in variables.items()]
        files = [self._saved.rank(rank) for rank in range(self._ranks)] if variables else []
        return [(v, _mean([file[f"{name}.{i}"] for file in files], v)) for i, v in variables.items()]

    def _accumulated(self) -> Assignments:
        """Gradients that were half-accumulated."""
        here = _accumulated(self._model)
        there = len(self._mine().part("accumulated."))
        if there != len(here):
            raise ConfigError(
                f"{self._saved.path}: expected {there} variables of accumulated gradients, got {len(here)}. Give the "
                "optimizer the gradient_accumulation_steps it was saved with."
            )
        return self._of_ranks("accumulated", dict(enumerate(here)))

    def _generators(self) -> Assignments:
        """States of random generators: this rank's, or those of a rank that was."""
        mine, here = self._mine(), _generators(self._model)
        there = len(mine.part("generators."))
        if there != len(here) and self._rank == 0:
            _say(f"{self._saved.path} holds {there} random generators, the model {len(here)}: they begin anew")
        found = [(v, mine[f"generators.{i}"]) for i, v in enumerate(here)] if there == len(here) else []
        if "generator" in mine:
            found.append((_common_generator(make=True).state, mine["generator"]))
        return found

    def _mine(self) -> Arrays:
        return self._saved.rank(self._rank % self._ranks)

    def _fitting(self, variable: Any, value: np.ndarray) -> np.ndarray:
        """The value in the variable's dtype: NumPy does not know all names of those it can save."""
        dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
        if value.dtype.kind == "V" and value.dtype.itemsize == np.dtype(dtype).itemsize:
            value = value.view(dtype)
        if value.shape != tuple(variable.shape) or value.dtype != dtype:
            raise ReplicaError(
                f"{self._saved.path}: {variable.path}: expected {_described(variable)}, got {value.dtype}"
                f"{list(value.shape)}: its files do not belong together"
            )
        return value

    def states(self) -> list[tuple[Binding, dict[str, np.ndarray], list[Any]]]:
        """Each binding that goes on, with what its strategy remembered and the weights that it exchanged."""
        found, weights = [], self._model.weights
        for i, (says, optimizer) in enumerate(
            zip(self._manifest["optimizers"], optimizers_of(self._model), strict=True)
        ):
            binding = binding_of(optimizer)
            if says["strategy"] is None:
                continue
            if binding is None or binding.kind != says["kind"] or says["exchanges"] is None:
                now = "one process trains alone" if binding is None else f"this is {binding.strategy!r}"
                _say(f"{self._saved.path}: what {says['strategy']} remembered is dropped, since {now}")
                continue
            found.append((binding, self._state(i, binding), [weights[k] for k in says["exchanges"]]))
        return found

    def _state(self, i: int, binding: Binding) -> dict[str, np.ndarray]:
        prefix = f"strategy.{i}."
        if self._size == self._ranks:
            return dict(self._mine().part(prefix))
        saved = [self._saved.rank(rank).part(prefix) for rank in range(self._ranks)]
        return binding.merge(saved, self._rank, self._size)


_OTHER_MODEL = "It is of another model: give another directory, or the model that was saved."


def _refuse_what_is_there(folder: Folder) -> None:
    """Checkpoints of two trainings in one directory would be taken for each other."""
    folder.check()
    epochs = folder.epochs()
    if epochs:
        raise _alike(
            f"Checkpoint: resume=False: expected a directory without checkpoints, got {folder.at(epochs[-1])}. Remove "
            "them, or give another directory."
        )


def _alike(message: str) -> ConfigError:
    """An error that all ranks find."""
    error = ConfigError(message)
    error.collective = True
    return error


# -- variables --------------------------------------------------------------------------------------------------------


def _numbered(name: str, variables: Sequence[Any], which: Callable[[Any], bool] = lambda v: True) -> dict[str, Any]:
    return {f"{name}.{i}": _array(v) for i, v in enumerate(variables) if which(v)}


def _array(variable: Any) -> np.ndarray:
    array = np.asarray(tf.convert_to_tensor(variable).numpy())
    if array.dtype == object:
        raise ConfigError(f"variable {variable.path}: expected numbers, got {variable.dtype}, which is not saved.")
    return array


def _described(variable: Any) -> str:
    extents = "x".join(str(extent) for extent in variable.shape)
    return f"{tf.as_dtype(variable.dtype).name}[{extents}] {getattr(variable, 'path', variable.name)}"


def _positions(variables: Sequence[Any], model: Any) -> list[int] | None:
    """Where a model holds some weights; None if it does not hold them all."""
    places = {id(v): i for i, v in enumerate(model.weights)}
    found = [places.get(id(v)) for v in variables]
    return None if None in found else found  # type: ignore[return-value]


def _accumulated(model: Any) -> list[Any]:
    return [v for optimizer in optimizers_of(model) for v in local_variables(optimizer)]


def _generators(model: Any) -> list[Any]:
    """States of the random generators that layers hold."""
    found = [g.state for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", ())]
    return list({id(state): state for state in found}.values())


def _common_generator(make: bool = False) -> Any:
    """The generator behind `keras.random` where no seed is given; None before it was used, unless it is to be made."""
    # Keras has no public way to it.
    module = importlib.import_module("keras.src.random.seed_generator")
    held = importlib.import_module("keras.src.backend.common.global_state")
    return module.global_seed_generator() if make else held.get_global_attribute(module.GLOBAL_SEED_GENERATOR)


def _mean(values: Sequence[np.ndarray], variable: Any) -> np.ndarray:
    """Rank 0's where a mean would be none of the values' kind, such as a loss scale, which is a power of two."""
    if not tf.as_dtype(variable.dtype).is_floating or variable.path.endswith("dynamic_scale"):
        return values[0]
    odd = [v for v in values if v.shape != tuple(variable.shape)]
    if odd:
        return odd[0]  # which is going to be found not to fit
    dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
    values = [v.view(dtype) if v.dtype.kind == "V" else v for v in values]
    return np.mean([v.astype(np.float64) for v in values], axis=0).astype(dtype)


def _say(what: str) -> None:
    if join().rank == 0:
        print(f"hvdx: {what}.", file=sys.stderr, flush=True)
