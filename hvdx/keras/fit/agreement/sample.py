"""Samples of arrays that are small enough to be compared over the ranks."""

from __future__ import annotations

import itertools
import sys
from typing import NamedTuple

import keras
import numpy as np
import xxhash

from hvdx.keras.backend import is_a, tf
from hvdx.keras.fit.samples import Column, Rows
from hvdx.keras.types import Arrays
from hvdx.keras.variables import dtype_of

# Rows of an array in a sample, elements of a row that count, and bytes that are read for it.
_ROWS, _ELEMENTS, _BYTES = 64, 4096, 2**23
# Probability that two ranks have the same rows by chance, as a power of 1/2, from which they are the same samples.
_BITS = 20
# Relative difference that is rounding: ranks on different processors may compute the same features differently.
_ROUNDING = 1e-5


class Sample(NamedTuple):
    """Sample of some arrays.

    Attributes:
        spec: dtype and shape of each array.
        rows: float64 array for each array, with one number for each sampled row: a projection of a numeric row, a
            digest of any other.
    """

    spec: tuple[tuple[str, tuple[int | None, ...]], ...]
    rows: list[np.ndarray]

    def digests(self) -> list[int | None]:
        """Return a digest of each array, or None for those that can be equal by chance or on purpose.

        These are short, have the same row again and again, or are evenly spaced, as positions are.
        """
        whole = [Sample((spec,), [row]) for spec, row in zip(self.spec, self.rows, strict=True)]
        return [part.digest() if _is_particular(part.rows[0]) else None for part in whole]

    def digest(self) -> int:
        """Return a digest, which rounding changes."""
        return xxhash.xxh3_64(repr(self.spec).encode() + b"".join(row.tobytes() for row in self.rows)).intdigest()


def sample(arrays: Arrays, paths: bool = False) -> Sample:
    """Return a sample of evenly spaced rows, the first and the last included.

    Args:
        arrays: tensors, `Rows` or NumPy arrays in any structure; ragged and sparse tensors count as their components.
        paths: strings are names of files, whose folders may differ between hosts.

    Example:
        >>> sample({"x": np.zeros((100, 3), "float32")}).spec
        (('float32', (100, 3)),)
    """
    flat = (
        tf.nest.flatten(arrays, expand_composites=True) if "tensorflow" in sys.modules else keras.tree.flatten(arrays)
    )
    parts = [part for part in flat if hasattr(part, "shape")]
    parts = [p if isinstance(p, np.ndarray | Rows) or is_a(p, "Tensor") else np.asarray(p) for p in parts]
    spec = tuple((_dtype(part), tuple(part.shape)) for part in parts)
    return Sample(spec, [_rows(part, paths) for part in parts])


def alike(first: Sample, other: Sample) -> bool:
    """Return whether two samples are of the same rows in the same order, apart from rounding.

    Example:
        >>> numbers = np.arange(8.0)
        >>> alike(sample(numbers), sample(numbers * (1 + 1e-7))), alike(sample(numbers), sample(numbers[::-1]))
        (True, False)
    """
    if first.spec != other.spec:
        return False
    return all(_close(a, b) for a, b in zip(first.rows, other.rows, strict=True))


def _is_particular(rows: np.ndarray) -> bool:
    """Return whether other rows of the same frequencies, drawn at random, would hardly ever be these."""
    if len(rows) < 2 or np.allclose(np.diff(rows), rows[1] - rows[0]):
        return False
    frequencies = np.unique(rows, return_counts=True)[1] / len(rows)
    return bool(-len(rows) * np.log2((frequencies**2).sum()) >= _BITS)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    finite = np.abs(a[np.isfinite(a)])
    scale = float(np.median(finite)) if finite.size else 0.0
    return bool(np.isclose(a, b, rtol=_ROUNDING, atol=_ROUNDING * scale, equal_nan=True).all())


def _rows(array: tf.Tensor | np.ndarray | Rows, paths: bool) -> np.ndarray:
    """Return a number for each sampled row of an array or tensor; a scalar is one row."""
    shape = tuple(array.shape)
    count = shape[0] if shape else 1
    if 0 in shape:
        return np.zeros(0)
    size = int(np.prod(shape[1:])) * dtype_of(_dtype(array)).itemsize
    number = min(count, int(np.clip(_BYTES // size, 2, _ROWS)))
    at = np.unique(np.linspace(0, count - 1, number).astype(np.int64))
    if not shape:
        rows = np.asarray(array)
    elif is_a(array, "Tensor"):
        rows = tf.gather(array, at).numpy()
    elif isinstance(array, Rows):
        rows = array.read(at)
        if isinstance(array, Column) and not np.array_equal(array.read(at), rows):
            # A dataset that augments at random has other rows each time.
            return np.zeros(0)
    else:
        rows = np.asarray(array[at])
    rows = rows.reshape(len(at), -1)
    rows = rows[:, :: -(-rows.shape[1] // _ELEMENTS)]
    if rows.dtype.kind in "OSU" or not np.can_cast(rows.dtype, np.complex128):
        return np.array([_digest(row, paths) for row in rows])
    # The weights depend on the position, so that a permutation of the elements has another projection.
    weights = np.sin(1.0 + np.arange(rows.shape[1]) ** 1.5)
    with np.errstate(all="ignore"):
        return np.abs(rows.astype(np.complex128) @ weights) if rows.dtype.kind == "c" else rows @ weights


def _dtype(array: tf.Tensor | np.ndarray | Rows) -> str:
    """Return the name of a dtype in TensorFlow."""
    return "string" if getattr(array.dtype, "kind", "") in ("O", "S", "U") else str(array.dtype.name)


def _digest(row: np.ndarray, paths: bool) -> float:
    digest = xxhash.xxh3_64()
    for value in itertools.islice(row.tolist(), _ELEMENTS):
        data = value if isinstance(value, bytes) else str(value).encode()
        digest.update((data.rpartition(b"/")[2] if paths else data) + b"\0")
    # A float64 holds 53 bits.
    return float(digest.intdigest() >> 11)
