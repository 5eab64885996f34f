"""Files and texts that may come from others: regular files only, bounded reads, and texts without control codes.

A name in a folder of others may be a FIFO, whose reader waits for ever, or a link to a device without an end.
"""

import errno
import os
import re
import stat
from typing import BinaryIO

#: Largest size in bytes of a description, such as a manifest, and of a line of a record.
LARGEST = 1 << 24


class NotAFileError(OSError):
    """The path names no regular file, or a file that is too large."""


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a link to one, to read its bytes.

    Args:
        path: path of the file.

    Raises:
        NotAFileError: if it is something else, such as a FIFO or a device.
        OSError: if there is none, or it cannot be read.

    Example:
        >>> open_regular("/dev/zero")
        Traceback (most recent call last):
        hvdx.foreign.NotAFileError: [Errno 22] not a regular file: '/dev/zero'
    """
    # O_NONBLOCK: a FIFO without a writer would hold the call. Regular files ignore it.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise NotAFileError(errno.EINVAL, "not a regular file", os.fspath(path))
    return os.fdopen(number, "rb")


def read(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Return the bytes of a small regular file.

    Args:
        path: path of the file.
        most: largest size in bytes.

    Raises:
        NotAFileError, OSError: as for `open_regular`; NotAFileError also if the file is larger.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise NotAFileError(errno.EFBIG, f"larger than {most} bytes", os.fspath(path))
    return content


def printable(text: str) -> str:
    r"""Return a text whose control codes are spelled out, except tabs and line breaks, so that a terminal obeys none.

    Args:
        text: text with names from files.

    Example:
        >>> printable("layer\x1b[2J\n")
        'layer\\x1b[2J\n'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
