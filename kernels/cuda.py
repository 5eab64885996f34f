"""Threshold kernels on an NVIDIA GPU, in Numba CUDA. Their bytes and sums equal those of `reference`, bit for bit.

The import needs neither a GPU nor a driver. Kernels are compiled at their first launch. With HVDX_CUDA_SIMULATOR=1 in
the environment, Numba's simulator runs them on the CPU, thousands of times slower.

The numbers of launches and copies do not depend on the numbers of arrays, runs and messages. `encode` launches 8
kernels, and waits for the GPU once, for the size of its tiles. `decode` launches 3, and waits once, for the outcome of
its checks.

Who waits for whom: the work of a function on the GPU is in the order of the stream that it is given. The caller's work
that fills the arrays must be on the same stream, or have finished. When a function returns, it has waited for the
stream, and what it changed is final. The exception is `encode`: its tiles and the residual are final after the next
wait for the stream, such as the copy of the tiles to the host. Without a stream the functions use CUDA's default
stream. It waits for other streams, unless these were made non-blocking, as TensorFlow's and the side streams of PyTorch
are.
"""

import importlib.util
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

if importlib.util.find_spec("numba_cuda") is None:
    raise ImportError("hvdx.kernels.cuda: expected the package numba-cuda, got none. Do: pip install 'hvdx[cuda]'")

from numba.core import config

if os.environ.get("HVDX_CUDA_SIMULATOR") == "1":
    vars(config)["ENABLE_CUDASIM"] = 1  # before the import of numba.cuda, which looks at it once

from numba import boolean, cuda, float32, int64, types, uint8, uint32
from numba.core.typing.templates import Signature

from hvdx.kernels import cuda_decode, cuda_encode, cuda_tiles
from hvdx.kernels.arrays import (
    AnyArray,
    DeviceArray,
    Exportable,
    Float32Array,
    Int64Array,
    Kernel,
    Stream,
    StreamLike,
    UInt8Array,
)
from hvdx.kernels.cuda_decode import ERRORS, MARKS, NO_ERROR, ROW
from hvdx.kernels.cuda_device import SIMULATED
from hvdx.kernels.cuda_encode import BYTES, CHUNK, COLUMNS, FAULT, NO_FAULT, TALLIES, TILES
from hvdx.kernels.pieces import check_runs, pieces, sampled
from hvdx.kernels.table import ENTRIES, LENGTH, START, table
from hvdx.kernels.tiles import BLOCK, LAYOUT, Encoded, Layout, Malformed, Runs, check_layout, factors, limit

#: Largest number of blocks of a launch for each multiprocessor. Over elements: several times the blocks that run at
#: once, so that little is idle at the end. Over tiles: the blocks that run at once, given their shared memory.
_BLOCKS_OF_ELEMENTS, _BLOCKS_OF_TILES = (3, 2) if SIMULATED else (64, 4)
#: Smallest number of blocks of a launch. Numba warns of fewer; surplus blocks have no work.
_FEWEST_BLOCKS = 2 if SIMULATED else 128
#: Number of elements that a block of `add` takes at a time: at least, and at most.
_LEAST_SPAN, _MOST_SPAN = 64 if SIMULATED else 1 << 11, 1 << 16

_TABLE = int64[:, ::1]
_TILE_ARGUMENTS = (
    *(float32[::1], uint32[::1], *[int64[::1]] * 3, float32[::1]),
    *(_TABLE, uint8[:, ::1], int64[::1], int64, int64, boolean),
)

#: Kernels by name, each with the argument types of its launches.
KERNELS = {
    "find_fault": (cuda_encode.find_fault, (_TABLE, float32[::1], int64[::1], float32)),
    "accumulate": (
        cuda_encode.accumulate,
        (_TABLE, int64[::1], *[float32[::1]] * 2, uint32[::1], int64[::1], float32, float32),
    ),
    "sample": (cuda_encode.sample, (_TABLE, float32[::1], int64[::1], float32[:, ::1])),
    "subtract": (cuda_encode.subtract, (float32[::1], float32[::1])),
    "count": (cuda_encode.count, (uint32[::1], int64[::1], int64[::1], int64, int64)),
    "plan_tiles": (cuda_encode.plan_tiles, (*[int64[::1]] * 7, _TABLE, int64[::1], *[int64] * 5)),
    "place": (cuda_encode.place, (_TABLE, int64[::1])),
    "clear": (cuda_encode.clear, (uint32[::1],)),
    "size_tiles": (cuda_tiles.size_tiles, _TILE_ARGUMENTS),
    "write_tiles": (cuda_tiles.write_tiles, (*_TILE_ARGUMENTS, uint32[::1], _TABLE, float32, float32)),
    "check_tiles": (cuda_decode.check_tiles, (uint32[::1], _TABLE, _TABLE, int64[::1], boolean)),
    "read_blocks": (
        cuda_decode.read_blocks,
        (
            *(uint32[::1], _TABLE, _TABLE, _TABLE, int64[::1], float32[::1], float32),
            *(int64[::1], float32[::1], int64[::1], boolean),
        ),
    ),
    "add": (cuda_decode.add, (_TABLE, _TABLE, int64[::1], float32[::1], int64, int64[::1])),
}


def signatures() -> dict[str, tuple[Kernel, Signature]]:
    """Return the dispatcher and the signature of every kernel by name."""
    return {name: (kernel, types.void(*arguments)) for name, (kernel, arguments) in KERNELS.items()}


def as_device(x: object, name: str = "array", stream: StreamLike = None) -> DeviceArray:
    """Return an array on the GPU as an array of Numba, without a copy.

    Args:
        x: array of Numba, or with `__cuda_array_interface__` (PyTorch, CuPy, ...), or with `__dlpack__`. If the array
            interface names a stream, this function waits for it. A library with DLPack is told `stream`, and makes it
            wait for the work that fills x, if it accepts a stream. TensorFlow accepts none, and waits itself.
        name: name of the array, for errors.
        stream: stream of the work that will use the array; see the module.

    Returns:
        Numba's DeviceNDArray of the same shape and dtype, which keeps x alive.

    Raises:
        TypeError: if x is not an array on a GPU.
        ValueError: if DLPack gives an array on another GPU than this thread's.
    """
    if getattr(x, "__cuda_ndarray__", False):
        return cast("DeviceArray", x)
    if hasattr(x, "__cuda_array_interface__"):
        return cast("DeviceArray", cuda.as_cuda_array(x))
    if hasattr(x, "__dlpack_device__") and not isinstance(x, np.ndarray):
        exportable = cast("Exportable", x)
        kind = int(exportable.__dlpack_device__()[0])
        if SIMULATED and kind == _DLPACK_CPU:
            return _simulated(exportable)
        if kind == _DLPACK_CUDA:
            return _from_dlpack(exportable, name, stream)
    found = f"{type(x).__module__}.{type(x).__qualname__}"
    raise TypeError(f"{name}: expected an array on a GPU, got {found}. Copy it with numba.cuda.to_device first.")


#: Values of kDLCPU and kDLCUDA in dlpack.h, and DLPack's number for CUDA's default stream.
_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_DEFAULT_STREAM = 1, 2, 1


def available() -> bool:
    """Return True if there is a GPU with a driver, or if the simulator runs."""
    return bool(cuda.is_available())


def number() -> int:
    """Return the number of GPUs, as CUDA counts them."""
    return len(cuda.gpus)


def on(index: int | None) -> AbstractContextManager[object]:
    """Return a context in which this thread uses the GPU with an index, or the one that it uses anyway for None."""
    return nullcontext() if index is None else cast("AbstractContextManager[object]", cuda.gpus[index])


def to_device(values: AnyArray) -> DeviceArray:
    """Return a copy of a NumPy array on the GPU."""
    return cast("DeviceArray", cuda.to_device(values))


def _device_array(shape: int | tuple[int, ...], dtype: npt.DTypeLike, stream: Stream | int = 0) -> DeviceArray:
    """Return uninitialised memory on the GPU."""
    array: DeviceArray = cuda.device_array(shape, dtype, stream=stream)
    return array


def as_stream(stream: StreamLike) -> Stream | int:
    """Return a stream of Numba.

    Args:
        stream: stream of numba.cuda, or address of a stream of CUDA, such as `torch.cuda.current_stream().cuda_stream`;
            None or 0 for the default stream.

    Raises:
        TypeError: if it is something else.
    """
    if stream is None or (isinstance(stream, int) and stream == 0):
        return 0
    if isinstance(stream, int) and not isinstance(stream, bool):
        return cast("Stream", cuda.external_stream(stream))
    if hasattr(stream, "synchronize") and (SIMULATED or hasattr(stream, "handle")):
        return stream
    raise TypeError(
        f"stream: expected a stream of numba.cuda or the address of a stream, got {type(stream).__name__}. Do: pass "
        "torch.cuda.current_stream().cuda_stream, or cupy.cuda.get_current_stream().ptr"
    )


class Exporter:
    """DLPack export of an array for a stream, also if the array's library refuses every stream, as TensorFlow does.

    Such a library must wait itself until the array is filled.

    Args:
        x: array with `__dlpack__`.
    """

    def __init__(self, x: Exportable) -> None:
        self._x = x

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        if stream is not None and stream != -1:
            try:
                return self._x.__dlpack__(stream=stream)
            except (TypeError, RuntimeError, BufferError, NotImplementedError):
                pass
        return self._x.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._x.__dlpack_device__()


def _from_dlpack(x: Exportable, name: str, stream: StreamLike) -> DeviceArray:
    from numba.cuda.cudadrv.devicearray import StridedMemoryView
    from numba.cuda.cudadrv.driver import binding, driver

    pointer = int(cast("int", stream)) if stream else _DLPACK_DEFAULT_STREAM
    view = StridedMemoryView.from_dlpack(Exporter(x), stream_ptr=pointer)
    if view.ptr:
        ordinal = binding.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        index = int(driver.cuPointerGetAttribute(ordinal, binding.CUdeviceptr(view.ptr)))
        current = cuda.current_context().device.id
        if index != current:
            raise ValueError(
                f"{name}: expected an array on GPU {current}, which this thread uses, got one on GPU {index}. Give "
                "each process one GPU (CUDA_VISIBLE_DEVICES)."
            )
    size = view.dtype.itemsize
    interface = {
        "shape": tuple(view.shape),
        "strides": None if view.strides is None else tuple(s * size for s in view.strides),
        "typestr": view.dtype.str,
        "data": (view.ptr, False),
        "version": 3,
    }
    return cast("DeviceArray", cuda.from_cuda_array_interface(interface, owner=view))


def _simulated(x: Exportable) -> DeviceArray:
    """Return an array in host memory as one of the simulator, writable, because an array of a GPU would be, too."""
    import ctypes

    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    view = np.from_dlpack(Exporter(x))  # type: ignore[arg-type]
    memory = (ctypes.c_byte * view.nbytes).from_address(view.ctypes.data)
    memory.owner = view, x  # type: ignore[attr-defined]
    array = np.frombuffer(memory, view.dtype).reshape(view.shape)  # type: ignore[call-overload]
    return cast("DeviceArray", FakeCUDAArray(array))


def _address(array: DeviceArray) -> int:
    """Return the address of the first element of an array of Numba."""
    return int(array.ctypes.data if SIMULATED else array.__cuda_array_interface__["data"][0])


class _Arrays(NamedTuple):
    """Arrays of the encoder's kernels on the GPU.

    Attributes:
        numbers: int64[...], `summary`, `ends` and `pieces`, which are parts of it, copied to the GPU at once.
        summary: int64[TALLIES + R], results for the host.
        ends: int64[R], ends of the runs.
        pieces: int64[P, 4], table of pieces.
        floats: float32[2 * R], `taus` and `limits`, which are parts of it.
        taus: float32[R], taus of the runs.
        limits: float32[R], largest absolute values in the update.
        masks: uint32[ceil(n / 32)], one bit per element, 1 if it has an entry.
        prefixes: int64[regions * (chunks of a region + 1)], number of entries before each chunk of a region.
        starts: int64[regions], number of entries before each region.
        plan: five arrays int64[regions], scratch of `plan_tiles`.
        tiles: int64[largest possible number of tiles, COLUMNS], table of tiles.
        parameters: uint8[largest possible number of tiles, blocks of gaps], Rice parameters.
    """

    numbers: DeviceArray
    summary: DeviceArray
    ends: DeviceArray
    pieces: DeviceArray
    floats: DeviceArray
    taus: DeviceArray
    limits: DeviceArray
    masks: DeviceArray
    prefixes: DeviceArray
    starts: DeviceArray
    plan: list[DeviceArray]
    tiles: DeviceArray
    parameters: DeviceArray


class Scratch:
    """Memory on the GPU that is kept between calls.

    `encode` takes about n / 6 bytes for n elements, and its tiles; `decode` takes the messages, and 13 bytes an entry.
    Only one call at a time may use it, on one stream. It grows when it must, which waits for the GPU.
    """

    def __init__(self) -> None:
        self._key: tuple[int, int, int, Layout] | None = None
        self._arrays: _Arrays | None = None
        self._buffers: dict[str, DeviceArray] = {}
        self._host: UInt8Array = np.empty(0, np.uint8)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, stream: Stream | int) -> DeviceArray:
        """Return uninitialised memory that the next call with this name may return again."""
        size = math.prod(shape)
        kept = self._buffers.get(name)
        if kept is None or kept.size < size:
            self._buffers.pop(name, None)
            # A quarter more, so that messages of slowly growing sizes do not allocate each time.
            self._buffers[name] = kept = _device_array(size + size // 4, dtype, stream)
        flat = kept if kept.size == size else kept[:size]
        return flat if len(shape) == 1 else flat.reshape(*shape)

    def staging(self, size: int) -> UInt8Array:
        """Return uint8[size] of uninitialised page-locked memory on the host, which the next call may return again.

        A copy from it to the GPU takes a sixth of the time of one from other memory, whose pages are new in each call.
        """
        if self._host.size < size:
            self._host = cuda.pinned_array(size + size // 4, np.uint8)
        return self._host[:size]

    def arrays(self, n: int, runs: int, pieces: int, layout: Layout, stream: Stream | int) -> _Arrays:
        """Return the arrays for an update of n elements, runs and pieces."""
        key = n, runs, pieces, layout
        if self._arrays is None or key != self._key:
            self._arrays = None
            regions, chunks = -(-n // layout.region), layout.region // math.gcd(CHUNK, layout.region)
            # A region has full tiles and one smaller tile. One shared tile may end before them, and another after them.
            most = min(n, regions * (layout.region // layout.tile_max + 3) + 1)

            def array(shape: int | tuple[int, int], dtype: npt.DTypeLike) -> DeviceArray:
                return _device_array(shape, dtype, stream)

            tallies = TALLIES + runs
            numbers, floats = array(tallies + runs + 4 * pieces, np.int64), array(2 * runs, np.float32)
            self._arrays = _Arrays(
                numbers=numbers,
                summary=numbers[:tallies],
                ends=numbers[tallies : tallies + runs],
                pieces=numbers[tallies + runs :].reshape(pieces, 4),
                floats=floats,
                taus=floats[:runs],
                limits=floats[runs:],
                masks=array(-(-n // 32), np.uint32),
                prefixes=array(regions * (chunks + 1), np.int64),
                starts=array(regions, np.int64),
                plan=[array(regions, np.int64) for _ in range(5)],
                tiles=array((most, COLUMNS), np.int64),
                parameters=array((most, cuda_tiles.BLOCKS), np.uint8),
            )
            self._key = key
        return self._arrays


def check(update: Sequence[object], runs: Runs, stream: StreamLike = None) -> int:
    """Return the index of the first element that cannot be sent (NaN, infinity, above `limit`), or -1.

    Args:
        update: C-contiguous float32 arrays on the GPU, read as one vector of n elements.
        runs: lengths and taus of the runs.
        stream: stream of the kernels; see the module, and `as_stream`.

    Raises:
        TypeError: if an array is not on a GPU or not float32.
        ValueError: if an array is not contiguous, or if `runs` do not fit.
    """
    stream = as_stream(stream)
    where, n = _locate(update, "update", stream)
    check_runs(runs, n, "update")
    if n == 0:
        return -1
    summary = cuda.to_device(_blank_summary(0), stream)
    limits = cuda.to_device(limit(runs.taus), stream)
    _find_fault(cuda.to_device(pieces(where, runs), stream), limits, summary, np.float32(1), n, stream)
    fault = int(to_host(summary, stream)[FAULT])
    return -1 if fault == NO_FAULT else fault


def sample(update: Sequence[object], residual: object, lines: Int64Array, stream: StreamLike = None) -> Float32Array:
    """Copy some lines of LINE neighbours, and those of the residual.

    Args:
        update: C-contiguous float32 arrays on the GPU, read as one vector of n elements.
        residual: float32[n] on the GPU.
        lines: int64[lines] in host memory; see `cpu.sample`.
        stream: see the module.

    Returns:
        The result of `cpu.sample`, float32[2, elements], in host memory.

    Raises:
        TypeError: if an array is not on a GPU or not float32.
        ValueError: if an array is not contiguous or has another size, or if there is no such line.
    """
    stream = as_stream(stream)
    where, n = _locate(update, "update", stream)
    residual = _check_array(residual, "residual", stream)
    if residual.size != n:
        raise ValueError(f"residual: expected the {n} elements of the update, got {residual.size}.")
    count = sampled(n, lines)
    if not count:
        return np.zeros((2, 0), np.float32)
    out = _device_array((2, count), np.float32, stream)
    whole = Runs(np.array([n]), np.ones(1, np.float32))
    cuda_encode.sample[_grid(count), cuda_encode.THREADS, stream](
        cuda.to_device(pieces(where, whole), stream), residual, cuda.to_device(lines, stream), out
    )
    return to_host(out, stream)


def clear(array: DeviceArray) -> DeviceArray:
    """Set a float32 array on the GPU to zero, and return it."""
    flat = _check_array(array, "array", 0)
    if flat.size:
        cuda_encode.clear[_grid(flat.size), cuda_encode.THREADS](flat.view(np.uint32))
        cuda.synchronize()
    return array


def zeros(n: int) -> DeviceArray:
    """Return a new float32[n] of zeros on the GPU."""
    return clear(_device_array(n, np.float32))


def copy(values: object, out: object) -> None:
    """Copy a float32 array on the GPU to another one, and wait for it."""
    as_device(out).copy_to_device(as_device(values))
    cuda.synchronize()


def subtract(values: object, out: object, stream: StreamLike = None) -> None:
    """Subtract a float32 array on the GPU from another one."""
    _each(cuda_encode.subtract, values, out, stream)


def _each(kernel: Kernel, values: object, out: object, stream: StreamLike) -> None:
    """Launch a kernel over the elements of two arrays, and wait for it."""
    queue = as_stream(stream)
    added, to = _check_array(values, "values", queue), _check_array(out, "out", queue)
    if added.size != to.size:
        raise ValueError(f"values: expected the {to.size} elements of out, got {added.size}.")
    if to.size:
        kernel[_grid(to.size), cuda_encode.THREADS, queue](added, to)
        cuda.synchronize() if isinstance(queue, int) else queue.synchronize()


def encode(
    update: Sequence[object],
    residual: object,
    runs: Runs,
    rice: bool = True,
    layout: Layout = LAYOUT,
    trusted: bool = False,
    stream: StreamLike = None,
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
        stream: stream of the kernels; see the module, and `as_stream`.
        scratch: scratch memory. Without it memory is allocated, and the GPU is idle meanwhile.
        lookahead: add (1 + lookahead) * update, and when the entries are found, subtract lookahead * update again.

    Returns:
        The result of `reference.encode`, with the tiles on the GPU, in `scratch` until the next call. The tiles and the
        residual may still be written on the stream.

    Raises:
        TypeError: if an array is not on a GPU or not float32.
        ValueError: if an array is not contiguous or has another size, or if `runs` or `layout` do not fit.
    """
    stream = as_stream(stream)
    where, n = _locate(update, "update", stream)
    residual = _check_array(residual, "residual", stream)
    check_runs(runs, n, "update")
    check_layout(layout)
    if residual.size != n:
        raise ValueError(f"residual: expected the {n} elements of the update, got {residual.size}.")
    if n == 0:
        return Encoded.of_fault(-1, 0)._replace(tiles=_as_tiles(_device_array(1, np.uint8)[:0]))
    return _encode(pieces(where, runs), residual, runs, rice, layout, trusted, stream, scratch or Scratch(), lookahead)


def _grid(items: int, each: int = cuda_encode.THREADS) -> int:
    """Return the number of blocks to launch over elements, of which a block takes `each` at a time."""
    return _blocks(-(-items // each), _BLOCKS_OF_ELEMENTS)


def _encode(
    where: Int64Array, residual: DeviceArray, runs: Runs, rice: bool, layout: Layout, trusted: bool,
    stream: Stream | int, scratch: Scratch, lookahead: float,
) -> Encoded:  # fmt: skip
    """Launch the kernels of `encode`, with one wait for the GPU to read the summary."""
    number, n, (factor, back) = len(runs.lengths), residual.size, factors(lookahead)
    chunk = math.gcd(CHUNK, layout.region)
    work = scratch.arrays(n, number, len(where), layout, stream)
    summary, masks, prefixes, starts, tiles = work.summary, work.masks, work.prefixes, work.starts, work.tiles
    numbers = np.concatenate([_blank_summary(number), np.cumsum(runs.lengths), where.reshape(-1)])
    work.numbers.copy_to_device(numbers, stream=stream)
    work.floats.copy_to_device(np.concatenate([runs.taus, limit(runs.taus)]), stream=stream)

    threads, tile_threads = cuda_encode.THREADS, cuda_tiles.TILE_THREADS
    if not trusted:
        _find_fault(work.pieces, work.limits, summary, factor, n, stream)
    cuda_encode.accumulate[_grid(n, cuda_encode.SPAN), threads, stream](
        work.pieces, work.ends, work.taus, residual, masks, summary, factor, back
    )
    grid = _blocks(starts.size, _BLOCKS_OF_ELEMENTS)
    cuda_encode.count[grid, threads, stream](masks, prefixes, summary, layout.region, chunk)
    cuda_encode.plan_tiles[_FEWEST_BLOCKS, threads, stream](
        prefixes, starts, *work.plan, tiles, summary, layout.region // chunk, *layout[1:]
    )
    shared = (residual, masks, prefixes, starts, work.ends, work.taus, tiles, work.parameters, summary,
              layout.region, chunk, bool(rice))  # fmt: skip
    cuda_tiles.size_tiles[_blocks(tiles.shape[0], _BLOCKS_OF_TILES), tile_threads, stream](*shared)
    cuda_encode.place[_FEWEST_BLOCKS, threads, stream](tiles, summary)

    host = to_host(summary, stream)
    size = int(host[BYTES])
    words = scratch.buffer("tiles", (max(-(-size // 4), 1),), np.uint32, stream)
    found = words.view(np.uint8)[:size]
    if host[FAULT] != NO_FAULT:
        return Encoded.of_fault(int(host[FAULT]), number)._replace(tiles=_as_tiles(found))
    if size:
        cuda_encode.clear[_grid(words.size), threads, stream](words)
        grid = _blocks(int(host[TILES]), _BLOCKS_OF_TILES)
        cuda_tiles.write_tiles[grid, tile_threads, stream](*shared, words, work.pieces, factor, back)
    return Encoded(_as_tiles(found), host[TALLIES:].copy(), -1)


def _as_tiles(tiles: DeviceArray) -> UInt8Array:
    """Return tiles on the GPU as the type that `Encoded` names. Its user knows where they are."""
    return cast("UInt8Array", tiles)


def _blank_summary(runs: int) -> Int64Array:
    """Return an empty summary."""
    summary = np.zeros(TALLIES + runs, np.int64)
    summary[FAULT] = NO_FAULT
    return summary


def _find_fault(
    where: DeviceArray, limits: DeviceArray, summary: DeviceArray, factor: np.float32, n: int, stream: Stream | int
) -> None:
    """Launch the kernel that writes the index of the first fault into the summary."""
    cuda_encode.find_fault[_grid(n, cuda_encode.SPAN), cuda_encode.THREADS, stream](where, limits, summary, factor)


def decode(
    messages: Sequence[tuple[object, Runs]],
    scale: float,
    out: object,
    rice: bool = True,
    stream: StreamLike = None,
    scratch: Scratch | None = None,
) -> None:
    """Add messages to `out`, one after another: out[i] += +-float32(m * tau) * scale, each step rounded to float32.

    Args:
        messages: (tiles, runs) of each message, in the order of the additions; tiles are uint8[bytes] on the host or on
            the GPU.
        scale: float32 factor.
        out: C-contiguous float32 array on the GPU, or a list of them that is read as one vector; changed in place. One
            long array is fastest.
        rice: True if gaps are entropy-coded, False for plain positions.
        stream: stream of the kernels; see the module, and `as_stream`.
        scratch: see `encode`.

    Raises:
        Malformed: if a message is invalid. `out` is unchanged, and the error's `message` is the message's position.
        TypeError: if an array is not on a GPU or has another dtype.
        ValueError: if an array is not contiguous, or if `runs` do not fit.
    """
    stream = as_stream(stream)
    where, n = _locate(out if isinstance(out, list | tuple) else [out], "out", stream)
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
    if any(map(len, tables)):
        whole = Runs(np.array([n]), np.ones(1, np.float32))
        everyone = [runs for _, runs in messages]
        _decode(data, tables, everyone, np.float32(scale), pieces(where, whole), n, rice, stream, scratch or Scratch())


def _decode(
    data: list[UInt8Array], tables: list[Int64Array], runs: list[Runs], scale: np.float32, where: Int64Array, n: int,
    rice: bool, stream: Stream | int, scratch: Scratch,
) -> None:  # fmt: skip
    """Launch the kernels of `decode`, with one wait for the GPU at the end, to read the status."""
    rows, messages = _joined(tables, [d.size for d in data], runs)
    entries, blocks = int(messages[-1, cuda_decode.STOP]), int(_blocks_of(rows).sum())
    ends = np.concatenate([np.cumsum(r.lengths, dtype=np.int64) for r in runs])
    taus = np.concatenate([np.asarray(r.taus, np.float32) for r in runs])
    # The kernels may read two words beyond the end. The copy from this memory has ended when the status is here.
    size = sum(d.size for d in data)
    staged = scratch.staging(4 * (size // 4 + 3))
    np.concatenate(data, out=staged[:size])
    staged[size:] = 0
    padded = staged.view(np.uint32)

    def copied(name: str, values: AnyArray) -> DeviceArray:
        array = scratch.buffer(name, values.shape, values.dtype, stream)
        array.copy_to_device(values, stream=stream)
        return array

    words, gpu_taus = copied("words", padded), copied("taus", taus)
    parts = [np.array([NO_ERROR]), ends, rows.reshape(-1), messages.reshape(-1), where.reshape(-1)]
    numbers = copied("numbers", np.concatenate(parts))
    borders = np.cumsum([len(p) for p in parts]).tolist()
    status, gpu_ends, gpu_rows, gpu_messages, gpu_where = (
        numbers[stop - len(part) : stop] if table is None else numbers[stop - len(part) : stop].reshape(*table.shape)
        for part, stop, table in zip(parts, borders, [None, None, rows, messages, where], strict=True)
    )
    marks = scratch.buffer("marks", (blocks, MARKS), np.int64, stream)
    index = scratch.buffer("index", (entries,), np.int64, stream)
    value = scratch.buffer("value", (entries,), np.float32, stream)

    readers, rice = cuda_decode.READERS, bool(rice)
    grid = max(_FEWEST_BLOCKS, -(-rows.shape[0] // readers))
    cuda_decode.check_tiles[grid, readers, stream](words, gpu_rows, marks, status, rice)
    grid = max(_FEWEST_BLOCKS, -(-blocks // readers))
    cuda_decode.read_blocks[grid, readers, stream](
        words, gpu_rows, marks, gpu_messages, gpu_ends, gpu_taus, scale, index, value, status, rice
    )
    # Twice the blocks of a launch at least, while there are elements enough.
    span = min(max(n // (2 * _blocks(n, _BLOCKS_OF_ELEMENTS)), _LEAST_SPAN), _MOST_SPAN)
    cuda_decode.add[_grid(n, span), cuda_decode.THREADS, stream](gpu_where, gpu_messages, index, value, span, status)
    worst = int(to_host(status, stream)[0])
    if worst != NO_ERROR:
        row, error = divmod(worst, len(ERRORS))
        raise Malformed(ERRORS[error], int(np.searchsorted(np.cumsum([len(t) for t in tables]), row, side="right")))


def _joined(tables: list[Int64Array], sizes: list[int], runs: list[Runs]) -> tuple[Int64Array, Int64Array]:
    """Return the tables of all messages as one, int64[tiles, ROW], and the table of messages, int64[M, 4]."""
    before, counts = np.cumsum([0, *sizes]), [len(found) for found in tables]
    rows = np.zeros((sum(counts), ROW), np.int64)
    rows[:, : tables[0].shape[1]] = np.concatenate(tables)
    rows[:, cuda_decode.MESSAGE] = np.repeat(np.arange(len(tables)), counts)
    rows[:, START] += before[rows[:, cuda_decode.MESSAGE]]
    rows[:, cuda_decode.OUT] = np.cumsum(rows[:, ENTRIES]) - rows[:, ENTRIES]
    blocks = _blocks_of(rows)
    rows[:, cuda_decode.MARK] = np.cumsum(blocks) - blocks
    lines = np.cumsum([0, *(len(r.lengths) for r in runs)])
    stops = np.cumsum([found[:, ENTRIES].sum() for found in tables])
    starts = np.concatenate([[0], stops[:-1]])
    return rows, np.stack([lines[:-1], lines[1:], starts, stops], axis=1).astype(np.int64)


def _blocks_of(rows: Int64Array) -> Int64Array:
    """Return the number of blocks of each tile. The first entry belongs to the first block."""
    return np.maximum(-(-(rows[:, ENTRIES] - 1) // BLOCK), 1)


def to_host(array: DeviceArray, stream: StreamLike = None) -> AnyArray:
    """Return a copy on the host, after all earlier work on the stream."""
    queue = as_stream(stream)
    host = array.copy_to_host(stream=queue)
    if not isinstance(queue, int):
        queue.synchronize()
    return host


def _blocks(work: int, each: int) -> int:
    """Return the number of blocks to launch for `work` iterations of a block, at most `each` for a multiprocessor."""
    # The simulator's device lacks the attribute, and is slow with many blocks.
    most = each * getattr(cuda.get_current_device(), "MULTIPROCESSOR_COUNT", 1)
    return max(_FEWEST_BLOCKS, min(work, most))


def _locate(arrays: Sequence[object], what: str, stream: Stream | int) -> tuple[Int64Array, int]:
    """Return the sizes and addresses of arrays on the GPU, as `pieces.locate` does, and the number of elements."""
    found = [_check_array(array, f"{what}[{i}]", stream) for i, array in enumerate(arrays)]
    where = np.array([(a.size, _address(a) if a.size else 0) for a in found], np.int64).reshape(-1, 2)
    return where, int(where[:, 0].sum())


def _check_array(x: object, name: str, stream: Stream | int) -> DeviceArray:
    """Return a flat view of a float32 array on the GPU; raise TypeError or ValueError if it is another array."""
    array = as_device(x, name, stream)
    if array.dtype != np.float32:
        raise TypeError(f"{name}: expected float32, got {array.dtype}. Cast it first.")
    if not array.is_c_contiguous():
        raise ValueError(f"{name}: expected a C-contiguous array, got strides {tuple(array.strides)}. Copy it first.")
    return array if array.ndim == 1 else array.reshape(array.size)


def _check_bytes(tiles: object, name: str, stream: Stream | int) -> UInt8Array:
    """Return the tiles on the host; raise TypeError if they are not uint8[bytes]."""
    if not isinstance(tiles, np.ndarray):
        tiles = to_host(as_device(tiles, name, stream), stream)
    if tiles.dtype != np.uint8 or tiles.ndim != 1:
        raise TypeError(f"{name}: expected tiles as uint8[bytes], got {tiles.dtype} of {tiles.ndim} dimensions.")
    return np.ascontiguousarray(tiles)
