"""Parts of weights that are split over the ranks of a group, and of the optimiser's state for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import keras
import numpy as np

from hvdx.comm import Comm
from hvdx.comm.interfaces import Channel
from hvdx.comm.mesh import Mesh
from hvdx.errors import ConfigError
from hvdx.keras.backend import tf
from hvdx.keras.optimizer_state import accumulated_gradients, innermost, slots
from hvdx.keras.seams.optimizers import averages_of, slot_prefix, trained_variables
from hvdx.keras.types import Variable
from hvdx.keras.variables import view_of

if TYPE_CHECKING:
    from hvdx.comm.split_tensors import SplitTensors

T = TypeVar("T", "tf.Tensor", np.ndarray)
_ATTRIBUTE = "_hvdx_part"
# These optimisers compute norms or statistics of whole weights.
_NEED_WHOLE_WEIGHTS = ("Adafactor", "Lamb", "Muon")
_tensors: weakref.WeakKeyDictionary[Channel, SplitTensors] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class WeightPart:
    """Part of a weight that this rank holds.

    Attributes:
        shape: shape of the whole weight.
        axis: axis along which the weight is split.
        bounds: bounds of the parts along the axis: part i is [bounds[i], bounds[i + 1]).
        position: number of this rank's part.

    Example:
        >>> part = WeightPart((2, 4), 1, (0, 2, 4), 1)
        >>> part.part_shape, part.cut(np.arange(8).reshape(2, 4)).tolist()
        ((2, 2), [[2, 3], [6, 7]])
    """

    shape: tuple[int, ...]
    axis: int
    bounds: tuple[int, ...]
    position: int

    @property
    def begin(self) -> int:
        """First index of this rank's part."""
        return self.bounds[self.position]

    @property
    def end(self) -> int:
        """First index after this rank's part."""
        return self.bounds[self.position + 1]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return (*self.shape[: self.axis], self.end - self.begin, *self.shape[self.axis + 1 :])

    def cut(self, whole: T) -> T:
        """Return this rank's part of an array or tensor of the whole shape."""
        return whole[(slice(None),) * self.axis + (slice(self.begin, self.end),)]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the whole array of the parts of all positions."""
        return np.concatenate(parts, axis=self.axis)


def tensors_of(mesh: Mesh) -> SplitTensors:
    """Return the collectives of a mesh's group."""
    if mesh.channel not in _tensors:
        from hvdx.comm.split_tensors import SplitTensors

        _tensors[mesh.channel] = SplitTensors(mesh.channel)
    return _tensors[mesh.channel]


def mark(variable: Variable, part: WeightPart) -> None:
    """Register a Keras variable as a part of a whole one."""
    setattr(variable, _ATTRIBUTE, part)


def part_of(variable: Variable) -> WeightPart | None:
    """Return the part that a variable holds; None for a whole variable."""
    found: WeightPart | None = getattr(variable, _ATTRIBUTE, None)
    return found


def has_parts(model: keras.Model) -> bool:
    """Return whether a model has split layers."""
    return any(part_of(v) is not None for v in model.weights)


def mark_state(optimizer: keras.optimizers.Optimizer) -> None:
    """Register the state that an optimiser keeps for parts; it is split in the same way.

    Args:
        optimizer: Keras optimiser; nothing is done if it is not built, or trains no part.

    Raises:
        ConfigError: if the optimiser needs norms or statistics of whole weights.
    """
    inner = innermost(optimizer)
    trained = trained_variables(inner) if inner.built else []
    parts = [(i, v, part_of(v)) for i, v in enumerate(trained) if part_of(v) is not None]
    if not parts:
        return
    if any(cls.__name__ in _NEED_WHOLE_WEIGHTS for cls in type(inner).__mro__):
        raise ConfigError(
            f"optimizer {type(inner).__name__}: it needs norms or statistics of whole weights, and split layers hold "
            "parts. Use another optimizer, such as Adam or SGD, or keras.layers.Dense in place of SplitDense."
        )
    by_name = {slot_prefix(v): part for _, v, part in parts}
    for slot in slots(inner):
        prefix = max((p for p in by_name if slot.name.startswith(p)), key=len, default=None)
        if prefix is not None and tuple(slot.shape) == by_name[prefix].part_shape:  # type: ignore[union-attr]
            mark(slot, by_name[prefix])  # type: ignore[arg-type]
    averages = averages_of(inner)
    for i, variable, part in parts:
        for parallel in (averages, accumulated_gradients(inner)):
            other = parallel[i] if i < len(parallel) else None
            if other is not None and tuple(other.shape) == tuple(variable.shape):
                mark(other, part)  # type: ignore[arg-type]


def by_ranks(variables: Sequence[Variable], comm: Comm) -> Iterator[tuple[Comm, list[Variable]]]:
    """Yield the ranks that hold the same values of variables, with these variables.

    Args:
        variables: Keras variables.
        comm: all ranks. They share the whole variables; the peers of this rank share its parts, which are left out
            if there are no other peers.
    """
    yield comm, [v for v in variables if part_of(v) is None]
    parts = [v for v in variables if part_of(v) is not None]
    if parts and comm.mesh is not None and comm.mesh.peers.size > 1:
        yield comm.mesh.peers, parts


def whole_shape(variable: Variable) -> tuple[int, ...]:
    """Return the shape of the whole variable."""
    part = part_of(variable)
    return tuple(variable.shape) if part is None else part.shape


def whole_values(variables: Sequence[Variable], group: Comm) -> list[np.ndarray]:
    """Gather the whole values of variables. Collective over the group.

    Args:
        variables: Keras variables, the same on all ranks of the group.
        group: communicator of the group.
    """
    values = []
    for variable in variables:
        value, part = view_of(variable), part_of(variable)
        if part is not None:
            value = part.join(group.all_gather_object(value, "parts of a split layer"))
        values.append(np.array(value))
    return values
