"""Devices of the threshold codec: access to the arrays of a host or a GPU, and its kernels."""

import copy
import functools
import math
import os
from collections.abc import Callable, Sequence
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from hvdx.codec.base import Array
from hvdx.errors import ConfigError
from hvdx.kernels import cpu
from hvdx.kernels.cpu_decode import ADD_SUM, SET_SUM
from hvdx.kernels.pieces import Located, aligned, locate
from hvdx.kernels.tiles import LAYOUT, Encoded, Layout, Runs

if TYPE_CHECKING:
    from hvdx.kernels import cuda  # imports numba-cuda, which may be missing

P = ParamSpec("P")
R = TypeVar("R")


class Host:
    """NumPy arrays in host memory, with the kernels of `hvdx.kernels.cpu`.

    Args:
        threads: number of threads of the kernels; None for the default.
    """

    # The cast checks nothing: `locate` itself checks whether the arrays are those of NumPy.
    locate: Callable[[Sequence[Array], str, bool], Located] = staticmethod(cast(Any, locate))
    sample, encode = staticmethod(cpu.sample), staticmethod(cpu.encode)

    def __init__(self, threads: int | None) -> None:
        self.threads = threads
        self.decode = functools.partial(cpu.decode, threads=threads)

    def on(self, stream: object) -> "Host":
        """Refuse a stream."""
        raise ValueError(
            f"stream: expected none for device='cpu', got {type(stream).__name__}. Give device='cuda' or no stream."
        )

    def place(self, values: np.ndarray) -> np.ndarray:
        """Return a copy that starts at a cache line."""
        placed = aligned(values.size)
        placed[:] = values
        return placed

    def fetch(self, array: Array) -> np.ndarray:
        """Return a copy as a NumPy array."""
        return np.array(array)

    def item(self, array: Array, element: int) -> np.float32:
        """Return one element of an array, read as a vector."""
        return np.float32(np.asarray(array).reshape(-1)[element])

    def workspace(self, n: int, part: int = 0) -> cpu.Workspace:
        """Return scratch memory for `encode`, whose tiles then have entries of one part of `part` elements each."""
        return cpu.Workspace(n, int(n > 0), _layout(part) if part else LAYOUT, self.threads)


def _layout(part: int) -> Layout:
    """Return a layout whose tiles do not cross multiples of `part`, a multiple of 64: each region has its own tiles."""
    regions = -(-part // LAYOUT.region)
    while part % (64 * regions):
        regions += 1
    return LAYOUT._replace(region=part // regions, tile_min=1, group_regions=1)


def _there(method: Callable[Concatenate["Gpu", P], R]) -> Callable[Concatenate["Gpu", P], R]:
    """Make a method of `Gpu` use its GPU, whatever the calling thread has used before."""

    @functools.wraps(method)
    def on_gpu(self: "Gpu", *arguments: P.args, **options: P.kwargs) -> R:
        with self._cuda.on(self._index):
            return method(self, *arguments, **options)

    return on_gpu


class Gpu:
    """Arrays on a GPU with `__cuda_array_interface__` or DLPack. Messages are in host memory.

    Every method waits until its work on the GPU has finished. `hvdx.kernels.cuda` says what a caller's work is to wait
    for.

    Args:
        index: number of the GPU, as CUDA counts them; None for the one that the calling thread uses.

    Raises:
        ConfigError: if there is no such GPU, or if numba-cuda cannot use it.
    """

    def __init__(self, index: int | None = None) -> None:
        try:
            from hvdx.kernels import cuda
        except ImportError as error:
            raise ConfigError(f"threshold: device='cuda': {error}") from error
        if not cuda.available():
            raise ConfigError("threshold: device='cuda': no GPU that numba-cuda can use. `nvidia-smi` should show one.")
        if index is not None and index >= cuda.number():
            raise ConfigError(f"threshold: device: expected one of {cuda.number()} GPUs, got number {index}.")
        self._cuda: ModuleType = cuda
        self._index = index
        self._stream: object = 0
        # Memory of `decode`, which one call at a time may use.
        self._decoding, self._one = cuda.Scratch(), Lock()

    @_there
    def on(self, stream: object) -> "Gpu":
        """Return this GPU, whose kernels run on a stream."""
        other = copy.copy(self)
        other._stream = self._cuda.as_stream(stream)
        return other

    @_there
    def locate(self, arrays: Sequence[Array], what: str, writable: bool = False) -> Located:
        """Return the arrays with their sizes, and no addresses; raise TypeError unless they are on a GPU."""
        there = [self._cuda.as_device(a, f"{what}[{i}]", self._stream) for i, a in enumerate(arrays)]
        table = np.array([[math.prod(a.shape), 0] for a in there], np.int64).reshape(-1, 2)
        return Located(table, int(table[:, 0].sum()), there, writable)

    @_there
    def view(self, array: Array) -> Array:
        """Return an array of another library as one of Numba, without a copy."""
        return self._cuda.as_device(array)

    @_there
    def place(self, values: np.ndarray) -> Array:
        """Return a copy on the GPU."""
        return self._cuda.to_device(values)

    @_there
    def fetch(self, array: Array) -> np.ndarray:
        """Return a copy as a NumPy array."""
        return self._cuda.as_device(array).copy_to_host()

    @_there
    def item(self, array: Array, element: int) -> np.float32:
        """Return one element of an array, read as a vector."""
        there = self._cuda.as_device(array)
        flat = there if there.ndim == 1 else there.reshape(there.size)
        return np.float32(flat[element : element + 1].copy_to_host()[0])

    @_there
    def zeros(self, n: int) -> Array:
        """Return a new float32[n] of zeros on the GPU."""
        return self._cuda.zeros(n)

    @_there
    def assign(self, values: np.ndarray, out: Array) -> None:
        """Copy a NumPy array to an array on the GPU."""
        self._cuda.as_device(out).copy_to_device(values)

    @_there
    def copy(self, values: Array, out: Array) -> None:
        """Copy an array on the GPU to another one."""
        self._cuda.copy(values, out)

    @_there
    def subtract(self, values: Array, out: Array) -> None:
        """Subtract an array on the GPU from another one."""
        self._cuda.subtract(values, out)

    @_there
    def sample(self, update: Located, residual: Located, lines: np.ndarray) -> np.ndarray:
        """Return a sample of an update and of the residual, float32[2, elements]; see `cpu.sample`."""
        return self._cuda.sample(update.arrays, residual.arrays[0], lines, self._stream)

    def workspace(self, n: int, part: int = 0) -> "cuda.Scratch":
        """Return scratch memory for `encode`, which writes tiles without regard to parts."""
        return self._cuda.Scratch()

    @_there
    def encode(
        self, update: Located, residual: Located, runs: Runs, rice: bool, header: bytes, workspace: "cuda.Scratch",
        lookahead: float,
    ) -> Encoded:  # fmt: skip
        """Encode as `cpu.encode` does, to tiles in host memory."""
        coded: Encoded = self._cuda.encode(
            update.arrays, residual.arrays[0], runs, rice, scratch=workspace, lookahead=lookahead, stream=self._stream
        )
        message = np.empty(len(header) + coded.tiles.size, np.uint8)
        message[: len(header)] = np.frombuffer(header, np.uint8)
        if coded.tiles.size:
            message[len(header) :] = self._cuda.to_host(coded.tiles, self._stream)
        return coded._replace(tiles=message)

    @_there
    def decode(
        self, messages: Sequence[tuple[np.ndarray, Runs]], scale: float, out: Located, rice: bool, way: int
    ) -> None:
        """Add messages to `out`, or with SET_SUM to zeros; raise Malformed if one is invalid.

        Raises:
            ValueError: for another way of `cpu.decode`.
        """
        if way == ADD_SUM:
            raise ValueError("decode: a GPU adds messages one after another. Set an array to their sum, and add it.")
        if way == SET_SUM:
            for array in out.arrays:
                self._cuda.as_device(array).copy_to_device(np.zeros(array.shape, np.float32))
        with self._one:
            self._cuda.decode(messages, scale, list(out.arrays), rice, self._stream, self._decoding)


def simulated() -> bool:
    """Return True if Numba's simulator takes the place of a GPU."""
    return os.environ.get("HVDX_CUDA_SIMULATOR") == "1"


@functools.cache
def gpu(index: int | None = None) -> Gpu:
    """Return a GPU, the same for all codecs of this process; see `Gpu`."""
    return Gpu(index)
