"""Memory for arrays: such that TensorFlow takes them without a copy, and such that the ranks of one host share them.

To share, each rank makes a file of Linux that has no name (`memfd_create`), and the other ranks open it through
`/proc`. In contrast to a window of MPI (`MPI.Win.Allocate_shared`) the memory does not come from `/dev/shm`, which
containers limit; a rank whose system refuses it tells the others, where MPI's call may wait for ever; and every wait
has a time limit. Each rank reserves the pages of its own array, so they lie near its cores, and no later write finds
too little memory, except that a limit of the container ends the process. The kernel frees the memory when the last
process that uses it ends, however it ends.
"""

import ctypes
import errno
import mmap
import os
import secrets
import sys

import numpy as np
from numpy.typing import DTypeLike

from hvdx.comm.interfaces import Channel
from hvdx.log import Log

_log = Log(__name__)

# TensorFlow requires this of a tensor's address on the CPU (Eigen's EIGEN_MAX_ALIGN_BYTES). NumPy's own arrays begin 16
# bytes after such an address, if they are large.
_ALIGNED = 64
_NAME = "hvdx-updates"
# Bytes behind the elements of an array, which hold a number by which other ranks recognise it.
_MARK = 64
# A mapping needs no descriptor, but Python keeps one unless it is told not to.
_UNTRACKED: dict[str, bool] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
_CONTAINER = " Start the ranks of a host in one container, as one user."
# Reports of this process: each exchange asks for memory, and only the first failure is reported.
_reported = False


def aligned(elements: int, dtype: DTypeLike = np.float32) -> np.ndarray:
    """Return an uninitialised array whose address is a multiple of 64.

    Example:
        >>> is_aligned(aligned(100_000))
        True
    """
    size = elements * np.dtype(dtype).itemsize
    space = np.empty(size + _ALIGNED, np.uint8)
    begin = -space.ctypes.data % _ALIGNED
    return space[begin : begin + size].view(dtype)


def is_aligned(array: np.ndarray) -> bool:
    """Return whether TensorFlow takes an array without a copy."""
    return array.ctypes.data % _ALIGNED == 0


def share(channel: Channel, elements: int, who: str) -> list[np.ndarray] | None:
    """Allocate an array for each rank of a channel, which all of them can read and write. Collective.

    What a rank writes is visible to the others after the next exchange of the channel: sending and receiving a message
    are barriers to memory.

    Args:
        channel: the ranks.
        elements: number of float32 elements of this rank's array.
        who: name of this rank in the report of a failure.

    Returns:
        The array of each rank, float32[elements of that rank] of zeros, in rank order. None on all ranks if one of them
        cannot open the memory of another, as in containers that do not see each other's processes; one line on standard
        error has the reason and the remedy.

    Example:
        >>> from hvdx.comm.local import virtual_world
        >>> [(array,)] = [share(comm.channel("a test"), 3, "rank 0") for comm in virtual_world(1)]
        >>> array
        array([0., 0., 0.], dtype=float32)
    """
    mark, reason, arrays, file = secrets.randbits(62), "", [], -1
    try:
        file = _make(elements, mark)
    except (OSError, AttributeError, ValueError) as error:
        reason = f"cannot create shared memory: {error}.{_remedy(error)}"
    try:
        told = channel.exchange([os.getpid(), file, elements, mark]).headers.tolist()
        if all(row[1] >= 0 for row in told):
            try:
                arrays = [_opened(*row) for row in told]
            except (OSError, ValueError) as error:
                reason = f"cannot open the memory of another rank: {error}.{_remedy(error) or _CONTAINER}"
        failed = channel.exchange([int(bool(reason))]).headers[:, 0]
    finally:
        # The mappings keep the memory, by descriptors of their own before Python 3.13.
        if file >= 0:
            os.close(file)
    if not failed.any():
        return arrays
    if reason and not failed[: channel.rank].any():
        _report(f"{who}: {reason} Until then the ranks of this host send messages, which takes more time.")
    return None


def _remedy(error: Exception) -> str:
    """Return the sentence that says what to do about an error; "" if it names no limit."""
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.EMFILE, errno.ENFILE):
        return " Raise the limit of open files (ulimit -n)."
    if code in (errno.ENOMEM, errno.ENOSPC):
        return " Raise the limit of memory (ulimit -v, or that of the container)."
    return ""


def _make(elements: int, mark: int) -> int:
    """Return the descriptor of a new file of zeros that is followed by a mark."""
    size = _size(elements)
    file = _new_file()
    try:
        os.posix_fallocate(file, 0, size)
        os.pwrite(file, mark.to_bytes(8, "little"), size - _MARK)
    except OSError:
        os.close(file)
        raise
    return file


def _new_file() -> int:
    """Return the descriptor of a file without a name; raise OSError or AttributeError if the system has none."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(_NAME)
    # Some builds of Python for old systems lack it, also on new ones.
    libc, close_on_exec = ctypes.CDLL(None, use_errno=True), 1
    file: int = libc.memfd_create(_NAME.encode(), close_on_exec)
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return file


def _opened(process: int, file: int, elements: int, mark: int) -> np.ndarray:
    """Return the array in a file that a process has open; raise OSError or ValueError if it is not that array."""
    path, size = f"/proc/{process}/fd/{file}", _size(elements)
    # In another container, the number may be that of another process.
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise ValueError(f"{path} is another file")
    mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(mine).st_size != size:
            raise ValueError(f"{path} has another size")
        mapped = mmap.mmap(mine, size, **_UNTRACKED)
    finally:
        os.close(mine)
    if int.from_bytes(mapped[size - _MARK : size - _MARK + 8], "little") != mark:
        raise ValueError(f"{path} is memory of another job")
    return np.frombuffer(mapped, np.float32, elements)


def _size(elements: int) -> int:
    """Return the bytes of a file: its array up to a border of 64 bytes, and the mark."""
    return -(-4 * elements // _MARK) * _MARK + _MARK


def _report(text: str) -> None:
    global _reported
    if not _reported:
        _reported = True
        _log.warning(text)
