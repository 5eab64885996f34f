"""Lists of arrays as one vector: what the doors check, and the table by which kernels find elements in place."""

from collections.abc import Sequence

import numpy as np

from hvdx.kernels.compiled import entry
from hvdx.kernels.tiles import N_MAX, Runs

#: Columns of a table of pieces.
START, END, ADDRESS, RUN = range(4)
_TINY, _HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def check_arrays(arrays: Sequence[np.ndarray], what: str, writable: bool = False) -> int:
    """Hold arrays against what kernels can work on in place.

    Args:
        arrays: float32, C-contiguous.
        what: their name in errors.
        writable: they are written to.

    Returns:
        The number of their elements.

    Raises:
        TypeError: not an array, or not float32.
        ValueError: not contiguous, not writable, or too many elements.
    """
    total = 0
    for i, array in enumerate(arrays):
        name = f"{what}[{i}]"
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}: expected a NumPy array, got {type(array).__name__}. Convert it first.")
        if array.dtype != np.float32:
            raise TypeError(f"{name}: expected float32, got {array.dtype}. Cast it first.")
        if not array.flags.c_contiguous or not array.flags.aligned:
            raise ValueError(f"{name}: expected contiguous memory. Pass np.ascontiguousarray(...) of it.")
        if writable and not array.flags.writeable:
            raise ValueError(f"{name}: it is read-only, and would be written to. Pass a copy.")
        total += array.size
    if total > N_MAX:
        raise ValueError(f"{what}: {total} elements, more than {N_MAX}. Split it.")
    return total


def aligned(n: int) -> np.ndarray:
    """float32[n], not set to anything, at the start of a cache line: vectors then never straddle two."""
    raw = np.empty(4 * n + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64
    return raw[start : start + 4 * n].view(np.float32)


def frozen(array: np.ndarray) -> np.ndarray:
    """A read-only view: an array that can be written to is another type to Numba, which compiles once more for it."""
    array = array.view()
    array.flags.writeable = False
    return array


def check_runs(runs: Runs, n: int, what: str) -> None:
    """Raise ValueError unless `runs` cover n elements with taus that are normal, positive float32."""
    lengths, taus = runs
    if lengths.dtype != np.int64 or taus.dtype != np.float32 or lengths.shape != taus.shape or lengths.ndim != 1:
        raise ValueError(
            f"runs: expected lengths int64[R] and taus float32[R], got {lengths.dtype}{list(lengths.shape)} and "
            f"{taus.dtype}{list(taus.shape)}."
        )
    error = _runs_error(frozen(lengths), frozen(taus), n)
    if error == 1:
        raise ValueError(
            f"runs: expected lengths of at least 1 that add up to the {n} elements of {what}, got {lengths}."
        )
    if error == 2:
        raise ValueError(f"tau: expected normal, positive float32, got {taus}.")


@entry
def _runs_error(lengths, taus, n):
    """0, or the number of what is wrong. NumPy's reductions take ten times as long on few elements."""
    left = n
    for i in range(lengths.size):
        if lengths[i] < 1 or lengths[i] > left:
            return 1
        left -= lengths[i]
        if not _TINY <= taus[i] <= _HUGE:
            return 2
    return 0 if left == 0 else 1


@entry
def _address(array):
    """Where an array's elements are: a third of what asking NumPy takes when nothing is in the caches."""
    return np.int64(array.ctypes.data)


def pieces(arrays: Sequence[np.ndarray], runs: Runs) -> np.ndarray:
    """Cut arrays that follow each other as one vector where a run ends: int64[P, 4], in order.

    Each row is the START and END of a piece in the vector, the ADDRESS of its first element, and its RUN. It is valid
    as long as the arrays are.

    Example:
        >>> a, b = np.zeros(3, np.float32), np.zeros(2, np.float32)
        >>> table = pieces([a, b], Runs(np.array([2, 3]), np.ones(2, np.float32)))
        >>> table[:, [START, END, RUN]].tolist()
        [[0, 2, 0], [2, 3, 1], [3, 5, 1]]
    """
    found = [(a.size, _address(a if a.ndim == 1 else a.reshape(-1))) for a in arrays]
    table = np.array(found, np.int64).reshape(-1, 2)
    rows = np.empty((len(table) + len(runs.lengths), 4), np.int64)
    return rows[: _cut(table, frozen(runs.lengths), rows)]


@entry
def _cut(arrays, lengths, rows):
    """Fill `rows` with the pieces of arrays, (elements, address) each: how many there are."""
    found = at = run_end = np.int64(0)
    run = np.int64(-1)
    for i in range(arrays.shape[0]):
        first, end = at, at + arrays[i, 0]
        while at < end:
            if at == run_end:
                run += 1
                run_end += lengths[run]
            stop = min(end, run_end)
            rows[found, 0], rows[found, 1] = at, stop
            rows[found, 2], rows[found, 3] = arrays[i, 1] + 4 * (at - first), run
            found += 1
            at = stop
    return found
