"""Contents of a checkpoint: the shared variables of a model, and the state of each rank."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from hvdx.comm import Comm
from hvdx.comm.mesh import mesh_of
from hvdx.errors import ConfigError
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.adapters.rank_local import accumulated, rank_local_ids
from hvdx.keras.checkpoint.parts import PREFIX, Division
from hvdx.keras.fit import replicas
from hvdx.keras.fit.noise import generators
from hvdx.keras.optimizer_state import innermost
from hvdx.keras.seams.models import common_generator
from hvdx.keras.seams.optimizers import trained_variables
from hvdx.keras.types import Variable
from hvdx.keras.variables import dtype_of, view_of
from hvdx.keras.weight_parts import part_of, whole_shape
from hvdx.version import __version__

# In JSON types.
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Data:
    """Position of a training in its data.

    Attributes:
        drawn: for each share of arrays that `hvdx.shard` shuffles, the number of an order. A training that resumes
            draws the order after this one.
        skip: number of batches of that next order that were trained.
        steps: number of steps in an epoch, or None if unknown.
        share: index of the share that is trained on, counted from the newest (-1, -2, ...), or None if unknown.
        samples: number of samples in a step of all ranks together, or None if the share is unknown.
        random: result of `random_states` when the pass through the data began.
        divisions: `Division.history` of each share whose rows may be divided unevenly, the newest last.
    """

    drawn: Sequence[int]
    skip: int = 0
    steps: int | None = None
    share: int | None = None
    samples: int | None = None
    random: Mapping[str, np.ndarray] = field(default_factory=dict)
    divisions: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]] = ()


@dataclass(frozen=True)
class Snapshot:
    """Contents of a checkpoint that this rank writes.

    Attributes:
        manifest: description of the checkpoint and its arrays, in JSON types.
        shared: variables with the same values on all ranks; empty on other ranks than 0.
        mine: the rank-local state.
        parts: parts of split layers; empty outside the first group.

    Training changes all of them: they are written, or copied, before it continues.
    """

    manifest: Manifest
    shared: dict[str, Variable | np.ndarray]
    mine: dict[str, Variable | np.ndarray]
    parts: dict[str, Variable | np.ndarray] = field(default_factory=dict)

    @property
    def own(self) -> dict[str, Variable | np.ndarray]:
        """The contents of this rank's file, by name."""
        return self.mine | self.parts


def snapshot(model: keras.Model, comm: Comm, data: Data, within_epoch: bool = False) -> Snapshot:
    """Collect the contents of a checkpoint.

    Args:
        model: model with its optimisers, whose adapters have no update in flight.
        comm: the ranks.
        data: position in the data.
        within_epoch: whether the checkpoint is made in mid-epoch. The metrics of the epoch are then saved too.
            Non-trainable weights are then saved for each rank, since they are averaged only at the end of an epoch.
    """
    own = rank_local_ids(model, within_epoch)
    groups = variables_of(model)
    shared: dict[str, Variable | np.ndarray] = {}
    parts: dict[str, Variable | np.ndarray] = {}
    mine = _own_state(model)
    if within_epoch:
        mine |= _numbered("metrics", model.metrics_variables)
    mine |= {f"pass.{name}": array for name, array in data.random.items()}
    for name, variables in groups.items():
        for i, variable in enumerate(variables):
            if id(variable) in own:
                mine[f"{name}.{i}"] = variable
            elif part_of(variable) is None and comm.rank == 0:
                shared[f"{name}.{i}"] = variable
            elif part_of(variable) is not None and mesh_of(comm).index == 0:
                parts[f"{PREFIX}{name}.{i}"] = variable
    return Snapshot(_manifest(model, groups, mine, data, comm), shared, mine, parts)


def variables_of(model: keras.Model) -> dict[str, Sequence[Variable]]:
    """Return the lists of variables in a checkpoint, by their names there."""
    return {"weights": model.weights, "optimizer": replicas.optimizer_state_of(model)}


def division(model: keras.Model, groups: Mapping[str, Sequence[Variable]], comm: Comm) -> Division:
    """Return the division of a model's variables over the ranks.

    Args:
        model: model with its optimisers.
        groups: weights and optimiser variables of the model, by the names of their lists.
        comm: the ranks.
    """
    return Division.of({**groups, "accumulated": accumulated(model)}, comm.mesh)


def _manifest(
    model: keras.Model, groups: Mapping[str, Sequence[Variable]], mine: Collection[str], data: Data, comm: Comm
) -> Manifest:
    return {
        "hvdx": __version__,
        "drawn": list(data.drawn),
        "divisions": list(data.divisions),
        "skip": data.skip,
        "steps": data.steps,
        "share": data.share,
        "samples": data.samples,
        **{name: [described(v) for v in variables] for name, variables in groups.items()},
        # Indices of the rank-local variables.
        "own": {name: [i for i in range(len(vs)) if f"{name}.{i}" in mine] for name, vs in groups.items()},
        "split": division(model, groups, comm).to_manifest(),
        "optimizers": [
            _optimizer_manifest(optimizer, model, any(name.startswith(f"strategy.{i}.") for name in mine))
            for i, optimizer in enumerate(optimizers_of(model))
        ],
    }


def _optimizer_manifest(optimizer: keras.optimizers.Optimizer, model: keras.Model, has_state: bool) -> dict[str, Any]:
    adapter, trained = adapter_of(optimizer), trained_variables(innermost(optimizer))
    entry: dict[str, Any] = {
        "class": type(optimizer).__name__,
        "trains": _positions(trained, model) if optimizer.built else None,
        "kind": None if adapter is None else adapter.state_key,
        "strategy": None,
    }
    if adapter is not None and has_state:
        entry |= {"strategy": repr(adapter.strategy), "exchanges": _positions(adapter.exchanged, model)}
    return entry


def _own_state(model: keras.Model) -> dict[str, Variable | np.ndarray]:
    """Return the rank-local state other than weights and variables of the optimisers."""
    own = _numbered("generators", generators(model)) | _numbered("accumulated", accumulated(model))
    common = common_generator()
    if common is not None:
        own["generator"] = common.state
    own |= {f"random.{name}": array for name, array in random_states().items()}
    for i, optimizer in enumerate(optimizers_of(model)):
        adapter = adapter_of(optimizer)
        if adapter is not None:
            own |= {f"strategy.{i}.{name}": array for name, array in adapter.state_dict().items()}
    return own


# -- variables --------------------------------------------------------------------------------------------------------


def _numbered(name: str, variables: Sequence[Variable]) -> dict[str, Variable | np.ndarray]:
    return {f"{name}.{i}": v for i, v in enumerate(variables)}


def value_of(variable: Variable | np.ndarray) -> np.ndarray:
    """Return a variable's value. It may be a view: copy it before the variable changes.

    Raises:
        ConfigError: if the variable holds no numbers.
    """
    if isinstance(variable, np.ndarray | np.generic):
        return np.asarray(variable)
    array = view_of(variable)
    if array.dtype == object:
        raise ConfigError(f"variable {variable.path}: expected numbers, got {variable.dtype}, which is not saved.")
    return array


def described(variable: Variable) -> str:
    """Describe a whole variable by dtype, shape and name, such as "float32[6x8] dense/kernel"."""
    extents = "x".join(str(extent) for extent in whole_shape(variable))
    return f"{dtype_of(variable.dtype).name}[{extents}] {getattr(variable, 'path', variable.name)}"


def _positions(variables: Sequence[Variable], model: keras.Model) -> list[int] | None:
    """Return the indices of variables among a model's weights; None if one of them is not there."""
    places = {id(v): i for i, v in enumerate(model.weights)}
    found = [places.get(id(v)) for v in variables]
    return None if None in found else found  # type: ignore[return-value]


# -- random numbers ---------------------------------------------------------------------------------------------------


def random_states() -> dict[str, np.ndarray]:
    """Return the states of the global generators of Python and NumPy, which data pipelines use."""
    _, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    states = {
        "python": np.array(words, np.uint64),
        "python.gauss": np.array(np.nan if gauss is None else gauss, np.float64),
    }
    if name == "MT19937":
        states |= {"numpy": np.array(keys), "numpy.rest": np.array(rest, np.float64)}
    return states


def set_random_states(states: Mapping[str, np.ndarray]) -> None:
    """Set the states of the global generators of Python and NumPy.

    Args:
        states: result of `random_states`.
    """
    gauss = float(states["python.gauss"])
    random.setstate((3, tuple(int(word) for word in states["python"]), None if np.isnan(gauss) else gauss))
    if "numpy" in states:
        place, has_gauss, cached = states["numpy.rest"].tolist()
        np.random.set_state(("MT19937", states["numpy"], int(place), int(has_gauss), cached))
