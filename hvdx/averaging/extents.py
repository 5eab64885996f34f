"""Contiguous tensors in files: reads at their offsets, and copies of a file with new values for its tensors."""

import abc
import io
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdx.averaging.network import Network, Tensor, Values
from hvdx.errors import AverageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_COPY_BYTES = 1 << 22
_WINDOW_BYTES = 1 << 25


class File:
    """File that several threads may read at offsets at the same time.

    Raises:
        AverageError: if it cannot be opened.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise AverageError(f"{path}: {error.strerror}.") from None
        self.size = os.fstat(self._handle).st_size

    def read_into(self, offset: int, out: "np.ndarray | WriteableBuffer", what: str) -> None:
        """Fill a buffer from the file.

        Args:
            offset: offset in the file, in bytes.
            out: contiguous, writable buffer.

        Raises:
            AverageError: if the file ends before the buffer is full.
        """
        view = memoryview(out).cast("B") if not isinstance(out, np.ndarray) else out.view(np.uint8).data
        while view:
            try:
                got = os.preadv(self._handle, [view], offset)
            except OSError as error:
                raise AverageError(f"{self.path}: {what}: {error.strerror}.") from None
            if got == 0:
                raise AverageError(
                    f"{self.path}: {what}: expected {len(view)} bytes more, and the file ends after {self.size}. It "
                    "was cut short: copy or save it again."
                )
            view, offset = view[got:], offset + got

    def read(self, offset: int, count: int, what: str) -> bytes:
        """Return `count` bytes from `offset` on; see `read_into`."""
        if count > self.size - offset:
            raise AverageError(
                f"{self.path}: {what}: expected {count} bytes at {offset}, and the file ends after {self.size}. It was "
                "cut short: copy or save it again."
            )
        buffer = bytearray(count)
        self.read_into(offset, buffer, what)
        return bytes(buffer)

    def crc32(self, offset: int, count: int, what: str) -> int:
        """Return the CRC-32 (as in zip archives) of `count` bytes from `offset` on; see `read_into`."""
        buffer, end, crc = bytearray(min(_COPY_BYTES, count)), offset + count, 0
        while offset < end:
            block = memoryview(buffer)[: min(len(buffer), end - offset)]
            self.read_into(offset, block, what)
            crc, offset = zlib.crc32(block, crc), offset + len(block)
        return crc

    def tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> Tensor:
        """Return a contiguous tensor of the file.

        Args:
            name, shape, dtype: see `Tensor`.
            offset: offset of its first byte.

        Raises:
            AverageError: if it does not lie within the file.
        """

        def read(start: int, out: np.ndarray) -> None:
            self.read_into(offset + start * dtype.itemsize, out, name)

        tensor = Tensor(name, shape, dtype, read)
        if offset < 0 or offset + tensor.nbytes > self.size:
            raise AverageError(
                f"{self.path}: {name}: expected {tensor.nbytes} bytes at {offset}, and the file ends after "
                f"{self.size}. It was cut short: copy or save it again."
            )
        return tensor

    def copy(self, begin: int, end: int, write: Callable[[Any], object]) -> None:
        """Pass the bytes from `begin` to `end` to `write`, a few megabytes at a time."""
        buffer = bytearray(min(_COPY_BYTES, max(end - begin, 0)))
        while begin < end:
            piece = memoryview(buffer)[: end - begin]
            self.read_into(begin, piece, "its content")
            write(piece)
            begin += len(piece)

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class OneFile(Network):
    """Base class of formats with one file per network.

    Raises:
        AverageError: if the file cannot be opened or is damaged.
    """

    def __init__(self, path: Path):
        self.path, self._file = path, File(path)
        try:
            self._scan()
        except AverageError:
            self.close()
            raise

    @abc.abstractmethod
    def _scan(self) -> None:
        """Set `tensors` and the other attributes of `Network` from the file."""

    @classmethod
    def open(cls, path: Path) -> Network:
        return cls(path)

    def close(self) -> None:
        self._file.close()


class Output(io.FileIO):
    """New file that goes to disk while it is written, and is dropped from the page cache.

    The disk writes during the arithmetic, which leaves little for fsync. Reused pages of the page cache cost less than
    new ones, which a virtual machine may have to request from its host.

    Args:
        path: path that does not exist yet.
    """

    def __init__(self, path: Path):
        super().__init__(path, "x")
        self._handed_over = 0

    def write(self, data: "ReadableBuffer") -> int:
        """Write all of `data`; return its size in bytes."""
        whole = memoryview(data).cast("B")
        left = whole
        while left:
            left = left[super().write(left) or 0 :]
        end = self.tell()
        if end - self._handed_over >= _WINDOW_BYTES:
            # Linux starts to write pages that are not on disk yet, and drops those that are.
            begin = max(self._handed_over - _WINDOW_BYTES, 0)
            os.posix_fadvise(self.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
            self._handed_over = end
        return len(whole)


def splice(
    file: File,
    placed: Mapping[int, Tensor],
    values: Values,
    write: Callable[[Any], object],
    begin: int = 0,
    end: int = -1,
) -> None:
    """Write a copy of a file with new values for its tensors.

    Args:
        file: source of the copy.
        placed: tensors that have elements, by the offsets of their first bytes.
        values: new values of the tensors; called in the order of the offsets.
        write: function that receives the bytes of the copy, in order.
        begin, end: range of the file that is copied, in bytes; the whole file by default.
    """
    at = begin
    for offset in sorted(placed):
        file.copy(at, offset, write)
        for block in values(placed[offset]):
            write(np.ascontiguousarray(block).view(np.uint8))
        at = offset + placed[offset].nbytes
    file.copy(at, file.size if end < 0 else end, write)
