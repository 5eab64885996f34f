"""Division of a vector among the ranks: blocks go to pieces in turn, one piece for each rank.

The ranks of a host add up the pieces of a `Dealing`. `Shards` are pieces of equal length, which owners add up.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hvdx.codec.base import Array  # imports Numba

# Smallest and largest number of elements of a block, and the number of blocks of a piece from which they are larger. A
# copy of a block takes longer than the loop over blocks.
_LEAST, _MOST, _MANY = 256, 4096, 128
#: Density of an owner's message, in multiples of that of a rank's message, and its limit. The entries of several ranks
#: are at different elements, so at the same density most of their sum would wait in the residual of the owner.
OWNER_DENSITY, MOST_DENSITY = 4.0, 0.5
# Blocks of a shard. With more of them shards have more equal work, but the codec has more arrays to encode.
_BLOCKS = 8
# Shards are encoded in regions of at most _REGION elements, in multiples of _ALIGNED.
_REGION, _ALIGNED = 1 << 18, 64


class Dealing:
    """Division of a vector, made up of tensors, into pieces: block b belongs to piece b modulo `count`.

    Each piece has elements of all large tensors, so a threshold finds about as many entries in one piece as in another,
    also where elements that change together stand together, such as the rows of an embedding.

    Args:
        sizes: number of elements of each tensor.
        count: number of pieces, at most the number of all elements.
        block: number of elements of a block; by default it depends on the number of elements.

    Attributes:
        bounds: int64[count + 1]; if the pieces lie one after another, piece p is [bounds[p], bounds[p + 1]).
        count: number of pieces.
        elements: number of all elements.
        ends: 0, and the end of each tensor in the vector.
        block, round: number of elements of a block, and of a block of each piece.

    Example:
        >>> dealing, vector = Dealing([3, 4], 2, block=2), np.empty(7)
        >>> pieces = dealing.split(np.arange(7.0))
        >>> pieces.tolist(), dealing.bounds.tolist(), dealing.sizes_in_piece(0)
        ([0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0], [0, 4, 7], [2, 2])
        >>> dealing.join(pieces, vector)
        >>> vector.tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """

    def __init__(self, sizes: Sequence[int], count: int, block: int | None = None):
        self.count, self.elements = count, sum(sizes)
        if block is None:
            block = min(max(self.elements // (count * _MANY), _LEAST), _MOST)
            block = 1 << block.bit_length() - 1
        self.block = max(1, min(block, self.elements // count))
        self.round = self.block * count
        self.ends = np.cumsum([0, *sizes]).tolist()
        lengths = [self._before(self.elements, position) for position in range(count)]
        self.bounds = np.cumsum([0, *lengths]).astype(np.int64)

    def _before(self, element: int, position: int) -> int:
        """Return the number of elements of a piece that come before an element of the vector."""
        rounds, rest = divmod(element, self.round)
        return rounds * self.block + min(max(rest - position * self.block, 0), self.block)

    def piece(self, vector: np.ndarray, position: int) -> np.ndarray:
        """Return a copy of one piece of a vector, [n]."""
        whole = vector[: self.elements // self.round * self.round]
        return np.concatenate([self.blocks(whole, position).reshape(-1), self.rest(vector, position)])

    def split(self, vector: np.ndarray) -> np.ndarray:
        """Return the pieces of a vector, [n], one after another."""
        return np.concatenate([self.piece(vector, position) for position in range(self.count)])

    def join(self, pieces: np.ndarray, into: np.ndarray) -> None:
        """Copy pieces that lie one after another, [n], to the vector, [n]."""
        for position in range(self.count):
            self.place(pieces[self.bounds[position] : self.bounds[position + 1]], position, into)

    def place(self, piece: np.ndarray, position: int, into: np.ndarray) -> None:
        """Copy one piece to the vector.

        Args:
            piece: elements of the piece.
            position: number of the piece.
            into: [n], the vector; the elements of other pieces stay unchanged.
        """
        rounds = self.elements // self.round
        whole = rounds * self.block
        self.blocks(into[: rounds * self.round], position)[...] = piece[:whole].reshape(rounds, self.block)
        self.rest(into, position)[...] = piece[whole:]

    def blocks(self, rounds: np.ndarray, position: int) -> np.ndarray:
        """Return a view of the blocks of a piece in whole rounds of the vector, [blocks, block]."""
        return rounds.reshape(-1, self.count, self.block)[:, position]

    def rest(self, vector: np.ndarray, position: int) -> np.ndarray:
        """Return a view of the elements of a piece that lie behind the last whole round of the vector."""
        begin = self.elements // self.round * self.round + position * self.block
        return vector[begin : begin + self.block]

    def origin(self, position: int, element: int) -> int:
        """Return the number in the vector of an element of a piece."""
        number, rest = divmod(element, self.block)
        return number * self.round + position * self.block + rest

    def sizes_in_piece(self, position: int) -> list[int]:
        """Return the number of elements of each tensor that a piece holds."""
        before = [self._before(end, position) for end in self.ends]
        return [end - begin for begin, end in pairwise(before)]


def owner_density(density: float) -> float:
    """Return the density of an owner's message, given that of a rank's message.

    Example:
        >>> owner_density(0.01), owner_density(0.125)
        (0.04, 0.5)
    """
    return min(OWNER_DENSITY * density, MOST_DENSITY)


class Shards:
    """Shards of a vector: the elements that each rank adds up, and the order in which shards are contiguous.

    In the order of the shards, each shard's blocks follow one another. Zeros fill up the last blocks, so all shards
    have the same length.

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
