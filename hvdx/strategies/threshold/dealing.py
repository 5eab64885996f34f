"""Dealing of a vector: its blocks go to pieces in turn, one piece for each rank."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

# Smallest and largest number of elements of a block, and the number of blocks of a piece from which they are larger. A
# copy of a block takes longer than the loop over blocks.
_LEAST, _MOST, _MANY = 256, 4096, 128


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
        """Return a view of the blocks of a piece, [blocks, block].

        Args:
            rounds: part of the vector that begins and ends with a round.
            position: number of the piece.
        """
        return rounds.reshape(-1, self.count, self.block)[:, position]

    def rest(self, vector: np.ndarray, position: int) -> np.ndarray:
        """Return a view of the elements of a piece that lie behind the last whole round of the vector.

        Args:
            vector: [n].
            position: number of the piece.
        """
        begin = self.elements // self.round * self.round + position * self.block
        return vector[begin : begin + self.block]

    def origin(self, position: int, element: int) -> int:
        """Return the number in the vector of an element of a piece.

        Args:
            position: number of the piece.
            element: number of the element in the piece.
        """
        number, rest = divmod(element, self.block)
        return number * self.round + position * self.block + rest

    def sizes_in_piece(self, position: int) -> list[int]:
        """Return the number of elements of each tensor that a piece holds.

        Args:
            position: number of the piece.
        """
        before = [self._before(end, position) for end in self.ends]
        return [end - begin for begin, end in pairwise(before)]
