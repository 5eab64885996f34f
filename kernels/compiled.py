"""Cache of compiled CPU kernels on disk, so that a machine compiles them once and not in every process.

Numba's own cache is not used for two reasons. It does not notice a change in a function that another file calls. And if
two processes write to it at once, they can exchange the code of two functions (Numba issue 10128). Here all kernels are
in one file, in a folder whose name has a digest of everything that they depend on. One process compiles and writes the
file, and the others wait for it. The file appears under its name only when it is complete.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba.core import config
from numba.core.base import BaseContext
from numba.core.caching import _Cache
from numba.core.codegen import CodeLibrary
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.core.types import Type

from hvdx.kernels import trust

#: Compile time on one idle core in seconds, for messages.
COMPILE_SECONDS = 15
# Longest wait for another process that compiles, and first and longest pause between two attempts to lock.
_WAIT_SECONDS, _POLL_SECONDS, _MOST_POLL_SECONDS = 300.0, 0.05, 1.0
# Settings of Numba that do not change the compiled code.
_HARMLESS = {"NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_CACHE_LOCATOR_CLASSES", "NUMBA_ENABLE_CUDASIM"}
_FILE, _DIGEST_BYTES = "kernels.bin", 32

Outcome = Literal["loaded", "compiled", "not kept"]
Types = tuple[Type, ...]
F = TypeVar("F", bound=Callable[..., object])


class _Compiled(Protocol):
    """The parts of Numba's result of a compilation that are used here."""

    lifted: Sequence[object]
    library: CodeLibrary

    def _reduce(self) -> tuple[object, ...]: ...


class _Dispatcher(Protocol):
    """The parts of Numba's dispatcher that are used here. Its stub lacks `_cache`."""

    _cache: _Cache
    overloads: dict[Types, CompileResult]


@dataclass(frozen=True)
class Ready:
    """Outcome of preparing the kernels.

    Attributes:
        outcome: "loaded" if they came from the file; "compiled" if this process compiled them and wrote the file; "not
            kept" if this process compiles each kernel at its first call.
        path: path of the file.
        why: reason if nothing was kept, else "".
    """

    outcome: Outcome
    path: Path
    why: str = ""


class _Entry(_Cache):
    """Numba cache of one kernel. Numba asks it for compiled code before it compiles."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def cache_path(self) -> str:
        return ""

    def load_overload(self, sig: Types, target_context: BaseContext) -> CompileResult | None:
        payload = _loaded.get(self._name, {}).get(sig)
        if payload is None:
            return None
        target_context.refresh()
        return cast("CompileResult", CompileResult._rebuild(target_context, *pickle.loads(payload)))

    def save_overload(self, sig: Types, data: _Compiled) -> None:
        if _collected is not None and not data.lifted and not data.library.has_dynamic_globals:
            _collected.setdefault(self._name, {})[sig] = dumps(data._reduce())

    def enable(self) -> None:
        """Do nothing: the cache is always enabled."""

    def disable(self) -> None:
        """Do nothing: the cache is always enabled."""

    def flush(self) -> None:
        """Do nothing: a complete file is not changed."""


_entries: dict[str, _Dispatcher] = {}
# Compiled code by kernel and signature: loaded from the file, or, while `prepare` compiles, kept for the file.
_loaded: dict[str, dict[Types, bytes]] = {}
_collected: dict[str, dict[Types, bytes]] | None = None
_ready: dict[Path, Ready] = {}
_lock = threading.RLock()


def disabled() -> bool:
    """Return True if Numba compiles nothing (NUMBA_DISABLE_JIT)."""
    # Numba sets the attributes of this module by their names.
    return bool(vars(config)["DISABLE_JIT"])


def entry(function: F) -> F:
    """Compile a kernel that Python calls. Its code includes the kernels that it calls."""
    dispatcher = cast("_Dispatcher", numba.njit(nogil=True, error_model="numpy")(function))
    if not disabled():
        name = f"{function.__module__}.{function.__qualname__}"
        dispatcher._cache = _Entry(name)
        _entries[name] = dispatcher
    return cast("F", dispatcher)


def _source_digest() -> str:
    """Return the digest of all files of this package."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# The digest is taken at import, because the files may be edited while this process runs.
_SOURCES = _source_digest()


def location(folder: Path) -> Path:
    """Return the path of the kernels that are compiled from these sources, by this Numba, for this processor.

    Args:
        folder: folder of compiled kernels of all versions.
    """
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("NUMBA_") and k not in _HARMLESS)
    versions = f"py{platform.python_version()}", f"numba{numba.__version__}", f"llvmlite{llvmlite.__version__}"
    everything = [_SOURCES, *versions, sys.implementation.cache_tag, np.__version__, triple, cpu, features, *settings]
    digest = hashlib.sha256("\n".join(everything).encode()).hexdigest()[:16]
    return folder / (re.sub(r"[^\w.+-]", "_", "-".join([*versions, cpu])) + f"-{digest}") / _FILE


def is_kept(folder: Path) -> bool:
    """Return True if `prepare` has nothing to compile.

    Args:
        folder: folder of compiled kernels of all versions.
    """
    return disabled() or folder in _ready or _read(location(folder)) is not None


def prepare(folder: Path, call_all: Callable[[], None]) -> Ready:
    """Load the compiled kernels, or compile and write them. The first call in a process does this for each folder.

    Args:
        folder: folder of compiled kernels of all versions.
        call_all: function that calls each kernel with every combination of argument types in use.

    Returns:
        The outcome. A folder that cannot be written to, or that other users can write to, is no error: the process then
        compiles each kernel at its first call.
    """
    with _lock:
        if folder not in _ready:
            # This entry ends the recursion: `call_all` calls functions that call `prepare`.
            path = location(folder)
            _ready[folder] = Ready("not kept", path, "Numba does not compile (NUMBA_DISABLE_JIT)")
            if not disabled():
                _ready[folder] = _load(path) or _build(path, call_all)
        return _ready[folder]


def _load(path: Path) -> Ready | None:
    found = _read(path)
    if found is None:
        return None
    _loaded.update(found)
    return Ready("loaded", path)


def _read(path: Path) -> dict[str, dict[Types, bytes]] | None:
    """Return the content of a file; None if it is missing or damaged, or if another user can have written it."""
    try:
        content = trust.read(path)
    except OSError:
        return None
    body = content[_DIGEST_BYTES:]
    if len(content) <= _DIGEST_BYTES or hashlib.sha256(body).digest() != content[:_DIGEST_BYTES]:
        return None
    found: dict[str, dict[Types, bytes]] = pickle.loads(body)
    return found if found.keys() >= _entries.keys() else None


def _build(path: Path, call_all: Callable[[], None]) -> Ready:
    """Compile while other processes wait, or wait for the process that compiles."""
    try:
        # Not writable by the user's group, whatever the umask: the file is executed.
        path.parent.mkdir(0o755, parents=True, exist_ok=True)
        trust.check(path.parent)
        with _turn(path.with_name("lock"), path):
            return _load(path) or _compile(path, call_all)
    except OSError as error:
        return Ready("not kept", path, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _turn(lock: Path, result: Path) -> Iterator[None]:
    """Wait for the lock of the process that compiles, and hold it. The system releases the lock if its holder dies.

    The caller runs without the lock if the result is replaced, if the wait is too long, or if locks do not work.

    Args:
        lock: path of the lock file.
        result: path of the file that the holder writes.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
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
                break  # Without locks in the file system, all processes compile, and the last file stays.
        yield
    finally:
        os.close(descriptor)


def _version(path: Path) -> tuple[int, int]:
    """Return an identifier that changes when the file is replaced."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _compile(path: Path, call_all: Callable[[], None]) -> Ready:
    global _collected
    # Kernels that this process has already compiled would not be compiled again, and the file would lack them.
    if any(dispatcher.overloads for dispatcher in _entries.values()):
        return Ready("not kept", path, "this process had compiled some kernels before")
    _collected = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call_all()
        found = _collected
    finally:
        _collected = None
    if found.keys() != _entries.keys():
        return Ready("not kept", path, f"Numba returned no code for {sorted(_entries.keys() - found.keys())}")
    if _source_digest() != _SOURCES:
        return Ready("not kept", path, "the sources of the kernels have changed since they were imported")
    body = pickle.dumps(found, protocol=pickle.HIGHEST_PROTOCOL)
    _write(path, hashlib.sha256(body).digest() + body)
    return Ready("compiled", path)


def _write(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, and rename it when it is complete."""
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
