"""Memory between inaccessible pages: an access outside it ends the process."""

import ctypes
import mmap
import os

import numpy as np

_NONE = 0


class Guarded:
    """Memory between two inaccessible pages.

    Args:
        size: number of bytes.
    """

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        pages = -(-size // page)
        self._memory = mmap.mmap(-1, (pages + 2) * page)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for guard in (start, start + (pages + 1) * page):
            if libc.mprotect(guard, page, _NONE):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._room = np.frombuffer(self._memory, np.uint8)[page : (pages + 1) * page]

    def place(self, data: bytes, at_end: bool = True) -> np.ndarray:
        """Copy bytes to the end, or to the start, of the memory; return them as uint8[bytes]."""
        first = len(self._room) - len(data) if at_end else 0
        self._room[first : first + len(data)] = np.frombuffer(data, np.uint8)
        return self._room[first : first + len(data)]
