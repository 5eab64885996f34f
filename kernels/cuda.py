"""Threshold kernels on an NVIDIA GPU, in Numba CUDA. Their bytes and sums equal those of `reference`, bit for bit.

The import needs neither a GPU nor a driver. Kernels are compiled at their first launch.
"""

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

if importlib.util.find_spec("numba_cuda") is None:
    raise ImportError("hvdx.kernels.cuda: expected the package numba-cuda, got none. Do: pip install 'hvdx[cuda]'")

from numba import boolean, cuda, float32, int64, types, uint8, uint32

from hvdx.kernels import cuda_decode, cuda_encode, cuda_tiles
from hvdx.kernels.cuda_decode import ERRORS, NO_ERROR, ROW
from hvdx.kernels.cuda_encode import BYTES, CHUNK, COLUMNS, FAULT, NO_FAULT, PER_RUN, TALLIES, TILES
from hvdx.kernels.pieces import check_runs
from hvdx.kernels.table import ENTRIES, LENGTH, START, table
from hvdx.kernels.tiles import LAYOUT, Encoded, Layout, Malformed, Runs, check_layout, factors, limit

#: Largest number of blocks of a launch for each multiprocessor. Over elements: several times the blocks that run at
#: once, so that little is idle at the end. Over tiles: the blocks that run at once, given their shared memory.
_BLOCKS_OF_ELEMENTS, _BLOCKS_OF_TILES = 64, 4
#: Smallest number of blocks of a launch. Numba warns of fewer; surplus blocks have no work.
_FEWEST_BLOCKS = 128

#: Kernels by name, each with the argument types of its launches.
KERNELS = {
    "find_fault": (cuda_encode.find_fault, (float32[::1], int64[::1], int64, float32)),
    "accumulate": (
        cuda_encode.accumulate,
        (*[float32[::1]] * 2, uint32[::1], int64[::1], int64, int64, float32),
    ),
    "scale": (cuda_encode.scale, (float32[::1], float32[::1], float32)),
    "subtract": (cuda_encode.subtract, (float32[::1], float32[::1], int64)),
    "count": (cuda_encode.count, (uint32[::1], int64[::1], int64[::1], int64, int64)),
    "plan_tiles": (cuda_encode.plan_tiles, (*[int64[::1]] * 2, int64[:, ::1], int64[::1], *[int64] * 5)),
    "place": (cuda_encode.place, (int64[:, ::1], int64[::1])),
    "clear": (cuda_encode.clear, (uint32[::1],)),
    "size_tiles": (
        cuda_tiles.size_tiles,
        (
            *(float32[::1], uint32[::1], *[int64[::1]] * 3, float32[::1]),
            *(int64[:, ::1], uint8[:, ::1], int64[::1], int64, int64, boolean),
        ),
    ),
    "write_tiles": (
        cuda_tiles.write_tiles,
        (
            *(float32[::1], uint32[::1], *[int64[::1]] * 3, float32[::1]),
            *(int64[:, ::1], uint8[:, ::1], int64[::1], int64, int64, boolean, uint32[::1]),
        ),
    ),
    "read_tiles": (
        cuda_decode.read_tiles,
        (
            *(uint32[::1], int64[:, ::1], int64[:, ::1], int64[::1], float32[::1], float32),
            *(int64[::1], float32[::1], int64[::1], boolean),
        ),
    ),
    "add": (cuda_decode.add, (float32[::1], int64[::1], float32[::1], int64)),
}


def signatures() -> dict[str, tuple[Any, types.FunctionType]]:
    """Return the dispatcher and the signature of every kernel by name."""
    return {name: (kernel, types.void(*arguments)) for name, (kernel, arguments) in KERNELS.items()}


def as_device(x: Any, name: str = "array") -> Any:
    """Return an array on the GPU as an array of Numba, without a copy.

    Args:
        x: array of Numba, or with `__cuda_array_interface__` (PyTorch, CuPy, ...), or with `__dlpack__`. DLPack gets no
            stream, because not all libraries accept one: the work that fills x must have finished.
        name: name of the array, for errors.

    Returns:
        Numba's DeviceNDArray of the same shape and dtype, which keeps x alive.

    Raises:
        TypeError: if x is not an array on a GPU.
    """
    if getattr(x, "__cuda_ndarray__", False):
        return x
    if hasattr(x, "__cuda_array_interface__"):
        return cuda.as_cuda_array(x)
    if hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) == _DLPACK_CUDA:
        return _from_dlpack(x)
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    raise TypeError(f"{name}: expected an array on a GPU, got {kind}. Copy it with numba.cuda.to_device first.")


#: Value of kDLCUDA in dlpack.h.
_DLPACK_CUDA = 2


def available() -> bool:
    """Return True if there is a GPU with a driver."""
    return bool(cuda.is_available())


def to_device(values: np.ndarray) -> Any:
    """Return a copy of a NumPy array on the GPU."""
    return cuda.to_device(values)


class _Exporter:
    """DLPack export of an array without a stream, because TensorFlow refuses every requested stream."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __dlpack__(self, **_: Any) -> Any:
        return self._x.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._x.__dlpack_device__()


def _from_dlpack(x: Any) -> Any:
    from numba.cuda.cudadrv.devicearray import StridedMemoryView

    view = StridedMemoryView.from_dlpack(_Exporter(x), stream_ptr=-1)
    size = view.dtype.itemsize
    interface = {
        "shape": tuple(view.shape),
        "strides": None if view.strides is None else tuple(s * size for s in view.strides),
        "typestr": view.dtype.str,
        "data": (view.ptr, False),
        "version": 3,
    }
    return cuda.from_cuda_array_interface(interface, owner=view)


class _Arrays(NamedTuple):
    """Scratch arrays of the encoder's kernels on the GPU.

    Attributes:
        summary: int64[TALLIES + PER_RUN * R], results for the host.
        ends: int64[R], ends of the runs.
        taus: float32[R], taus of the runs.
        masks: uint32[ceil(n / 32)], one bit per element, 1 if it has an entry.
        prefixes: int64[regions * (chunks of a region + 1)], number of entries before each chunk of a region.
        starts: int64[regions], number of entries before each region.
        tiles: int64[largest possible number of tiles, COLUMNS], table of tiles.
        parameters: uint8[largest possible number of tiles, blocks of gaps], Rice parameters.
    """

    summary: Any
    ends: Any
    taus: Any
    masks: Any
    prefixes: Any
    starts: Any
    tiles: Any
    parameters: Any


class Scratch:
    """Scratch memory on the GPU that one encoder keeps between calls: about n / 6 bytes for n elements.

    Only one call at a time may use it, on one stream. A call of another size allocates it again.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._arrays: Any = None

    def arrays(self, n: int, runs: int, layout: Layout, stream: Any) -> _Arrays:
        """Return the scratch arrays for an update of n elements."""
        key = n, runs, layout
        if key != self._key:
            self._arrays = None
            regions, chunks = -(-n // layout.region), layout.region // math.gcd(CHUNK, layout.region)
            # A region has full tiles and one smaller tile. One shared tile may end before them, and another after them.
            most = min(n, regions * (layout.region // layout.tile_max + 3) + 1)
            shapes = _Arrays(
                summary=(TALLIES + PER_RUN * runs, np.int64),
                ends=(runs, np.int64),
                taus=(runs, np.float32),
                masks=(-(-n // 32), np.uint32),
                prefixes=(regions * (chunks + 1), np.int64),
                starts=(regions, np.int64),
                tiles=((most, COLUMNS), np.int64),
                parameters=((most, cuda_tiles.BLOCKS), np.uint8),
            )
            self._arrays = _Arrays(*(cuda.device_array(shape, dtype, stream=stream) for shape, dtype in shapes))
            self._key = key
        return self._arrays


def check(update: Sequence[Any], runs: Runs, stream: Any = None) -> int:
    """Return the index of the first element that cannot be sent (NaN, infinity, above `limit`), or -1.

    Args:
        update: C-contiguous float32 arrays on the GPU, read as one vector of n elements.
        runs: lengths and taus of the runs.
        stream: stream of numba.cuda; None for the default stream.

    Raises:
        TypeError: if an array is not on a GPU or not float32.
        ValueError: if an array is not contiguous, or if `runs` do not fit.
    """
    arrays = [_check_array(u, f"update[{i}]") for i, u in enumerate(update)]
    check_runs(runs, sum(a.size for a in arrays), "update")
    summary = cuda.to_device(_blank_summary(0), stream or 0)
    _find_fault(_cut(arrays, runs), runs, summary, stream or 0)
    fault = int(_to_host(summary, stream or 0)[FAULT])
    return -1 if fault == NO_FAULT else fault


def encode(
    update: Sequence[Any],
    residual: Any,
    runs: Runs,
    rice: bool = True,
    layout: Layout = LAYOUT,
    trusted: bool = False,
    stream: Any = None,
    scratch: Scratch | None = None,
    lookahead: float = 0.0,
) -> Encoded:
    """Add an update to a residual, and move the multiples of tau from the sum into entries.

    Args:
        update: C-contiguous float32 arrays on the GPU, read as one vector of n elements.
        residual: float32[n] on the GPU, each absolute value below its tau; changed in place unless there is a fault.
        runs: lengths and taus of the runs.
        rice: True for entropy-coded gaps, False for plain 32-bit positions.
        layout: borders of tiles.
        trusted: True if `check` has already passed the update; otherwise the update is read once more.
        stream: stream of numba.cuda; None for the default stream.
        scratch: scratch memory. Without it memory is allocated, and the GPU is idle meanwhile.
        lookahead: add (1 + lookahead) * update, and when the entries are found, subtract lookahead * update again. This
            takes a copy of the update and two more passes.

    Returns:
        The result of `reference.encode`, with the tiles on the GPU. Other streams must synchronise with this one before
        they use the tiles or the residual.

    Raises:
        TypeError: if an array is not on a GPU or not float32.
        ValueError: if an array is not contiguous or has another size, or if `runs` or `layout` do not fit.
    """
    arrays = [_check_array(u, f"update[{i}]") for i, u in enumerate(update)]
    residual = _check_array(residual, "residual")
    n = sum(a.size for a in arrays)
    check_runs(runs, n, "update")
    check_layout(layout)
    if residual.size != n:
        raise ValueError(f"residual: expected the {n} elements of the update, got {residual.size}.")
    if n == 0:
        return Encoded.of_fault(-1, 0)._replace(tiles=cuda.device_array(1, np.uint8)[:0])
    stream, (factor, back) = stream or 0, factors(lookahead)
    if lookahead:
        arrays = [
            _scaled(array, cuda.device_array(array.size, np.float32, stream=stream), factor, stream) for array in arrays
        ]
    coded = _encode(_cut(arrays, runs), residual, runs, rice, layout, trusted, stream, scratch or Scratch())
    if lookahead and coded.fault < 0:
        first = 0
        for array in arrays:
            if array.size:
                _scaled(array, array, back, stream)
                cuda_encode.subtract[_grid(array), cuda_encode.THREADS, stream](array, residual, first)
            first += array.size
    return coded


def _scaled(array: Any, out: Any, factor: np.float32, stream: Any) -> Any:
    """Write an array times a factor to `out`, and return it."""
    if array.size:
        cuda_encode.scale[_grid(array), cuda_encode.THREADS, stream](array, out, factor)
    return out


def _grid(array: Any) -> int:
    """Return the number of blocks to launch over the elements of an array."""
    return _blocks(-(-array.size // cuda_encode.THREADS), _BLOCKS_OF_ELEMENTS)


def _encode(pieces, residual, runs, rice, layout, trusted, stream, scratch) -> Encoded:
    """Launch the kernels of `encode`, with one wait for the GPU to read the summary."""
    number = len(runs.lengths)
    chunk = math.gcd(CHUNK, layout.region)
    work = scratch.arrays(residual.size, number, layout, stream)
    summary, masks, prefixes, starts, tiles = work.summary, work.masks, work.prefixes, work.starts, work.tiles
    summary.copy_to_device(_blank_summary(number), stream=stream)
    work.ends.copy_to_device(np.cumsum(runs.lengths), stream=stream)
    work.taus.copy_to_device(np.ascontiguousarray(runs.taus), stream=stream)

    threads, tile_threads = cuda_encode.THREADS, cuda_tiles.TILE_THREADS
    if not trusted:
        _find_fault(pieces, runs, summary, stream)
    for piece, run, first in pieces:
        grid = _blocks(piece.size // cuda_encode.SPAN + 2, _BLOCKS_OF_ELEMENTS)
        tally = TALLIES + PER_RUN * run
        cuda_encode.accumulate[grid, threads, stream](piece, residual, masks, summary, tally, first, runs.taus[run])
    grid = _blocks(starts.size, _BLOCKS_OF_ELEMENTS)
    cuda_encode.count[grid, threads, stream](masks, prefixes, summary, layout.region, chunk)
    cuda_encode.plan_tiles[_FEWEST_BLOCKS, threads, stream](
        prefixes, starts, tiles, summary, layout.region // chunk, *layout[1:]
    )
    shared = (residual, masks, prefixes, starts, work.ends, work.taus, tiles, work.parameters, summary,
              layout.region, chunk, bool(rice))  # fmt: skip
    cuda_tiles.size_tiles[_blocks(tiles.shape[0], _BLOCKS_OF_TILES), tile_threads, stream](*shared)
    cuda_encode.place[_FEWEST_BLOCKS, threads, stream](tiles, summary)

    host = _to_host(summary, stream)
    size = int(host[BYTES])
    words = cuda.device_array(max(-(-size // 4), 1), np.uint32, stream=stream)
    found = words.view(np.uint8)[:size]
    if host[FAULT] != NO_FAULT:
        return Encoded.of_fault(int(host[FAULT]), number)._replace(tiles=found)
    if size:
        cuda_encode.clear[_blocks(-(-words.size // threads), _BLOCKS_OF_ELEMENTS), threads, stream](words)
        grid = _blocks(int(host[TILES]), _BLOCKS_OF_TILES)
        cuda_tiles.write_tiles[grid, tile_threads, stream](*shared, words)
    tallies = host[TALLIES:].reshape(number, PER_RUN)
    return Encoded(found, tallies[:, 0].copy(), tallies[:, 1:].copy(), -1)


def _blank_summary(runs: int) -> np.ndarray:
    """Return an empty summary."""
    summary = np.zeros(TALLIES + PER_RUN * runs, np.int64)
    summary[FAULT] = NO_FAULT
    return summary


def _find_fault(pieces, runs, summary, stream) -> None:
    """Launch the kernel that writes the index of the first fault into the summary."""
    limits = limit(runs.taus)
    for piece, run, first in pieces:
        grid = _blocks(-(-piece.size // cuda_encode.SPAN), _BLOCKS_OF_ELEMENTS)
        cuda_encode.find_fault[grid, cuda_encode.THREADS, stream](piece, summary, first, limits[run])


def _cut(arrays, runs) -> list[tuple[Any, int, int]]:
    """Divide arrays into pieces of one array and one run: (elements, run, index of the first element), in order."""
    pieces, run, left, first = [], -1, 0, 0
    for array in arrays:
        done = 0
        while done < array.size:
            if left == 0:
                run += 1
                left = int(runs.lengths[run])
            length = min(left, array.size - done)
            # A slice costs more time than a launch, so whole arrays are used without one.
            pieces.append((array if length == array.size else array[done : done + length], run, first))
            done, left, first = done + length, left - length, first + length
    return pieces


def decode(messages: Sequence[tuple[Any, Runs]], scale: float, out: Any, rice: bool = True, stream: Any = None) -> None:
    """Add messages to `out`, one after another: out[i] += +-float32(m * tau) * scale, each step rounded to float32.

    Args:
        messages: (tiles, runs) of each message, in the order of the additions; tiles are uint8[bytes] on the host or on
            the GPU.
        scale: float32 factor.
        out: C-contiguous float32 array on the GPU, or a list of them that is read as one vector; changed in place. Each
            message takes one launch per array, so one long array is fastest.
        rice: True if gaps are entropy-coded, False for plain positions.
        stream: stream of numba.cuda; None for the default stream.

    Raises:
        Malformed: if a message is invalid. `out` is unchanged, and the error's `message` is the message's position.
        TypeError: if an array is not on a GPU or has another dtype.
        ValueError: if an array is not contiguous, or if `runs` do not fit.
    """
    arrays = out if isinstance(out, list | tuple) else [out]
    arrays = [_check_array(o, f"out[{i}]") for i, o in enumerate(arrays)]
    n, stream = sum(o.size for o in arrays), stream or 0
    data, tables = [], []
    for number, (tiles, runs) in enumerate(messages):
        check_runs(runs, n, "out")
        data.append(_check_bytes(tiles, f"messages[{number}]", stream))
        try:
            tables.append(table(data[-1], n))
            # Each entry takes at least one bit, its sign. This check comes before memory is allocated for the entries.
            if (tables[-1][:, ENTRIES] > 8 * tables[-1][:, LENGTH]).any():
                raise Malformed("a payload shorter than its entries")
        except Malformed as error:
            raise Malformed(str(error), number) from None
    entries = np.array([rows[:, ENTRIES].sum() for rows in tables], np.int64)
    if not entries.sum():
        return
    index, value = _read(data, tables, [runs for _, runs in messages], np.float32(scale), rice, stream)
    last = np.cumsum(entries)
    for begin, end in zip(last - entries, last, strict=True):
        first = 0
        for o in arrays:
            if o.size and end > begin:
                grid = _blocks(-(-int(end - begin) // cuda_decode.THREADS), _BLOCKS_OF_ELEMENTS)
                cuda_decode.add[grid, cuda_decode.THREADS, stream](o, index[begin:end], value[begin:end], first)
            first += o.size


def _read(data, tables, runs, scale, rice, stream):
    """Check and read all tiles of all messages; return int64[e] indices and the float32[e] values to add there."""
    before = np.cumsum([0, *(d.size for d in data)])
    lines = np.cumsum([0, *(len(r.lengths) for r in runs)])
    rows = np.zeros((sum(map(len, tables)), ROW), np.int64)
    spans = np.stack([lines[:-1], lines[1:]], axis=1)
    first = 0
    for number, found in enumerate(tables):
        mine = rows[first : first + len(found)]
        mine[:, : found.shape[1]] = found
        mine[:, START] += before[number]
        mine[:, cuda_decode.MESSAGE] = number
        first += len(found)
    last = np.cumsum(rows[:, ENTRIES])
    rows[:, cuda_decode.OUT] = last - rows[:, ENTRIES]
    # The kernel may read two words beyond the end.
    padded = np.zeros(int(before[-1]) // 4 + 3, np.uint32)
    padded.view(np.uint8)[: before[-1]] = np.concatenate(data)

    words, on_device = cuda.to_device(padded, stream), cuda.to_device(rows, stream)
    ends = cuda.to_device(np.concatenate([np.cumsum(r.lengths, dtype=np.int64) for r in runs]), stream)
    taus = cuda.to_device(np.concatenate([np.asarray(r.taus, np.float32) for r in runs]), stream)
    spans = cuda.to_device(spans, stream)
    index = cuda.device_array(int(last[-1]), np.int64, stream=stream)
    value = cuda.device_array(int(last[-1]), np.float32, stream=stream)
    status = cuda.to_device(np.full(1, NO_ERROR, np.int64), stream)
    grid = max(_FEWEST_BLOCKS, -(-len(rows) // cuda_decode.READERS))
    cuda_decode.read_tiles[grid, cuda_decode.READERS, stream](
        words, on_device, spans, ends, taus, scale, index, value, status, bool(rice)
    )
    worst = int(_to_host(status, stream)[0])
    if worst != NO_ERROR:
        row, error = divmod(worst, len(ERRORS))
        raise Malformed(ERRORS[error], int(rows[row, cuda_decode.MESSAGE]))
    return index, value


def _to_host(array, stream) -> np.ndarray:
    """Return a copy on the host, after all earlier work on the stream."""
    host = array.copy_to_host(stream=stream)
    if stream:
        stream.synchronize()
    return host


def _blocks(work: int, each: int) -> int:
    """Return the number of blocks to launch for `work` iterations of a block, at most `each` for a multiprocessor."""
    # The simulator's device lacks the attribute, and is slow with many blocks.
    most = each * getattr(cuda.get_current_device(), "MULTIPROCESSOR_COUNT", 1)
    return max(_FEWEST_BLOCKS, min(work, most))


def _check_array(x: Any, name: str) -> Any:
    """Return a flat view of a float32 array on the GPU; raise TypeError or ValueError if it is another array."""
    array = as_device(x, name)
    if array.dtype != np.float32:
        raise TypeError(f"{name}: expected float32, got {array.dtype}. Cast it first.")
    if not array.is_c_contiguous():
        raise ValueError(f"{name}: expected a C-contiguous array, got strides {tuple(array.strides)}. Copy it first.")
    return array if array.ndim == 1 else array.reshape(array.size)


def _check_bytes(tiles: Any, name: str, stream: Any) -> np.ndarray:
    """Return the tiles on the host; raise TypeError if they are not uint8[bytes]."""
    if not isinstance(tiles, np.ndarray):
        tiles = _to_host(as_device(tiles, name), stream)
    if tiles.dtype != np.uint8 or tiles.ndim != 1:
        raise TypeError(f"{name}: expected tiles as uint8[bytes], got {tiles.dtype} of {tiles.ndim} dimensions.")
    return np.ascontiguousarray(tiles)
