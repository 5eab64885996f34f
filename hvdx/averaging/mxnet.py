"""MXNet lists of arrays, as Gluon's `save_parameters` and `mx.nd.save` write them.

Source: https://github.com/apache/mxnet, src/ndarray/ndarray.cc, `NDArray::Save`.
"""

import struct
from pathlib import Path

import numpy as np

from hvdx.averaging.extents import OneFile, Output, splice
from hvdx.averaging.network import Tensor, Values, small_float
from hvdx.errors import AverageError

_LIST = 0x112
# Versions of the encoding of an array. Without dimensions, V3 means a scalar, like NumPy; V1 and V2 mean "no array".
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DTYPES = ["<f4", "<f8", "<f2", "u1", "<i4", "i1", "<i8", "?", "<i2", "<u2", "<u4", "<u8"]
_BFLOAT16 = 12
_DENSE = 0
_MOST_DIMENSIONS = 64
_STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_var")


class MXNet(OneFile):
    """`.params` file."""

    format = "MXNet"
    suffixes = (".params",)

    def _scan(self) -> None:
        self._placed, self.tensors = self._parse()
        self.normalises = any(name.endswith(_STATISTICS) for name in self.tensors)

    @classmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """Compare the name, or the first eight bytes."""
        return (path.name.endswith(cls.suffixes) and path.is_file()) or head[:8] == struct.pack("<Q", _LIST)

    def write(self, out: Path, values: Values) -> None:
        with Output(out) as file:
            splice(self._file, self._placed, values, file.write)

    def _parse(self) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
        magic, _, count = struct.unpack("<QQQ", self._file.read(0, 24, "its beginning"))
        if magic != _LIST:
            raise AverageError(
                f"{self.path}: expected the number {_LIST:#x} at its beginning, got {magic:#x}. This is no list of "
                "MXNet arrays: write one with net.save_parameters(path)."
            )
        at, found = 24, []
        for i in range(count):
            shape, dtype, begin = self._array(at, f"array {i}")
            found.append((shape, dtype, begin))
            at = self._file.tensor(f"array {i}", shape, dtype, begin).nbytes + begin
        placed, tensors = {}, {}
        for name, (shape, dtype, begin) in zip(self._names(at, count), found, strict=True):
            tensors[name] = self._file.tensor(name, shape, dtype, begin)
            if tensors[name].size:
                placed[begin] = tensors[name]
        return placed, tensors

    def _array(self, at: int, what: str) -> tuple[tuple[int, ...], np.dtype, int]:
        """Return the shape and dtype of the array at an offset, and the offset of its elements."""
        (magic,) = struct.unpack("<I", self._file.read(at, 4, what))
        at += 4
        if magic not in (_V1, _V2, _V3):
            raise AverageError(
                f"{self.path}: {what}: expected an array of MXNet 0.12 or later, got the number {magic:#x}. It is "
                "damaged, or older: load and save it with a later MXNet."
            )
        if magic != _V1:
            (storage,) = struct.unpack("<i", self._file.read(at, 4, what))
            at += 4
            if storage != _DENSE:
                raise AverageError(
                    f"{self.path}: {what}: expected a dense array, got a sparse one (storage type {storage}). Convert "
                    "it: array.tostype('default')."
                )
        (dimensions,) = struct.unpack("<i", self._file.read(at, 4, what))
        if not (0 if magic == _V3 else 1) <= dimensions <= _MOST_DIMENSIONS:
            raise AverageError(
                f"{self.path}: {what}: expected an array with dimensions, got {dimensions}: it was not initialised, "
                "or the file is damaged. Run the network once, and save it again."
            )
        shape = struct.unpack(f"<{dimensions}q", self._file.read(at + 4, 8 * dimensions, what))
        at += 4 + 8 * dimensions
        if min(shape, default=0) < 0:
            raise AverageError(
                f"{self.path}: {what}: expected a shape, got {list(shape)}. It is damaged: save it again."
            )
        *_, flag = struct.unpack("<iii", self._file.read(at, 12, what))
        return shape, self._dtype(flag, what), at + 12

    def _dtype(self, flag: int, what: str) -> np.dtype:
        if 0 <= flag < len(_DTYPES):
            return np.dtype(_DTYPES[flag])
        if flag == _BFLOAT16:
            return small_float("bfloat16", self.path)
        raise AverageError(
            f"{self.path}: {what}: expected a type from 0 to {_BFLOAT16}, got {flag}. It is damaged: save it again."
        )

    def _names(self, at: int, count: int) -> list[str]:
        """Return the names that follow the arrays, or numbered names if `mx.nd.save` was given a list without names."""
        (names_count,) = struct.unpack("<Q", self._file.read(at, 8, "its names"))
        at += 8
        if names_count not in (0, count):
            raise AverageError(
                f"{self.path}: expected {count} names, one per array, got {names_count}. It is damaged: save it again."
            )
        names = []
        for _ in range(names_count):
            (length,) = struct.unpack("<Q", self._file.read(at, 8, "its names"))
            names.append(self._file.read(at + 8, length, "its names").decode(errors="backslashreplace"))
            at += 8 + length
        if len(set(names)) < len(names):
            raise AverageError(f"{self.path}: expected each name once, got {names}. It is damaged: save it again.")
        return names or [f"array {i}" for i in range(count)]
