"""Safetensors files: the length of the header in eight bytes, the header in JSON, and the tensors one after another.

Source: https://github.com/huggingface/safetensors, "Format".
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.averaging.extents import OneFile, Output, splice
from hvdx.averaging.limits import check_description
from hvdx.averaging.network import Tensor, Values, small_float
from hvdx.errors import AverageError

# Limit of the safetensors library, in bytes.
_MOST_HEADER = 100_000_000
_MOST_EXTENT = (1 << 63) - 1
_MOST_DIMENSIONS = 64
_METADATA = "__metadata__"
DTYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
}
SMALL_FLOATS = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_variance")


class Safetensors(OneFile):
    """`.safetensors` file."""

    format = "safetensors"
    suffixes = (".safetensors",)

    def _scan(self) -> None:
        self._offsets, self.tensors = self._parse()
        self.normalises = any(name.endswith(_STATISTICS) for name in self.tensors)

    @classmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """Compare the name, or check for a header of a valid length."""
        named = path.name.endswith(cls.suffixes) and path.is_file()
        return named or (head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= _MOST_HEADER)

    def write(self, out: Path, values: Values) -> None:
        """Write a copy with new values; the header stays the same, including its metadata."""
        with Output(out) as file:
            placed = {self._offsets[name]: t for name, t in self.tensors.items() if t.size}
            splice(self._file, placed, values, file.write)

    def _parse(self) -> tuple[dict[str, int], dict[str, Tensor]]:
        length = int.from_bytes(self._file.read(0, 8, "the length of its header"), "little")
        if not 2 <= length <= _MOST_HEADER:
            raise AverageError(
                f"{self.path}: the length of its header: expected 2 to {_MOST_HEADER} bytes, got {length}. This is no "
                "safetensors file."
            )
        check_description(f"{self.path}: its header", length, self._file.size - length)
        text = self._file.read(8, length, "its header")
        try:
            header = json.loads(text.decode(), object_pairs_hook=_unique)
            entries = {name: _entry(value) for name, value in header.items() if name != _METADATA}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise AverageError(
                f"{self.path}: its header: expected JSON that describes tensors, got something else ({error}). It "
                "is damaged: copy or save it again."
            ) from None
        offsets, tensors, end = {}, {}, 0
        for name, (kind, shape, begin, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
            dtype = self._dtype(name, kind)
            offsets[name] = 8 + length + begin
            tensors[name] = self._file.tensor(name, shape, dtype, offsets[name])
            if begin != end or stop - begin != tensors[name].nbytes:
                raise AverageError(
                    f"{self.path}: {name}: expected {tensors[name].nbytes} bytes at {end}, got the range from {begin} "
                    f"to {stop}. It is damaged: copy or save it again."
                )
            end = stop
        if 8 + length + end != self._file.size:
            raise AverageError(
                f"{self.path}: expected {8 + length + end} bytes, got {self._file.size}. It is damaged: copy or save "
                "it again."
            )
        return offsets, tensors

    def _dtype(self, name: str, kind: str) -> np.dtype:
        if kind in DTYPES:
            return np.dtype(DTYPES[kind])
        if kind in SMALL_FLOATS:
            return small_float(SMALL_FLOATS[kind], self.path)
        raise AverageError(
            f"{self.path}: {name}: expected one of {', '.join([*DTYPES, *SMALL_FLOATS])}, got {kind}, which cannot "
            "be averaged. Save it in another dtype."
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _entry(value: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, begin and end of one tensor."""
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    extents = (*shape, begin, end)
    if not isinstance(value["dtype"], str) or not all(type(n) is int and 0 <= n <= _MOST_EXTENT for n in extents):
        raise ValueError("an invalid dtype, shape or data_offsets")
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions, the maximum is {_MOST_DIMENSIONS}")
    return value["dtype"], shape, begin, end


def save(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays to a `.safetensors` file.

    Args:
        path: path of the file; an existing file is replaced.
        arrays: arrays by name, in any dtype of the format; bfloat16 and float8 are those of `ml_dtypes`.
        metadata: texts for the header.

    Raises:
        AverageError: if the format lacks the dtype of an array.

    Example:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "w.safetensors")
        ...     save(path, {"w": np.arange(3.0)})
        ...     Safetensors.open(path).tensors["w"].array().tolist()
        [0.0, 1.0, 2.0]
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    # Like the library, put the largest dtypes first, so that all tensors are aligned.
    placed = sorted(((n, np.asarray(a)) for n, a in arrays.items()), key=lambda item: (-item[1].itemsize, item[0]))
    end = 0
    for name, array in placed:
        header[name] = {
            "dtype": _kind(path, name, array.dtype),
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in placed:
            little = array.astype(array.dtype.newbyteorder("<"), copy=False)
            file.write(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)


def _kind(path: str | os.PathLike[str], name: str, dtype: np.dtype) -> str:
    for kind, code in DTYPES.items():
        if np.dtype(code) == dtype.newbyteorder("<"):
            return kind
    for kind, small in SMALL_FLOATS.items():
        if small == dtype.name:
            return kind
    raise AverageError(f"{path}: {name}: safetensors has no {dtype}. Convert it to another dtype.")
