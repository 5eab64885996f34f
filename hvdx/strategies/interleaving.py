"""Division of a vector into pieces of interleaved blocks, one piece for each rank of a host."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

# Elements of a block. A copy of a block takes longer than the loop over blocks.
_BLOCK = 256


class Interleaved:
    """Division of tensors into pieces: the tensors form one vector, and its block b belongs to piece b modulo `count`.

    Each piece has elements of all large tensors, so a threshold finds about as many entries in one piece as in another.

    Args:
        sizes: number of elements of each tensor.
        count: number of pieces, at most the number of all elements.

    Attributes:
        bounds: int64[count + 1]; if the pieces lie one after another, piece p is [bounds[p], bounds[p + 1]).

    Example:
        >>> parts = Interleaved([3, 4], 2, block=2)
        >>> pieces, vector = np.empty(7), np.empty(7)
        >>> parts.split([np.arange(3), np.arange(3, 7)], pieces)
        >>> pieces.tolist(), parts.bounds.tolist(), parts.fragments(0)
        ([0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0], [0, 4, 7], [2, 2])
        >>> parts.join(pieces, vector)
        >>> vector.tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """

    def __init__(self, sizes: Sequence[int], count: int, block: int = _BLOCK):
        self._count, self._n = count, sum(sizes)
        self._block = max(1, min(block, self._n // count))
        self._round = self._block * count
        self._ends = np.cumsum([0, *sizes]).tolist()
        lengths = [self._before(self._n, position) for position in range(count)]
        self.bounds = np.cumsum([0, *lengths]).astype(np.int64)
        # For each tensor: copies of (begin, end, begin in the pieces), and of whole rounds: (begin, number).
        self._copies: list[list[tuple[int, int, int]]] = []
        self._rounds: list[tuple[int, int]] = []
        for begin, end in pairwise(self._ends):
            self._plan(begin, end)

    def _before(self, element: int, position: int) -> int:
        """Return the number of elements of a piece that come before an element of the vector."""
        rounds, rest = divmod(element, self._round)
        return rounds * self._block + min(max(rest - position * self._block, 0), self._block)

    def _plan(self, begin: int, end: int) -> None:
        """Plan the copies of the tensor that is [begin, end) of the vector."""
        first = min(-(-begin // self._round) * self._round, end)
        last = max(end // self._round * self._round, first)
        copies = []
        for low, high in ((begin, first), (last, end)):
            inner = range((low // self._block + 1) * self._block, high, self._block)
            for start, stop in pairwise([low, *inner, high] if low < high else []):
                position = start // self._block % self._count
                at = int(self.bounds[position]) + self._before(start, position)
                copies.append((start - begin, stop - begin, at))
        self._copies.append(copies)
        self._rounds.append((first - begin, (last - first) // self._round))

    def split(self, tensors: Sequence[np.ndarray], into: np.ndarray) -> None:
        """Copy tensors to their pieces, which lie one after another.

        Args:
            tensors: contiguous arrays of the sizes that were given.
            into: [n], the output.
        """
        for tensor, start, copies, (first, rounds) in zip(
            tensors, self._ends[:-1], self._copies, self._rounds, strict=True
        ):
            flat = np.ravel(tensor)
            for begin, end, at in copies:
                into[at : at + end - begin] = flat[begin:end]
            if rounds:
                blocks = flat[first : first + rounds * self._round].reshape(rounds, self._count, self._block)
                for position in range(self._count):
                    at = int(self.bounds[position]) + self._before(start + first, position)
                    into[at : at + rounds * self._block].reshape(rounds, self._block)[...] = blocks[:, position]

    def join(self, pieces: np.ndarray, into: np.ndarray) -> None:
        """Copy pieces that lie one after another, [n], to the vector, [n]."""
        for position in range(self._count):
            self.place(pieces[self.bounds[position] : self.bounds[position + 1]], position, into)

    def place(self, piece: np.ndarray, position: int, into: np.ndarray) -> None:
        """Copy one piece to the vector.

        Args:
            piece: elements of the piece.
            position: number of the piece.
            into: [n], the vector; the elements of other pieces stay unchanged.
        """
        rounds = self._n // self._round
        whole = rounds * self._block
        blocks = into[: rounds * self._round].reshape(rounds, self._count, self._block)
        blocks[:, position] = piece[:whole].reshape(rounds, self._block)
        begin = rounds * self._round + position * self._block
        into[begin : begin + piece.size - whole] = piece[whole:]

    def fragments(self, position: int) -> list[int]:
        """Return the number of elements of each tensor that a piece holds.

        Args:
            position: number of the piece.
        """
        before = [self._before(end, position) for end in self._ends]
        return [end - begin for begin, end in pairwise(before)]
