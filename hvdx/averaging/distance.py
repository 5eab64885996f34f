"""Distances between networks, tensor by tensor."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdx.averaging.network import Network, Tensor, native

_BLOCK = 1 << 18


@dataclass(frozen=True)
class Distance:
    """Distances between networks in one tensor, or in all tensors together.

    Attributes:
        name: name of the tensor, or "all".
        shape: shape of the tensor; () for "all".
        norm: 2-norm of the tensor, mean over the networks.
        pairs: distance (2-norm of the difference, in units of `norm`) by the indices of two networks; 0 if `norm` is
            zero.
    """

    name: str
    shape: tuple[int, ...]
    norm: float
    pairs: dict[tuple[int, int], float]


# The table shows infinity and NaN; warnings of NumPy would add nothing.
@np.errstate(over="ignore", invalid="ignore")
def distances(networks: Sequence[Network], progress: Callable[[int], object] | None = None) -> list[Distance]:
    """Measure the distances between networks.

    Args:
        networks: networks of one architecture (see `check_alike`).
        progress: function that is called with the number of bytes that were just read.

    Returns:
        One entry per tensor, in the order of the file, and one called "all" for the floating point tensors together.
    """
    pairs = list(itertools.combinations(range(len(networks)), 2))
    rows, squares, differences = [], np.zeros(len(networks)), np.zeros(len(pairs))
    for name, tensor in networks[0].tensors.items():
        own, between = _sums([n.tensors[name] for n in networks], pairs, progress or (lambda count: None))
        rows.append(_distance(name, tensor.shape, own, between, pairs))
        if native(tensor.dtype).kind not in "iub":
            squares, differences = squares + own, differences + between
    return [*rows, _distance("all", (), squares, differences, pairs)]


def _sums(
    tensors: Sequence[Tensor], pairs: Sequence[tuple[int, int]], progress: Callable[[int], object]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of squares of each network's tensor, and of the difference between each pair."""
    own, between = np.zeros(len(tensors)), np.zeros(len(pairs))
    wide = np.complex128 if np.issubdtype(native(tensors[0].dtype), np.complexfloating) else np.float64
    for start in range(0, tensors[0].size, _BLOCK):
        count = min(_BLOCK, tensors[0].size - start)
        blocks = []
        for tensor in tensors:
            raw = tensor.array_at(start, count)
            blocks.append(raw.astype(wide))
            progress(raw.nbytes)
        own += [np.vdot(b, b).real for b in blocks]
        for i, (a, b) in enumerate(pairs):
            difference = blocks[a] - blocks[b]
            between[i] += np.vdot(difference, difference).real
    return own, between


def _distance(
    name: str, shape: tuple[int, ...], own: np.ndarray, between: np.ndarray, pairs: Sequence[tuple[int, int]]
) -> Distance:
    norm = float(np.sqrt(own).mean())
    relative = np.sqrt(between) / (norm or 1.0)
    return Distance(name, shape, norm, {pair: float(d) for pair, d in zip(pairs, relative, strict=True)})


def table(rows: Sequence[Distance], paths: Sequence[str]) -> str:
    """Format distances as a table."""
    letters = [_letter(i) for i in range(len(paths))]
    legend = [f"{letter}  {path}" for letter, path in zip(letters, paths, strict=True)]
    pairs = list(rows[0].pairs)
    few = len(pairs) <= 6
    head = [f"{letters[a]}-{letters[b]}" for a, b in pairs] if few else ["closest", "", "farthest", ""]
    lines = [["tensor", "shape", "norm", *head]]
    for row in rows:
        if few:
            cells = [f"{d:.3g}" for d in row.pairs.values()]
        else:
            ordered = sorted(row.pairs.items(), key=lambda item: item[1])
            cells = [c for (a, b), d in (ordered[0], ordered[-1]) for c in (f"{d:.3g}", f"{letters[a]}-{letters[b]}")]
        shape = "x".join(str(extent) for extent in row.shape) or "-"
        lines.append([row.name, shape, f"{row.norm:.4g}", *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    aligned = [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    note = "Distances are 2-norms of differences, in units of the norm, which is the mean of the networks' 2-norms."
    return "\n".join([*legend, "", *(line.rstrip() for line in aligned), "", note])


def _letter(index: int) -> str:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return letters[index] if index < len(letters) else f"{_letter(index // len(letters) - 1)}{letters[index % 26]}"
