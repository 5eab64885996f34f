"""The group of ranks that split a layer, as layers see it."""

from typing import Generic, TypeVar

from hvdx.comm.mesh import Mesh
from hvdx.keras.joining import join
from hvdx.keras.weight_parts import tensors_of


def joined_mesh() -> Mesh | None:
    """Return the mesh of the joined world; None if layers are not split. The first call joins the world."""
    mesh: Mesh | None = join().mesh
    return mesh


def bytes_sent() -> int:
    """Return the bytes that this rank has sent in the collectives of split layers, since the world was joined.

    The bytes of the strategy, which combines gradients, are not included.

    Example:
        >>> bytes_sent()
        0
    """
    mesh = joined_mesh()
    return 0 if mesh is None else tensors_of(mesh).sent


T = TypeVar("T")


class Shared(Generic[T]):
    """Value that a deep copy of a layer shares with the layer."""

    def __init__(self, value: T):
        self.value = value

    def __deepcopy__(self, memo: object) -> "Shared[T]":
        return self
