"""Arrays as one vector: argument checks of the public functions, and the table by which kernels find elements."""

from collections.abc import Sequence

import numpy as np

from hvdx.kernels.compiled import entry
from hvdx.kernels.tiles import N_MAX, Runs

#: Columns of a table of pieces.
START, END, ADDRESS, RUN = range(4)
_TINY, _HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def check_arrays(arrays: Sequence[np.ndarray], what: str, writable: bool = False) -> int:
    """Return the number of elements of arrays that kernels can use in place.

    Args:
        arrays: C-contiguous float32 arrays.
        what: name of the arrays in errors.
        writable: True if the kernel writes to them.

    Raises:
        TypeError: if one is not an array, or not float32.
        ValueError: if one is not contiguous or not writable, or if there are too many elements.
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
    """Return an uninitialised float32[n] that starts at a cache line, so that no SIMD vector crosses one."""
    raw = np.empty(4 * n + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64
    return raw[start : start + 4 * n].view(np.float32)


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a read-only view. To Numba a writable array has another type, for which it would compile again."""
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
    """Return 0 or an error code. NumPy's reductions take ten times the time on few elements."""
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
    """Return the address of an array's elements. With cold caches NumPy takes three times the time for this."""
    return np.int64(array.ctypes.data)


def pieces(arrays: Sequence[np.ndarray], runs: Runs) -> np.ndarray:
    """Divide arrays, read as one vector, into pieces of one array and one run: int64[P, 4], in order.

    A row has the START and END of a piece in the vector, the ADDRESS of its first element, and its RUN. The table is
    valid while the arrays exist.

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
    """Fill `rows` with the pieces of arrays, given as (elements, address); return the number of pieces."""
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
