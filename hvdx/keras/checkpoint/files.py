"""Atomic file writes, and arrays in files.

The layout of a file is that of safetensors: the length of the header in eight bytes, the header in JSON, and the arrays
one after another. The header's metadata hold a checksum of each array, which is compared when the array is read. The
files of `numpy.savez` are not used, because the checksum of a zip file takes about the same time as writing the file.

Source of the layout: https://github.com/huggingface/safetensors, "Format".
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from hvdx import foreign
from hvdx.averaging.extents import Output
from hvdx.averaging.network import small_float
from hvdx.averaging.safetensors import DTYPES, SMALL_FLOATS
from hvdx.errors import CheckpointError, ConfigError, HvdxError

_DTYPES = {code: np.dtype(text) for code, text in DTYPES.items()}
_DTYPES |= {code: small_float(name, Path("a checkpoint")) for code, name in SMALL_FLOATS.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_METADATA, _CHECKSUM = "__metadata__", "xxh3_64 of "
#: Key of the checksum of a description.
SEAL = "xxh3_64"
# Chunk in bytes: small enough to stay in the cache between its checksum and its write.
_CHUNK = 1 << 22


def write(contents: Mapping[Path, Callable[[BinaryIO], object]]) -> None:
    """Write files; each gets its name only when all of them are complete and on the disk.

    Args:
        contents: for each path, a function that writes the content to an open file.
    """
    with contextlib.ExitStack() as stack:
        partial = {path.with_name(f"{path.name}.partial"): path for path in contents}
        opened = {name: stack.enter_context(Output(name)) for name in partial}
        for name, file in opened.items():
            contents[partial[name]](file)
        # After all writes: the first fsync brings most of the other files to the disk as well.
        for file in opened.values():
            os.fsync(file.fileno())
    for name, path in partial.items():
        name.rename(path)


def write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays, with a checksum of each.

    Args:
        file: binary file, open for writing.
        arrays: arrays by their names.

    Raises:
        ConfigError: if the format does not have the dtype of an array.
    """
    sums = dict.fromkeys(arrays, "0" * 16)
    file.write(_header(arrays, sums))
    for name, array in arrays.items():
        content = np.asarray(array, order="C").reshape(-1).view(np.uint8).data
        total = xxhash.xxh3_64()
        for begin in range(0, len(content), _CHUNK):
            chunk = content[begin : begin + _CHUNK]
            total.update(chunk)
            file.write(chunk)
        sums[name] = total.hexdigest()
    file.seek(0)
    file.write(_header(arrays, sums))


def _header(arrays: Mapping[str, np.ndarray], sums: Mapping[str, str]) -> bytes:
    """Encode the header; its length does not depend on the values of the checksums."""
    header: dict[str, Any] = {_METADATA: {f"{_CHECKSUM}{name}": total for name, total in sums.items()}}
    begin = 0
    for name, array in arrays.items():
        if array.dtype not in _CODES:
            raise ConfigError(f"{name}: expected numbers, got {array.dtype}, which is not saved.")
        end = begin + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sealed(content: Mapping[str, Any]) -> str:
    """Return the text of a description in JSON types, with its checksum.

    Example:
        >>> unsealed(sealed({"epoch": 3}))
        {'epoch': 3}
    """
    text = json.dumps(content, indent=1)
    return json.dumps({SEAL: xxhash.xxh3_64_hexdigest(text.encode()), **content}, indent=1)


def unsealed(text: str) -> dict[str, Any]:
    """Return the description in a text that `sealed` wrote.

    Raises:
        ValueError, KeyError, TypeError: if it is damaged.
    """
    content: dict[str, Any] = dict(json.loads(text))
    # What is read again and written is the same text, so whatever decides something is in the sum.
    if content.pop(SEAL) != xxhash.xxh3_64_hexdigest(json.dumps(content, indent=1).encode()):
        raise ValueError("it does not match its checksum")
    return content


@contextlib.contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """Convert the errors of reading a damaged file to `CheckpointError`.

    Args:
        path: file that is read inside the context.

    Raises:
        CheckpointError: if the file is cut off, altered or missing.
    """
    try:
        yield
    except HvdxError:
        raise
    except (EOFError, KeyError, ValueError, TypeError, FileNotFoundError, foreign.NotAFileError) as error:
        raise CheckpointError(f"{path.name} is damaged or missing ({type(error).__name__}: {error})") from error


class Arrays(Mapping[str, np.ndarray]):
    """Arrays of one file; each is read, and compared with its checksum, when it is accessed.

    Args:
        path: path of the file.
        entries: header's entry for each array.
        sums: checksums by the arrays' names.
        begin: offset of the first array in bytes.
        prefix: prefix of the arrays' names; it is left out of the keys, and other arrays are not included.
    """

    def __init__(self, path: Path, entries: Mapping[str, Any], sums: Mapping[str, str], begin: int, prefix: str = ""):
        self._path, self._entries, self._sums, self._begin, self._prefix = path, entries, sums, begin, prefix

    @classmethod
    def of(cls, path: Path) -> "Arrays":
        """Open a file and read its header.

        Raises:
            CheckpointError: if the file is damaged.
        """
        with as_checkpoint_error(path), foreign.open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if not 2 <= length <= size - 8:
                raise EOFError(f"its header is cut off: the file has {size} bytes")
            entries = json.loads(file.read(length))
            sums = entries.pop(_METADATA)
            end = 8 + length + max((e["data_offsets"][1] for e in entries.values()), default=0)
            if size != end:
                raise EOFError(f"expected {end} bytes, got {size}")
            return cls(path, entries, {k.removeprefix(_CHECKSUM): v for k, v in sums.items()}, 8 + length)

    def part(self, prefix: str) -> "Arrays":
        """Return the arrays whose names begin with `prefix`."""
        return Arrays(self._path, self._entries, self._sums, self._begin, f"{self._prefix}{prefix}")

    def __getitem__(self, name: str) -> np.ndarray:
        name = f"{self._prefix}{name}"
        with as_checkpoint_error(self._path):
            entry = self._entries[name]
            begin, end = entry["data_offsets"]
            content = np.fromfile(self._path, np.uint8, end - begin, offset=self._begin + begin)
            if xxhash.xxh3_64_hexdigest(content.data) != self._sums[name]:
                raise ValueError(f"{name} does not match its checksum")
            return content.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._entries

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._entries if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ArraysInMemory(dict[str, np.ndarray]):
    """Arrays in place of those of a file.

    Example:
        >>> ArraysInMemory({"random.a": np.ones(1), "b": np.ones(2)}).part("random.")
        {'a': array([1.])}
    """

    def part(self, prefix: str) -> "ArraysInMemory":
        """Return the arrays whose names begin with `prefix`, by the rest of their names."""
        return ArraysInMemory({name[len(prefix) :]: array for name, array in self.items() if name.startswith(prefix)})
