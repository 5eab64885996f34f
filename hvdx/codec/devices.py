"""Devices of the threshold codec: access to the arrays of a host or a GPU, and its kernels."""

import functools
import math
import os
from collections.abc import Callable, Sequence
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from hvdx.codec.base import Array
from hvdx.errors import ConfigError
from hvdx.kernels import cpu
from hvdx.kernels.arrays import Float32Array
from hvdx.kernels.pieces import SIZE, aligned, locate
from hvdx.kernels.tiles import LAYOUT, Encoded, Layout, Runs

if TYPE_CHECKING:
    from hvdx.kernels import cuda  # imports numba-cuda, which may be missing

#: Type of arrays in host memory. A cast to it checks nothing; the kernels check the arrays.
HostArrays = Sequence[Float32Array]
P = ParamSpec("P")
R = TypeVar("R")


class Host:
    """NumPy arrays in host memory."""

    def __init__(self, threads: int | None) -> None:
        self.threads = threads

    def check(self, arrays: Sequence[Array], what: str, writable: bool = False, stream: object = None) -> list[int]:
        """Return the arrays' sizes; raise TypeError or ValueError unless the kernels can use the arrays in place."""
        if stream is not None:
            raise ValueError(
                f"stream: expected none for device='cpu', got {type(stream).__name__}. Give device='cuda' or no stream."
            )
        sizes: list[int] = locate(cast(HostArrays, arrays), what, writable)[:, SIZE].tolist()
        return sizes

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

    def sample(self, update: Sequence[Array], residual: Array, lines: np.ndarray, stream: object) -> np.ndarray:
        """Return a sample of an update and of the residual, float32[2, elements]; see `cpu.sample`."""
        return cpu.sample(cast(HostArrays, update), cast(Float32Array, residual), lines)

    def workspace(self, n: int, part: int = 0) -> cpu.Workspace:
        """Return scratch memory for `encode`, whose tiles then have entries of one part of `part` elements each."""
        return cpu.Workspace(n, int(n > 0), _layout(part) if part else LAYOUT, self.threads)

    def encode(
        self, update: Sequence[Array], residual: Array, runs: Runs, rice: bool, header: bytes, work: cpu.Workspace,
        lookahead: float, stream: object,
    ) -> tuple[np.ndarray, Encoded]:  # fmt: skip
        """Encode, and change `residual` in place. Return the message, which begins with `header`, and the counts."""
        coded = cpu.encode(
            cast(HostArrays, update), cast(Float32Array, residual), runs, rice, work.layout,
            threads=work.threads, reserve=len(header), workspace=work, lookahead=lookahead,
        )  # fmt: skip
        if coded.fault < 0:
            coded.tiles[: len(header)] = np.frombuffer(header, np.uint8)
        return coded.tiles, coded

    def decode(
        self, messages: Sequence[tuple[np.ndarray, Runs]], scale: float, out: Sequence[Array], rice: bool, clear: bool,
        stream: object,
    ) -> None:  # fmt: skip
        """Add messages to `out`, or with `clear` to zeros; raise Malformed if one is invalid."""
        cpu.decode(messages, scale, cast(HostArrays, out), rice, self.threads, clear)


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
        # Memory of `decode`, which one call at a time may use.
        self._decoding, self._one = cuda.Scratch(), Lock()

    @_there
    def check(self, arrays: Sequence[Array], what: str, writable: bool = False, stream: object = None) -> list[int]:
        """Return the arrays' sizes; raise TypeError unless they are on a GPU."""
        stream = self._cuda.as_stream(stream)
        return [math.prod(self._cuda.as_device(a, f"{what}[{i}]", stream).shape) for i, a in enumerate(arrays)]

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
    def sample(self, update: Sequence[Array], residual: Array, lines: np.ndarray, stream: object) -> np.ndarray:
        """Return a sample of an update and of the residual, float32[2, elements]; see `cpu.sample`."""
        return self._cuda.sample(update, residual, lines, stream)

    def workspace(self, n: int, part: int = 0) -> "cuda.Scratch":
        """Return scratch memory for `encode`, which writes tiles without regard to parts."""
        return self._cuda.Scratch()

    @_there
    def encode(
        self, update: Sequence[Array], residual: Array, runs: Runs, rice: bool, header: bytes, work: "cuda.Scratch",
        lookahead: float, stream: object,
    ) -> tuple[np.ndarray, Encoded]:  # fmt: skip
        """Encode, and change `residual` in place. Return the message, which begins with `header`, and the counts."""
        stream = self._cuda.as_stream(stream)
        coded = self._cuda.encode(update, residual, runs, rice, scratch=work, lookahead=lookahead, stream=stream)
        message = np.empty(len(header) + coded.tiles.size, np.uint8)
        message[: len(header)] = np.frombuffer(header, np.uint8)
        if coded.tiles.size:
            message[len(header) :] = self._cuda.to_host(coded.tiles, stream)
        return message, coded

    @_there
    def decode(
        self, messages: Sequence[tuple[np.ndarray, Runs]], scale: float, out: Sequence[Array], rice: bool, clear: bool,
        stream: object,
    ) -> None:  # fmt: skip
        """Add messages to `out`, or with `clear` to zeros; raise Malformed if one is invalid."""
        if clear:
            for array in out:
                self.assign(np.zeros(self._cuda.as_device(array).shape, np.float32), array)
        with self._one:
            self._cuda.decode(messages, scale, list(out), rice, stream, self._decoding)


def simulated() -> bool:
    """Return True if Numba's simulator takes the place of a GPU."""
    return os.environ.get("HVDX_CUDA_SIMULATOR") == "1"


@functools.cache
def gpu(index: int | None = None) -> Gpu:
    """Return a GPU, the same for all codecs of this process; see `Gpu`."""
    return Gpu(index)
