"""Devices of the threshold codec: access to the arrays of a host or a GPU, and its kernels."""

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdx.errors import ConfigError
from hvdx.kernels import cpu
from hvdx.kernels.pieces import SIZE, aligned, locate
from hvdx.kernels.tiles import Encoded, Runs


class Host:
    """NumPy arrays in host memory."""

    def __init__(self, threads: int | None) -> None:
        self.threads = threads

    def check(self, arrays: Sequence[Any], what: str, writable: bool = False) -> list[int]:
        """Return the arrays' sizes; raise TypeError or ValueError unless the kernels can use the arrays in place."""
        sizes: list[int] = locate(arrays, what, writable)[:, SIZE].tolist()
        return sizes

    def place(self, values: np.ndarray) -> np.ndarray:
        """Return a copy that starts at a cache line."""
        placed = aligned(values.size)
        placed[:] = values
        return placed

    def fetch(self, array: np.ndarray) -> np.ndarray:
        """Return a copy as a NumPy array."""
        return array.copy()

    def workspace(self, n: int, runs: int) -> cpu.Workspace:
        """Return scratch memory for `encode`."""
        return cpu.Workspace(n, runs, threads=self.threads)

    def encode(
        self, update: Sequence[Any], residual: Any, runs: Runs, rice: bool, header: bytes, work: Any, lookahead: float
    ) -> tuple[np.ndarray, Encoded]:
        """Encode, and change `residual` in place. Return the message, which begins with `header`, and the counts."""
        coded = cpu.encode(
            update, residual, runs, rice,
            threads=work.threads, reserve=len(header), workspace=work, lookahead=lookahead,
        )  # fmt: skip
        if coded.fault < 0:
            coded.tiles[: len(header)] = np.frombuffer(header, np.uint8)
        return coded.tiles, coded

    def decode(self, messages: Sequence[tuple[np.ndarray, Runs]], scale: float, out: Sequence[Any], rice: bool) -> None:
        """Add messages to `out`; raise Malformed if one is invalid."""
        cpu.decode(messages, scale, out, rice, self.threads)


class Gpu:
    """Arrays on a GPU with `__cuda_array_interface__` or DLPack. Messages are in host memory."""

    def __init__(self) -> None:
        try:
            from hvdx.kernels import cuda
        except ImportError as error:
            raise ConfigError(f"threshold: device='cuda': {error}") from error
        if not cuda.available():
            raise ConfigError("threshold: device='cuda': no GPU that numba-cuda can use. `nvidia-smi` should show one.")
        self._cuda: ModuleType = cuda

    def check(self, arrays: Sequence[Any], what: str, writable: bool = False) -> list[int]:
        """Return the arrays' sizes; raise TypeError unless they are on a GPU."""
        return [math.prod(self._cuda.as_device(a, f"{what}[{i}]").shape) for i, a in enumerate(arrays)]

    def place(self, values: np.ndarray) -> Any:
        """Return a copy on the GPU."""
        return self._cuda.to_device(values)

    def fetch(self, array: Any) -> np.ndarray:
        """Return a copy as a NumPy array."""
        return self._cuda.as_device(array).copy_to_host()

    def workspace(self, n: int, runs: int) -> Any:
        """Return scratch memory for `encode`."""
        return self._cuda.Scratch()

    def encode(
        self, update: Sequence[Any], residual: Any, runs: Runs, rice: bool, header: bytes, work: Any, lookahead: float
    ) -> tuple[np.ndarray, Encoded]:
        """Encode, and change `residual` in place. Return the message, which begins with `header`, and the counts."""
        coded = self._cuda.encode(update, residual, runs, rice, scratch=work, lookahead=lookahead)
        message = np.empty(len(header) + coded.tiles.size, np.uint8)
        message[: len(header)] = np.frombuffer(header, np.uint8)
        if coded.tiles.size:
            message[len(header) :] = coded.tiles.copy_to_host()
        return message, coded

    def decode(self, messages: Sequence[tuple[np.ndarray, Runs]], scale: float, out: Sequence[Any], rice: bool) -> None:
        """Add messages to `out`; raise Malformed if one is invalid."""
        self._cuda.decode(messages, scale, list(out), rice)
