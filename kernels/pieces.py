"""Arrays as one vector: argument checks of the public functions, and the table by which kernels find elements."""

import ctypes
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hvdx.kernels import simd
from hvdx.kernels.arrays import AnyArray, Float32Array, Int64Array
from hvdx.kernels.compiled import entry
from hvdx.kernels.cpu_scan import piece_of
from hvdx.kernels.tiles import LINE, N_MAX, Runs

Scalar = TypeVar("Scalar", bound=np.generic)

#: Columns of a table of pieces.
START, END, ADDRESS, RUN = range(4)
_TINY, _HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max


class Located(NamedTuple):
    """Arrays that kernels can use in place, read as one vector.

    Attributes:
        table: int64[arrays, 2], the SIZE of each array and the PLACE of its elements, an address.
        size: number of elements.
        arrays: the arrays, whose memory exists as long as this value.
        writable: True if kernels may write to them.
    """

    table: Int64Array
    size: int
    arrays: Sequence[Float32Array]
    writable: bool

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each array."""
        found: list[int] = self.table[:, SIZE].tolist()
        return found


def check_arrays(arrays: Sequence[Float32Array], what: str, writable: bool = False) -> int:
    """Return the number of elements of arrays that kernels can use in place.

    Args:
        arrays: C-contiguous float32 arrays.
        what: name of the arrays in errors.
        writable: True if the kernel writes to them.

    Raises:
        TypeError: if one is not an array, or not float32.
        ValueError: if one is not contiguous or not writable, or if there are too many elements.
    """
    return _check_total(sum(_check_array(array, f"{what}[{i}]", writable)[0] for i, array in enumerate(arrays)), what)


def _check_total(total: int, what: str) -> int:
    if total > N_MAX:
        raise ValueError(f"{what}: {total} elements, more than {N_MAX}. Split it.")
    return total


def locate(arrays: Sequence[Float32Array] | Located, what: str, writable: bool = False) -> Located:
    """Return the sizes and addresses of arrays, with the arrays; a `Located` is returned unchanged.

    Arguments and errors are those of `check_arrays`. Compiled code reads the headers of the arrays, so thousands of
    arrays take hardly more time than one.

    Example:
        >>> located = locate([np.zeros((2, 3), np.float32), np.zeros(1, np.float32)], "update")
        >>> located.sizes, located.size, locate(located, "update") is located
        ([6, 1], 7, True)
    """
    if isinstance(arrays, Located):
        if arrays.writable or not writable:
            return arrays
        arrays = arrays.arrays
    if not isinstance(arrays, list | tuple):  # Others may make arrays that exist only while they are looked at.
        raise TypeError(f"{what}: expected a list or tuple of arrays, got {type(arrays).__name__}. Do: [array]")
    table = np.empty((len(arrays), 2), np.int64)
    known = np.fromiter(map(id, arrays), np.int64, len(arrays)) if _HEADERS_ARE_KNOWN else table[:0, 0]
    flags, at = _FLAGS | _WRITEABLE if writable else _FLAGS, 0
    while (at := _read_headers(known, _HEAD, _ARRAY, _FLOAT32, flags, at, table)) < len(arrays):
        table[at] = _check_array(arrays[at], f"{what}[{at}]", writable)
        at += 1
    return Located(table, _check_total(int(table[:, SIZE].sum()), what), arrays, writable)


def locate_both(
    update: Sequence[Float32Array] | Located, residual: Float32Array | Located, writable: bool = False
) -> tuple[Located, Located]:
    """Return an update and its residual, located; see `locate`.

    Args:
        update: C-contiguous float32 arrays, read as one vector of n elements.
        residual: float32[n].
        writable: True if the kernel writes to the residual.

    Raises:
        ValueError: if the residual has another number of elements.
    """
    arrays = locate(update, "update")
    kept = locate(residual if isinstance(residual, Located) else [residual], "residual", writable)
    if kept.size != arrays.size:
        raise ValueError(f"residual: expected the {arrays.size} elements of the update, got {kept.size}.")
    return arrays, kept


def _check_array(array: AnyArray, name: str, writable: bool) -> tuple[int, int]:
    """Return the row of `locate` for one array of any kind."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: expected a NumPy array, got {type(array).__name__}. Convert it first.")
    if array.dtype != np.float32:
        raise TypeError(f"{name}: expected float32, got {array.dtype}. Cast it first.")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"{name}: expected contiguous memory. Pass np.ascontiguousarray(...) of it.")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: it is read-only, and would be written to. Pass a copy.")
    return array.size, array.ctypes.data


#: Columns of the table of `locate`.
SIZE, PLACE = range(2)
# Header of an array, which NumPy's C API documents as PyArrayObject. After the header of every Python object, which
# ends with the address of the type, come words: the address of the elements, the number of dimensions, the addresses of
# the dimensions, of the strides and of the base, and the address of the dtype; then the flags, an int.
_HEAD, _ARRAY, _FLOAT32 = object.__basicsize__, id(np.ndarray), id(np.dtype(np.float32))
_FLAGS, _WRITEABLE = 0x1 | 0x100, 0x400


def _headers_are_known() -> bool:
    """Return True if this interpreter's arrays have the header that `_read_headers` reads."""
    if platform.python_implementation() != "CPython" or struct.calcsize("P") != 8:
        return False
    for array in (np.zeros((3, 2), np.float32), np.zeros((2, 4), np.float64)[:, 1:]):
        array.flags.writeable = array.dtype == np.float32
        words, flags = (ctypes.c_int64 * 7).from_address(id(array) + _HEAD), array.flags
        expected = flags.c_contiguous | 0x100 * flags.aligned | _WRITEABLE * flags.writeable
        right = (
            ctypes.c_int64.from_address(id(array) + _HEAD - 8).value == _ARRAY
            and words[0] == array.ctypes.data
            and words[1] & 0xFFFFFFFF == array.ndim
            and tuple((ctypes.c_int64 * 2).from_address(words[2])) == array.shape
            and words[5] == id(array.dtype)
            and words[6] & (_FLAGS | _WRITEABLE) == expected
        )
        if not right:
            return False
    return True


_HEADERS_ARE_KNOWN = _headers_are_known()


@entry
def _read_headers(known: Int64Array, head: int, kind: int, dtype: int, flags: int, at: int, table: Int64Array) -> int:
    """Fill the table from row `at` on; return the first row whose array is not plainly of this kind, dtype and flags.

    `known` has the addresses of the arrays' headers; if it is empty, none is read.
    """
    for i in range(at, known.size):
        header = known[i] + head
        if (
            np.int64(simd.load_word(header - 8)) != kind
            or np.int64(simd.load_word(header + 40)) != dtype
            or np.int64(simd.load_half(header + 48)) & flags != flags
        ):
            return i
        size, shape = np.int64(1), np.int64(simd.load_word(header + 16))
        for axis in range(np.int64(simd.load_half(header + 8))):
            size *= np.int64(simd.load_word(shape + 8 * axis))
        table[i, 0], table[i, 1] = size, np.int64(simd.load_word(header))
    return max(at, known.size)


def aligned(n: int) -> Float32Array:
    """Return an uninitialised float32[n] that starts at a cache line, so that no SIMD vector crosses one."""
    raw = np.empty(4 * n + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 64
    return raw[start : start + 4 * n].view(np.float32)


def frozen(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Return a read-only view. To Numba a writable array has another type, for which it would compile again."""
    if not array.flags.writeable:
        return array
    array = array.view()
    array.flags.writeable = False
    return array


def check_runs(runs: Runs, n: int, what: str) -> Runs:
    """Return read-only `runs`; raise ValueError unless they cover n elements with taus that are normal, positive."""
    lengths, taus = runs
    if lengths.dtype != np.int64 or taus.dtype != np.float32 or lengths.shape != taus.shape or lengths.ndim != 1:
        raise ValueError(
            f"runs: expected lengths int64[R] and taus float32[R], got {lengths.dtype}{list(lengths.shape)} and "
            f"{taus.dtype}{list(taus.shape)}."
        )
    lengths, taus = frozen(lengths), frozen(taus)
    error = _runs_error(lengths, taus, n)
    if error == 1:
        raise ValueError(
            f"runs: expected lengths of at least 1 that add up to the {n} elements of {what}, got {lengths}."
        )
    if error == 2:
        raise ValueError(f"tau: expected normal, positive float32, got {taus}.")
    return Runs(lengths, taus)


@entry
def _runs_error(lengths: Int64Array, taus: Float32Array, n: int) -> int:
    """Return 0 or an error code. NumPy's reductions take ten times the time on few elements."""
    left = n
    for i in range(lengths.size):
        if lengths[i] < 1 or lengths[i] > left:
            return 1
        left -= lengths[i]
        if not _TINY <= taus[i] <= _HUGE:
            return 2
    return 0 if left == 0 else 1


def pieces(arrays: Int64Array, runs: Runs) -> Int64Array:
    """Divide arrays, read as one vector, into pieces of one array and one run: int64[P, 4], in order.

    `arrays` is the table of a `Located`. A row of the result has the START and END of a piece in the vector, the
    ADDRESS of its first element, and its RUN. The table is valid while the arrays exist.

    Example:
        >>> a, b = np.zeros(3, np.float32), np.zeros(2, np.float32)
        >>> table = pieces(locate([a, b], "update").table, Runs(np.array([2, 3]), np.ones(2, np.float32)))
        >>> table[:, [START, END, RUN]].tolist()
        [[0, 2, 0], [2, 3, 1], [3, 5, 1]]
    """
    rows = np.empty((len(arrays) + len(runs.lengths), 4), np.int64)
    return rows[: _cut(arrays, frozen(runs.lengths), rows)]


def whole_pieces(arrays: Located) -> Int64Array:
    """Return the pieces of arrays that are one run; see `pieces`."""
    return pieces(arrays.table, Runs(np.array([arrays.size]), np.ones(1, np.float32)))


@entry
def _cut(arrays: Int64Array, lengths: Int64Array, rows: Int64Array) -> np.int64:
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


@entry
def gather(pieces: Int64Array, residual: Float32Array, lines: Int64Array, out: Float32Array) -> None:
    """Copy the elements of some lines, and those of the residual; see `cpu.sample`."""
    n, taken = residual.size, np.int64(0)
    for i in range(lines.size):
        first = LINE * lines[i]
        p = piece_of(pieces, first)
        for element in range(first, min(first + LINE, n)):
            while element >= pieces[p, 1]:
                p += 1
            out[0, taken] = simd.load_float(pieces[p, 2] + 4 * (element - pieces[p, 0]))
            out[1, taken] = residual[element]
            taken += 1


def sampled(n: int, lines: Int64Array) -> int:
    """Return the number of elements in some lines of n elements, given by increasing numbers.

    Example:
        >>> sampled(40, np.array([0, 1])), sampled(40, np.array([0, 2]))
        (32, 24)
    """
    if lines.size and not 0 <= lines[0] <= lines[-1] < -(-n // LINE):
        raise ValueError(f"lines: expected numbers from 0 below {-(-n // LINE)}, got {lines[0]} to {lines[-1]}.")
    return int(LINE * lines.size - max(LINE * (lines[-1] + 1) - n, 0)) if lines.size else 0
