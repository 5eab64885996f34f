"""Parts of split layers in a checkpoint.

The manifest describes whole variables, so it does not depend on the number of ranks that split a layer. The ranks of
the first group save the parts, each in its own file: "part.weights.3" in rank-1.safetensors is the second part of
"weights.3". A rank that restores reads the parts that it needs, and joins and cuts them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdx.comm.mesh import Mesh
from hvdx.errors import CheckpointError
from hvdx.keras.types import Variable
from hvdx.keras.weight_parts import WeightPart, part_of

#: Prefix of the names of parts in the files of the first group.
PREFIX = "part."


@dataclass(frozen=True)
class Division:
    """Division of variables over the ranks of the groups.

    Attributes:
        groups: ranks of each group, each by position; empty if no variable is split.
        parts: axis and bounds of each split variable, by its name, such as "weights.3".

    Example:
        >>> division = Division([[0, 1], [2, 3]], {"weights.0": (1, [0, 2, 5])})
        >>> division.holders("weights.0", ranks=4), division.holders("weights.1", ranks=4)
        ([[0, 2], [1, 3]], [[0, 1, 2, 3]])
    """

    groups: Sequence[Sequence[int]]
    parts: Mapping[str, tuple[int, Sequence[int]]]

    @classmethod
    def of(cls, lists: Mapping[str, Sequence[Variable]], mesh: Mesh | None) -> "Division":
        """Return the division of this job's variables.

        Args:
            lists: Keras variables by the names of their lists.
            mesh: the groups; None if no layer is split.
        """
        parts: dict[str, tuple[int, Sequence[int]]] = {}
        for name, variables in lists.items():
            for i, variable in enumerate(variables):
                own = part_of(variable)
                if own is not None:
                    parts[f"{name}.{i}"] = own.axis, list(own.bounds)
        return cls([list(ranks) for ranks in mesh.groups] if mesh is not None and parts else [], parts)

    @classmethod
    def from_manifest(cls, saved: Mapping[str, Any]) -> "Division":
        """Return the division in a manifest; older versions of hvdx saved none.

        Args:
            saved: result of `to_manifest`, or an empty mapping.
        """
        parts = {name: (int(part["axis"]), part["bounds"]) for name, part in saved.get("parts", {}).items()}
        return cls(saved.get("groups", []), parts)

    def to_manifest(self) -> dict[str, object]:
        """Return the division in JSON types."""
        parts = {name: {"axis": axis, "bounds": bounds} for name, (axis, bounds) in self.parts.items()}
        return {"groups": self.groups, "parts": parts}

    def holders(self, name: str, ranks: int) -> list[list[int]]:
        """Return the ranks that hold each part of a variable, by position; all ranks for a whole variable.

        Args:
            name: name of the variable.
            ranks: number of ranks in the job.
        """
        if name not in self.parts:
            return [list(range(ranks))]
        return [list(peers) for peers in zip(*self.groups, strict=True)]

    def assemble(
        self, name: str, shape: Sequence[int], own: WeightPart | None, read: Callable[[int], np.ndarray]
    ) -> np.ndarray:
        """Return the part of a saved variable that a rank restores.

        Args:
            name: name of the variable.
            shape: shape of the whole variable.
            own: part to return; None for the whole.
            read: function that returns the saved part at a position, or the whole for a variable that was not split.

        Raises:
            CheckpointError: if a part has another shape.
        """
        if name not in self.parts:
            whole = _with_shape(read(0), shape, name)
            # A view would keep the whole array in memory.
            return whole if own is None else np.array(own.cut(whole))
        axis, bounds = self.parts[name]
        along = own is not None and own.axis == axis
        begin, end = (own.begin, own.end) if own is not None and along else (0, bounds[-1])
        pieces = []
        for position, (first, last) in enumerate(itertools.pairwise(bounds)):
            if max(first, begin) < min(last, end):
                part = _with_shape(read(position), (*shape[:axis], last - first, *shape[axis + 1 :]), name)
                inside = slice(max(begin - first, 0), end - first)
                pieces.append(np.array(part[(slice(None),) * axis + (inside,)]))
        found = np.concatenate(pieces, axis=axis)
        return found if own is None or along else np.array(own.cut(found))


def _with_shape(array: np.ndarray, shape: Sequence[int], name: str) -> np.ndarray:
    """Return an array if it has the expected shape."""
    if array.shape != tuple(shape):
        raise CheckpointError(
            f"{name}: expected the shape {list(shape)}, got {list(array.shape)}: its files are from different "
            "checkpoints"
        )
    return array
