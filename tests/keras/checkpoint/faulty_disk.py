"""Disk that fails at a chosen operation, by an error or as if the process had been killed there."""

import errno
import functools
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hvdx.averaging.extents import Output
from hvdx.keras.checkpoint import files

_TAKES_SPACE = {"create", "write", "mkdir"}
_CHILD_SECONDS = 120
# Polls of a waiting rank before a kill, and seconds to wait for them; in these tests ranks poll every millisecond.
_LOOKS, _LOOKS_SECONDS = 2, 0.2


class Operation(NamedTuple):
    """Call that changes a folder or makes a change durable.

    Attributes:
        what: create, open (for reading), write, fsync, rename, mkdir, remove or rmdir.
        path: path of the file or folder.
        to: new path, for a rename.
    """

    what: str
    path: Path
    to: Path | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.path}" + (f" to {self.to}" if self.to else "")


class Disk:
    """Counter of the operations of this process on a folder, which fails at one of them.

    It observes file operations by an audit hook of Python, which cannot be removed: make a disk only in a child process
    of `forked`.

    Attributes:
        operations: operations that have begun, in order.
        outputs: paths of the files that were opened through `Output`, whose writes are counted.
        killed: event that is set when a kill takes place.
    """

    def __init__(self) -> None:
        self._lock, self._dead = threading.Lock(), set[Path]()
        self.watch(Path("/nowhere"))
        sys.addaudithook(self._audit)
        # Only a crash of the host loses pages that are not on the disk, so the tests need no real fsync.
        os.fsync = self._fsync  # type: ignore[assignment]
        files.Output = functools.partial(_Watched, self)  # type: ignore[misc, assignment]

    def watch(self, folder: Path, at: int | None = None, kill: bool = False) -> None:
        """Begin to count.

        Args:
            folder: folder whose operations are counted.
            at: number of the operation that fails, counted from 0; None for no fault.
            kill: whether each thread stops forever at its next operation from then on, so that no handler, `finally` or
                destructor runs. Otherwise the operation raises an OSError; if it takes space, the disk stays full.
        """
        self.operations: list[Operation] = []
        self.outputs: list[Path] = []
        self.killed = threading.Event()
        self._folder, self._at, self._kill = folder, at, kill
        self._full, self._looks, self._waiting = False, 0, 0

    def waits(self) -> None:
        """Record that this thread begins to wait for files of other ranks."""
        self._waiting = threading.get_ident()

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | os.PathLike):
            self.begin("create" if args[2] & (os.O_WRONLY | os.O_RDWR) else "open", args[0])
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            self.begin(event.removeprefix("os."), _resolved(args[0], args[-1]))
        elif event == "os.rename":
            self.begin("rename", _resolved(args[0], args[2]), _resolved(args[1], args[3]))
        elif event == "os.listdir" and self._is_watched(args[0]):
            self._looks += 1

    def _fsync(self, handle: int) -> None:
        self.begin("fsync", os.readlink(f"/proc/self/fd/{handle}"))

    def _is_watched(self, path: Any) -> bool:
        """Return whether a path is in the folder; never return in a folder whose ranks were killed."""
        if not isinstance(path, str | os.PathLike):
            return False
        within = {Path(path), *Path(path).parents}
        if within & self._dead:
            threading.Event().wait()
        return self._folder in within

    def begin(self, what: str, path: Any, to: Any = None) -> None:
        """Record an operation before it is done; see `Operation`.

        Raises:
            OSError: if the operation fails.
        """
        if not self._is_watched(path):
            return
        with self._lock:
            number = len(self.operations)
            self.operations.append(Operation(what, Path(path), None if to is None else Path(to)))
        if number == self._at and self._kill:
            self._let_others_look()
            self._dead.add(self._folder)
            self.killed.set()
            threading.Event().wait()
        if number == self._at:
            self._full = what in _TAKES_SPACE
            if not self._full:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        if self._full and what in _TAKES_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _let_others_look(self) -> None:
        """Let a waiting rank see the files that this one leaves, so that the test covers its reaction to them."""
        if self._waiting in (0, threading.get_ident()):
            return
        wanted, end = self._looks + _LOOKS, time.monotonic() + _LOOKS_SECONDS
        while self._looks < wanted and time.monotonic() < end:
            time.sleep(0.0005)


class _Watched(Output):
    """Output whose writes are two operations each, so that a file can be cut in the middle of a write."""

    def __init__(self, disk: Disk, path: Path):
        self._disk = disk
        disk.outputs.append(path)
        super().__init__(path)

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        half = len(content) // 2
        for part in (content[:half], content[half:]):
            self._disk.begin("write", self.name)
            super().write(part)
        return len(content)


def _resolved(path: Any, folder: int) -> str:
    """Return a path that may be relative to the descriptor of a folder."""
    return os.fspath(path) if folder == -1 else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)


def forked(work: Callable[[], Any]) -> Any:
    """Run a function in a forked child process, which ends without waiting for its threads.

    Args:
        work: function whose result is picklable.

    Returns:
        The result of the function.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_CHILD_SECONDS)
        gc.disable()  # a collection would write to most pages of memory, and so copy them
        try:
            result = True, pickle.dumps(work())
        except BaseException:
            result = False, traceback.format_exc()
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}"
    done, result = pickle.loads(content)
    assert done, result
    return pickle.loads(result)
