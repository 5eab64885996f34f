"""Compiled CPU kernels on disk, so that a machine compiles them once and not in every process.

Numba has a cache of its own, which is not used here: it does not notice a change in a function that is called from
another file, and two processes that write to it at once can exchange the code of two functions (Numba issue 10128).
Here all kernels are in one file, in a folder whose name is a digest of everything that they depend on. One process
compiles and writes the file, the others wait for it. A file that exists is complete and is never changed.
"""

import contextlib
import fcntl
import hashlib
import os
import pickle
import platform
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

#: Seconds on one idle core, for messages.
COMPILE_SECONDS = 15
# How long a process waits for another one that compiles, before it compiles by itself.
_WAIT_SECONDS, _POLL_SECONDS, _MOST_POLL_SECONDS = 300.0, 0.05, 1.0
# Settings of Numba that say where and with how many threads, and do not change the code.
_HARMLESS = {"NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_CACHE_LOCATOR_CLASSES", "NUMBA_ENABLE_CUDASIM"}
_FILE, _DIGEST_BYTES = "kernels.bin", 32

Outcome = Literal["loaded", "compiled", "not kept"]


@dataclass(frozen=True)
class Ready:
    """How the kernels became ready.

    Attributes:
        outcome: "loaded" from the file; "compiled" here, and kept for others; "not kept": this process compiles each
            kernel when it is first called.
        path: the file.
        why: why nothing was kept; "" otherwise.
    """

    outcome: Outcome
    path: Path
    why: str = ""


class _Entry(_Cache):
    """The place in which Numba looks for the compiled code of one kernel before it compiles."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def cache_path(self) -> str:
        return ""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        payload = _loaded.get(self._name, {}).get(sig)
        if payload is None:
            return None
        target_context.refresh()
        return CompileResult._rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig: Any, data: Any) -> None:
        if _collected is not None and not data.lifted and not data.library.has_dynamic_globals:
            _collected.setdefault(self._name, {})[sig] = dumps(data._reduce())

    def enable(self) -> None:
        """Nothing to do: `prepare` decides."""

    def disable(self) -> None:
        """Nothing to do: `prepare` decides."""

    def flush(self) -> None:
        """Nothing to do: the file is never changed."""


_entries: dict[str, Any] = {}
# By kernel and signature: what the file holds, and what is to be written.
_loaded: dict[str, dict[Any, bytes]] = {}
_collected: dict[str, dict[Any, bytes]] | None = None
_ready: dict[Path, Ready] = {}
_lock = threading.RLock()


def entry(function: Callable[..., Any]) -> Any:
    """Compile a kernel that Python calls; those that only other kernels call are part of its code."""
    dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
    if not config.DISABLE_JIT:
        name = f"{function.__module__}.{function.__qualname__}"
        dispatcher._cache = _Entry(name)
        _entries[name] = dispatcher
    return dispatcher


def _source_digest() -> str:
    """Digest of all files of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# As it is when the kernels are imported: they may be edited while this process runs.
_SOURCES = _source_digest()


def location(folder: Path) -> Path:
    """The file of kernels compiled from these sources, by this Numba, for this processor.

    Args:
        folder: for all states of the kernels.
    """
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("NUMBA_") and k not in _HARMLESS)
    versions = f"py{platform.python_version()}", f"numba{numba.__version__}", f"llvmlite{llvmlite.__version__}"
    everything = [_SOURCES, *versions, sys.implementation.cache_tag, np.__version__, triple, cpu, features, *settings]
    digest = hashlib.sha256("\n".join(everything).encode()).hexdigest()[:16]
    return folder / (re.sub(r"[^\w.+-]", "_", "-".join([*versions, cpu])) + f"-{digest}") / _FILE


def is_kept(folder: Path) -> bool:
    """Tell whether `prepare` would find the kernels compiled.

    Args:
        folder: as for `prepare`.
    """
    return bool(config.DISABLE_JIT) or folder in _ready or _read(location(folder)) is not None


def prepare(folder: Path, call_all: Callable[[], None]) -> Ready:
    """Load the compiled kernels, or compile them and keep them for all other processes; once in a process.

    Args:
        folder: for all states of the kernels.
        call_all: calls each kernel with each type of arguments that it is called with.

    Returns:
        How it went. A folder that cannot be written to is no error: the process then compiles what it calls.
    """
    with _lock:
        if folder not in _ready:
            # Set before: `call_all` comes through the same doors.
            path = location(folder)
            _ready[folder] = Ready("not kept", path, "Numba does not compile (NUMBA_DISABLE_JIT)")
            if not config.DISABLE_JIT:
                _ready[folder] = _load(path) or _build(path, call_all)
        return _ready[folder]


def _load(path: Path) -> Ready | None:
    found = _read(path)
    if found is None:
        return None
    _loaded.update(found)
    return Ready("loaded", path)


def _read(path: Path) -> dict[str, dict[Any, bytes]] | None:
    """What a file holds; None if there is none, or if it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body = content[_DIGEST_BYTES:]
    if len(content) <= _DIGEST_BYTES or hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
        return None
    found = pickle.loads(body)
    return found if found.keys() >= _entries.keys() else None


def _build(path: Path, call_all: Callable[[], None]) -> Ready:
    """Compile while others wait, or wait for another one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _turn(path.with_name("lock"), path):
            return _load(path) or _compile(path, call_all)
    except OSError as error:
        return Ready("not kept", path, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _turn(lock: Path, result: Path) -> Iterator[None]:
    """Hold a lock, which the system releases when its holder dies; go on without it when there is a new result.

    Args:
        lock: of the one that compiles.
        result: what it writes.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        end, pause, before = time.monotonic() + _WAIT_SECONDS, _POLL_SECONDS, _version(result)
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if _version(result) != before:
                    break
                time.sleep(pause)
                pause = min(1.2 * pause, _MOST_POLL_SECONDS)
            except OSError:
                break  # A file system without locks: all compile, and the last one's file stays.
        yield
    finally:
        os.close(descriptor)


def _version(path: Path) -> tuple[int, int]:
    """What tells a file from the one that it replaced."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _compile(path: Path, call_all: Callable[[], None]) -> Ready:
    global _collected
    # What this process has compiled before would not be compiled, and not be collected, again.
    if any(dispatcher.overloads for dispatcher in _entries.values()):
        return Ready("not kept", path, "this process had compiled some of them before")
    _collected = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call_all()
        found = _collected
    finally:
        _collected = None
    if found.keys() != _entries.keys():
        return Ready("not kept", path, f"Numba gave no code of {sorted(_entries.keys() - found.keys())}")
    if _source_digest() != _SOURCES:
        return Ready("not kept", path, "the sources of the kernels have changed since they were imported")
    body = pickle.dumps(found, protocol=pickle.HIGHEST_PROTOCOL)
    _write(path, hashlib.sha256(body).digest() + body)
    return Ready("compiled", path)


def _write(path: Path, content: bytes) -> None:
    """Write a file that has its name only when it is complete."""
    descriptor, temporary = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
