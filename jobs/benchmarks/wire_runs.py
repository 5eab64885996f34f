"""Bits that messages would save if their tiles could code runs of neighbouring entries.

`hvdx bench wire` measures this on recorded updates. Solid clusters, such as rows of an embedding of which each element
is sent, would profit from such a coding. The codes are those of the format: gaps between runs and lengths of runs in
the gap code, with a parameter for each 64 numbers. A run of several entries takes one bit that says if all signs are
equal; equal signs take one bit. Each tile takes the shorter coding, and one bit for the choice.
"""

import numpy as np

from hvdx.kernels import reference
from hvdx.kernels.tiles import BLOCK, LAYOUT, plan


def bits_saved(index: np.ndarray, negative: np.ndarray, n: int) -> int:
    """Return the bits that runs save in the message of an update; negative if they cost bits.

    Args:
        index: int64[e], increasing, below n.
        negative: bool[e].
        n: number of elements of the update.

    Example:
        >>> bits_saved(np.arange(1000, 2000), np.zeros(1000, bool), 4096)
        1999
        >>> bits_saved(np.arange(0, 4096, 7), np.zeros(586, bool), 4096)
        -1
    """
    saved = begin = 0
    for count in plan(np.bincount(index // LAYOUT.region, minlength=-(-n // LAYOUT.region))).tolist():
        tile = slice(begin, begin + count)
        saved += max(bits_of_gaps(index[tile]) - bits_of_runs(index[tile], negative[tile]), 0) - 1
        begin += count
    return saved


def bits_of_gaps(index: np.ndarray) -> int:
    """Return the bits of the positions and signs of a tile in the format."""
    return bits_of((np.diff(index)[:-1] - 1).tolist()) + len(index)


def bits_of_runs(index: np.ndarray, negative: np.ndarray) -> int:
    """Return the bits of the positions and signs of a tile as runs."""
    starts = np.flatnonzero(np.diff(index, prepend=index[0] - 2) != 1)
    lengths = np.diff(starts, append=len(index))
    gaps = index[starts[1:]] - index[starts[1:] - 1] - 2
    minus = np.add.reduceat(negative.astype(np.int64), starts)
    mixed = (minus > 0) & (minus < lengths)
    signs = np.where(lengths == 1, 1, 1 + np.where(mixed, lengths, 1))
    return bits_of(gaps.tolist()) + bits_of((lengths - 1).tolist()) + int(signs.sum())


def bits_of(values: list[int]) -> int:
    """Return the bits of numbers in the gap code, with the bits for changes of its parameter."""
    bits, k = 0, reference.first_parameter(sum(values), len(values)) if values else 0
    for first in range(0, len(values), BLOCK):
        block, before = values[first : first + BLOCK], k
        k = reference.choose_parameter(block, before)
        bits += 1 + 5 * (k != before) + sum(reference.code_length(x, k) for x in block)
    return bits
