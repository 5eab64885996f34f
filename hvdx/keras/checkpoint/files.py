"""Files that are whole or not there, and arrays in them."""

import contextlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.errors import CheckpointError, HvdxError

# What reading a file that was cut off or altered raises.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, FileNotFoundError)


def write(path: Path, fill: Callable[[Any], Any]) -> None:
    """Write a file that is there, as a whole and on the disk, or not at all.

    Args:
        path: its name.
        fill: given the open file, writes it.
    """
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def write_arrays(file: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write what `numpy.savez` would, straight from the arrays' memory, with no copy in between.

    Args:
        file: open for writing, binary.
        arrays: by their names.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, given in arrays.items():
            array = np.asarray(given, order="C")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, np.lib.format.header_data_from_array_1_0(array))
                entry.write(array.reshape(-1).view(np.uint8).data)


def sync_folder(path: Path) -> None:
    """A name is on the disk only when its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[None]:
    """Tell a damaged file from all else that may go wrong.

    Args:
        path: what is read.

    Raises:
        CheckpointError: it is cut off, altered or missing.
    """
    try:
        yield
    except HvdxError:
        raise
    except _DAMAGE as error:
        raise CheckpointError(f"{path.name} is damaged or missing ({type(error).__name__}: {error})") from error


class Arrays(Mapping[str, np.ndarray]):
    """The arrays of one file, read one by one when they are asked for, each against its checksum.

    Args:
        path: of the file, for messages.
        file: arrays by their names.
        prefix: only names that begin so; they are known by what follows.

    Example:
        >>> sorted(Arrays(Path("rank-0.npz"), {"a.x": np.zeros(1), "a.y": np.ones(1), "b": np.ones(2)}, "a."))
        ['x', 'y']
    """

    def __init__(self, path: Path, file: Mapping[str, np.ndarray], prefix: str = ""):
        self._path, self._file, self._prefix = path, file, prefix

    @classmethod
    def of(cls, path: Path) -> "Arrays":
        """Those of a file.

        Raises:
            CheckpointError: it is damaged.
        """
        with whole(path):
            return cls(path, np.load(path, allow_pickle=False))

    def part(self, prefix: str) -> "Arrays":
        """Those whose names begin with `prefix`."""
        return Arrays(self._path, self._file, f"{self._prefix}{prefix}")

    def __getitem__(self, name: str) -> np.ndarray:
        with whole(self._path):
            return self._file[f"{self._prefix}{name}"]

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._file

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._file if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
