"""Which job a folder of checkpoints belongs to while it trains: two that save there would remove each other's work.

The folder has a file that says who it is, and that process holds a lock on it. The kernel, or the server of the file
system, gives the lock back however the process ends, so what is locked is in use, and what is not may be taken.
"""

import contextlib
import errno
import fcntl
import getpass
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from hvdx.comm.waiting import until
from hvdx.errors import ConfigError

#: The file, inside the folder.
NAME = ".hvdx-owner"
#: A job that was requeued may begin while its processes of before are about to end.
PATIENCE_SECONDS = 15.0
# What a file system without locks answers.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_JOBS = {"Slurm": "SLURM_JOB_ID", "PBS": "PBS_JOBID", "LSF": "LSB_JOBID"}
# Folders that this process holds, and the files' descriptors: its locks do not keep itself out.
_held: dict[Path, int] = {}


class Owner:
    """Holds a folder for this process.

    Args:
        folder: which has to exist.
        patience: seconds to wait for another job that is about to end.

    Raises:
        ConfigError: another job is using the folder; the message names it.
        OSError: the file cannot be written.

    Attributes:
        locked: False where the file system has no locks, and another job would not be noticed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     owner = Owner(Path(folder))
        ...     owner.release()
        ...     os.listdir(folder)
        []
    """

    def __init__(self, folder: Path, patience: float = PATIENCE_SECONDS):
        self._folder, self._path = folder.resolve(), folder.resolve() / NAME
        self.locked = True
        before = _held.pop(self._folder, None)
        if before is not None:  # of a `fit` that did not come to its end
            os.close(before)
        until(self._take, patience)
        if self._folder not in _held:
            raise ConfigError(
                f"Checkpoint: {folder}: expected a directory for this training alone, got one that "
                f"{_described(self._path)} is using. Do: give another directory, or wait for the end of that job. "
                f"If there is no such job any more, its host went down with the lock: remove {self._path}."
            )

    def release(self) -> None:
        """Let others have the folder; may be called twice."""
        descriptor = _held.pop(self._folder, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(descriptor)

    def _take(self) -> bool:
        """Lock the file and write into it who this is; whether that was possible."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            taken = self._lock(descriptor)
            # It may have been removed in between, by who had it.
            if not taken or not _same(descriptor, self._path):
                time.sleep(0.1)
                os.close(descriptor)
                return False
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_here()).encode(), 0)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        _held[self._folder] = descriptor
        return True

    def _lock(self, descriptor: int) -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                self.locked = False
                return True
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            # A host that died may keep its locks for ever; its job goes on elsewhere.
            if _restarted(_read(self._path)):
                self._path.unlink(missing_ok=True)
            return False
        return True


def holds(folder: Path) -> bool:
    """Whether this process holds a folder."""
    return folder.resolve() in _held


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _restarted(who: dict[str, Any]) -> bool:
    """Whether a requeued job was this very one."""
    return bool(_job()) and who.get("job") == _job() and who.get("restarts") != _restarts()


def _restarts() -> str:
    return os.environ.get("SLURM_RESTART_COUNT", "0")


def _job() -> str:
    """The batch system's name of this job, the task of an array included; "" outside of one."""
    for system, variable in _JOBS.items():
        number = os.environ.get(variable)
        if number:
            index = os.environ.get("LSB_JOBINDEX", "0") if system == "LSF" else "0"
            return f"{system} job {number}" + f"[{index}]" * (index != "0")
    return ""


def _here() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        user = str(os.getuid())
    place = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}
    return {"job": _job(), "restarts": _restarts(), "user": user, **place}


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):  # being written
        return {}
    return found if isinstance(found, dict) else {}


def _described(path: Path) -> str:
    who = _read(path)
    if not who:
        return "another job"
    what = who.get("job") or "another training"
    return f"{what} ({who.get('user')}, process {who.get('pid')} on {who.get('host')}, since {who.get('since')})"
