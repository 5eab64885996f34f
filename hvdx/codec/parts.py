"""Parts of a threshold message: a message of the whole update is cut at borders of its tiles, and messages are joined.

Both work on the headers of tiles; no entry is decoded. The parts are messages of their own, with a frame each.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hvdx.codec import varint
from hvdx.kernels.table import FIRST, LAST, LENGTH, START, table
from hvdx.kernels.tiles import Malformed, Runs


def cut_tiles(tiles: np.ndarray, n: int, part: int) -> list[np.ndarray]:
    """Cut the tiles of an update into those of its parts, with indices relative to the part.

    Args:
        tiles: uint8[bytes], tiles of n elements. No tile has entries of two parts.
        n: number of elements.
        part: number of elements of each part; the last one may be shorter.

    Returns:
        uint8[bytes] of each part.

    Raises:
        Malformed: if the headers are not those of tiles for n elements.
        ValueError: if a tile has entries of two parts.

    Example:
        >>> [piece.tolist() for piece in cut_tiles(np.array([4, 2, 0, 1, 1, 2, 2, 0, 1, 1], np.uint8), 10, 5)]
        [[4, 2, 0, 1, 1], [2, 2, 0, 1, 1]]
    """
    rows = table(tiles, n)
    owners = rows[:, FIRST] // part
    if (rows[:, LAST] // part != owners).any():
        raise ValueError(f"tiles: expected none with entries of two parts of {part} elements.")
    ends = rows[:, START] + rows[:, LENGTH]
    borders = np.searchsorted(owners, np.arange(-(-n // part) + 1)).tolist()
    cut = []
    for number, (begin, stop) in enumerate(pairwise(borders)):
        if begin == stop:
            cut.append(tiles[:0])
            continue
        before, at = (int(rows[begin - 1, LAST]), int(ends[begin - 1])) if begin else (-1, 0)
        first = int(rows[begin, FIRST])
        at += len(varint.put(first - before - 1))
        cut.append(_with_gap(first - number * part, tiles[at : ends[stop - 1]]))
    return cut


def join_tiles(pieces: Sequence[tuple[np.ndarray, Runs]]) -> tuple[np.ndarray, Runs]:
    """Join the tiles of parts into those of the whole update; the inverse of `cut_tiles`.

    Args:
        pieces: tiles and runs of each part, in their order.

    Returns:
        uint8[bytes], the tiles, and the runs of all parts.

    Raises:
        Malformed: if the headers of a part are not those of tiles for its elements; its `message` is the part's number.
    """
    joined, origin, last = [], 0, -1
    for number, (tiles, runs) in enumerate(pieces):
        n = int(runs.lengths.sum())
        try:
            rows = table(tiles, n)
        except Malformed as error:
            raise Malformed(str(error), number) from None
        if len(rows):
            first = int(rows[0, FIRST])
            at = len(varint.put(first))
            joined.append(_with_gap(origin + first - last - 1, tiles[at:]))
            last = origin + int(rows[-1, LAST])
        origin += n
    lengths = np.concatenate([runs.lengths for _, runs in pieces])
    taus = np.concatenate([runs.taus for _, runs in pieces])
    return np.concatenate([np.zeros(0, np.uint8), *joined]), Runs(lengths, taus)


def _with_gap(gap: int, tiles: np.ndarray) -> np.ndarray:
    """Return tiles that begin with a number of elements without an entry."""
    return np.concatenate([np.frombuffer(varint.put(gap), np.uint8), tiles])
