"""Tensors that lie in one piece in a file: read where they are, and written into a copy of the rest."""

import abc
import io
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.averaging.network import Network, Tensor, Values
from hvdx.errors import AverageError

_COPY_BYTES = 1 << 22
_WINDOW_BYTES = 1 << 25


class File:
    """A file that is read at offsets, by several threads at once.

    Args:
        path: the file.

    Raises:
        AverageError: it cannot be opened.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise AverageError(f"{path}: {error.strerror}.") from None
        self.size = os.fstat(self._handle).st_size

    def read_into(self, offset: int, out: Any, what: str) -> None:
        """Fill a buffer.

        Args:
            offset: in bytes.
            out: contiguous and writable.
            what: what is read, for the message.

        Raises:
            AverageError: the file ends before the buffer is full.
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
        """Some bytes; see `read_into`."""
        if count > self.size - offset:
            raise AverageError(
                f"{self.path}: {what}: expected {count} bytes at {offset}, and the file ends after {self.size}. It was "
                "cut short: copy or save it again."
            )
        buffer = bytearray(count)
        self.read_into(offset, buffer, what)
        return bytes(buffer)

    def crc32(self, offset: int, count: int, what: str) -> int:
        """The CRC-32 of some bytes, as zip archives hold it; see `read_into`."""
        buffer, end, crc = bytearray(min(_COPY_BYTES, count)), offset + count, 0
        while offset < end:
            block = memoryview(buffer)[: min(len(buffer), end - offset)]
            self.read_into(offset, block, what)
            crc, offset = zlib.crc32(block, crc), offset + len(block)
        return crc

    def tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> Tensor:
        """A tensor that lies in one piece.

        Args:
            name, shape, dtype: see `Tensor`.
            offset: of its first byte.

        Raises:
            AverageError: it does not lie within the file.
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

    def copy(self, begin: int, end: int, write: Callable[[Any], Any]) -> None:
        """Hand on the bytes from `begin` to `end`, a few megabytes at a time."""
        buffer = bytearray(min(_COPY_BYTES, max(end - begin, 0)))
        while begin < end:
            piece = memoryview(buffer)[: end - begin]
            self.read_into(begin, piece, "its content")
            write(piece)
            begin += len(piece)

    def close(self) -> None:
        """Let go of it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class OneFile(Network):
    """A format whose networks are one file each, in which tensors lie where `_scan` finds them.

    Raises:
        AverageError: the file cannot be opened, or is damaged; it is closed again.
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
        """Find the tensors, and what else is to be known of the file."""

    @classmethod
    def open(cls, path: Path) -> Network:
        """See `Network.open`."""
        return cls(path)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class Output(io.FileIO):
    """A new file whose content goes to the disk while it is written, and leaves the page cache to others.

    The disk works beside the arithmetic, so that little is left for fsync in the end; and pages that are used again
    cost less than fresh ones, which virtual machines may have to ask their host for.

    Args:
        path: does not exist yet.
    """

    def __init__(self, path: Path):
        super().__init__(path, "x")
        self._handed_over = 0

    def write(self, data: Any) -> int:
        """Write all of it."""
        whole = memoryview(data).cast("B")
        left = whole
        while left:
            left = left[super().write(left) or 0 :]
        end = self.tell()
        if end - self._handed_over >= _WINDOW_BYTES:
            # What is not on the disk yet is sent there by this, and what is there is let go of.
            begin = max(self._handed_over - _WINDOW_BYTES, 0)
            os.posix_fadvise(self.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
            self._handed_over = end
        return len(whole)


def splice(
    file: File, placed: Mapping[int, Tensor], values: Values, write: Callable[[Any], Any], begin: int = 0, end: int = -1
) -> None:
    """Hand on a file with other values in the places of its tensors.

    Args:
        file: what is copied.
        placed: the tensors by the offsets of their first bytes; `values` is asked in the order of the offsets. Tensors
            without elements are left out.
        values: the new content.
        write: takes the bytes, in order.
        begin, end: the part of the file that is meant; all of it by default.
    """
    at = begin
    for offset in sorted(placed):
        file.copy(at, offset, write)
        for block in values(placed[offset]):
            write(np.ascontiguousarray(block).view(np.uint8))
        at = offset + placed[offset].nbytes
    file.copy(at, file.size if end < 0 else end, write)
