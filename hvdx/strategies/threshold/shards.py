"""Shards of a vector: the elements that each rank adds up, and the order in which shards are contiguous.

Shards are the pieces of a `Dealing`. In the order of the shards, each shard's blocks follow one another. Zeros fill up
the last blocks, so all shards have the same length.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hvdx.strategies.threshold.dealing import Dealing

if TYPE_CHECKING:
    from hvdx.codec.base import Array  # imports Numba

#: Density of an owner's message, in multiples of that of a rank's message, and its limit. The entries of several ranks
#: are at different elements, so at the same density most of their sum would wait in the residual of the owner.
OWNER_DENSITY, MOST_DENSITY = 4.0, 0.5
# Blocks of a shard. With more of them shards have more equal work, but the codec has more arrays to encode.
_BLOCKS = 8
# Shards are encoded in regions of at most _REGION elements, in multiples of _ALIGNED.
_REGION, _ALIGNED = 1 << 18, 64


def owner_density(density: float) -> float:
    """Return the density of an owner's message, given that of a rank's message.

    Example:
        >>> owner_density(0.01), owner_density(0.125)
        (0.04, 0.5)
    """
    return min(OWNER_DENSITY * density, MOST_DENSITY)


class Shards:
    """Shards of a vector.

    Args:
        sizes: number of elements of each of the arrays that make up the vector.
        ranks: number of shards.

    Attributes:
        elements: number of elements of all shards.

    Example:
        >>> shards = Shards([100, 30], 2)
        >>> shards.shard_size, shards.elements
        (128, 256)
        >>> vector = np.arange(130, dtype=np.float32)
        >>> shards.from_vector(vector)[[0, 15, 16, 128]]
        array([ 0., 15., 32., 16.], dtype=float32)
        >>> bool((shards.to_vector(shards.from_vector(vector)) == vector).all())
        True
    """

    def __init__(self, sizes: Sequence[int], ranks: int) -> None:
        self._arrays, self._ranks, self._n = list(sizes), ranks, sum(sizes)
        least = -(-self._n // ranks) or 1
        regions = -(-least // _REGION)
        self._shard_size = regions * -(-least // (regions * _ALIGNED)) * _ALIGNED
        self.elements = ranks * self._shard_size
        self._dealing = Dealing([self.elements], ranks, self._shard_size // _BLOCKS)
        self._zeros = np.zeros(self._shard_size, np.float32)
        self._zeros.flags.writeable = False

    @cached_property
    def _plan(self) -> list[tuple[int, int, int]]:
        """Views in the order of the shards: (number of the array, first element, end); number -1 for padding."""
        block, ends = self._dealing.block, np.cumsum(self._arrays, dtype=np.int64)
        plan = []
        for rank in range(self._ranks):
            for number in range(_BLOCKS):
                at = self._dealing.origin(rank, number * block)
                stop = at + block
                while at < min(stop, self._n):
                    array = int(np.searchsorted(ends, at, side="right"))
                    begin = int(ends[array]) - self._arrays[array]
                    end = min(stop, int(ends[array]))
                    plan.append((array, at - begin, end - begin))
                    at = end
                if at < stop:
                    plan.append((-1, 0, stop - at))
        return plan

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each of the `views`."""
        return [end - begin for _, begin, end in self._plan]

    def views(self, arrays: Sequence[np.ndarray], padding: np.ndarray) -> list[np.ndarray]:
        """Return views of arrays in the order of the shards.

        Args:
            arrays: contiguous arrays of the sizes.
            padding: array of at least `shard_size` elements, of which views stand for the padding.
        """
        flat = [array.reshape(-1) for array in arrays]
        return [(flat[array] if array >= 0 else padding)[begin:end] for array, begin, end in self._plan]

    def origin(self, view: int, element: int) -> tuple[int, int]:
        """Return the number of the array, and the element in it, of an element of a view."""
        array, begin, _ = self._plan[view]
        return array, begin + element

    @property
    def shard_size(self) -> int:
        """Number of elements of a shard, padding included; a multiple of 64."""
        return self._shard_size

    def arranged(self, arrays: Sequence["Array"]) -> list[np.ndarray]:
        return self.views([np.asarray(array) for array in arrays], self._zeros)

    def from_vector(self, vector: np.ndarray) -> np.ndarray:
        """Return a copy of a vector in the order of the shards."""
        return self._dealing.split(self._padded(vector))

    def to_vector(self, encoded: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return a copy of all shards in the order of the vector, without padding.

        Args:
            encoded: the shards.
            out: array of as many elements, of which the result is a view; by default a new one.
        """
        padded = np.empty(self.elements, encoded.dtype) if out is None else out
        self._dealing.join(encoded, padded)
        return padded[: self._n]

    def of_rank(self, vector: np.ndarray, rank: int) -> np.ndarray:
        """Return a copy of one shard of a vector."""
        return self._dealing.piece(self._padded(vector), rank)

    def embed(self, shard: np.ndarray, rank: int) -> np.ndarray:
        """Return a vector of zeros with one shard filled in."""
        padded = np.zeros(self.elements, shard.dtype)
        self._dealing.place(shard, rank, padded)
        return padded[: self._n]

    def _padded(self, vector: np.ndarray) -> np.ndarray:
        padded = np.zeros(self.elements, vector.dtype)
        padded[: self._n] = vector
        return padded
