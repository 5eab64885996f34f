"""Lock that allows one job at a time to save to a folder: two jobs would remove each other's checkpoints.

The folder holds a file that describes the job, and a process of the job holds a lock on that file. The kernel, or the
server of the file system, releases the lock when the process ends in any way. A locked folder is therefore in use, and
an unlocked one is free.
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

from hvdx import foreign
from hvdx.comm import supervision
from hvdx.comm.waiting import until
from hvdx.errors import ConfigError

#: Name of the file inside the folder.
NAME = ".hvdx-owner"
#: Seconds to wait for the lock: a requeued job may begin before its earlier processes have ended.
WAIT_SECONDS = 15.0
# Errors of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_JOBS = {"Slurm": "SLURM_JOB_ID", "PBS": "PBS_JOBID", "LSF": "LSB_JOBID"}
# Folders that this process holds, with the descriptors of their files. A lock does not exclude its own process.
_held: dict[Path, int] = {}


class Owner:
    """Ownership of a folder by this process.

    Args:
        folder: existing folder.
        wait: seconds to wait for another job that is about to end.

    Raises:
        ConfigError: if another job is using the folder; the message names the job.
        OSError: if the file cannot be written.

    Attributes:
        locked: False if the file system has no locks; another job is then not detected.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     owner = Owner(Path(folder))
        ...     owner.release()
        ...     os.listdir(folder)
        []
    """

    def __init__(self, folder: Path, wait: float = WAIT_SECONDS):
        self._folder, self._path = folder.resolve(), folder.resolve() / NAME
        self.locked = True
        before = _held.pop(self._folder, None)
        if before is not None:  # an earlier `fit` was interrupted
            os.close(before)
        until(self._take, wait)
        if self._folder not in _held:
            raise ConfigError(
                f"Checkpoint: {folder}: expected a directory for this training alone, got one that "
                f"{_described(self._path)} is using. Do: give another directory, or wait for the end of that job. "
                f"If that job has ended, its host failed and the lock remained: remove {self._path}."
            )

    def release(self) -> None:
        """Release the folder; a second call does nothing."""
        descriptor = _held.pop(self._folder, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(descriptor)

    def _take(self) -> bool:
        """Lock the file and write a description of this job to it; return whether that was possible."""
        # O_NOFOLLOW: in a folder that others may write to, the name could be a link to any file of this user.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            taken = self._lock(descriptor)
            # The previous owner may have removed the file between open and lock.
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
            # The locks of a host that failed may remain, while its job was requeued to another host.
            if _restarted(_read(self._path)):
                self._path.unlink(missing_ok=True)
            return False
        return True


def holds(folder: Path) -> bool:
    """Return whether this process holds a folder."""
    return folder.resolve() in _held


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _restarted(who: dict[str, Any]) -> bool:
    """Return whether `who` describes an earlier run of this job, which was requeued or started again since."""
    run, attempt = supervision.attempt()
    if run and who.get("run") == run and who.get("attempt") != attempt:
        return True
    return bool(_job()) and who.get("job") == _job() and who.get("restarts") != _restarts()


def _restarts() -> str:
    return os.environ.get("SLURM_RESTART_COUNT", "0")


def _job() -> str:
    """Return the batch system and number of this job, with the task of an array; "" outside a batch system."""
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
    supervised = dict(zip(("run", "attempt"), supervision.attempt(), strict=True))
    return {"job": _job(), "restarts": _restarts(), **supervised, "user": user, **place}


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(foreign.read(path))
    except (OSError, ValueError):  # being written
        return {}
    return found if isinstance(found, dict) else {}


def _described(path: Path) -> str:
    who = _read(path)
    if not who:
        return "another job"
    what = who.get("job") or "another training"
    return f"{what} ({who.get('user')}, process {who.get('pid')} on {who.get('host')}, since {who.get('since')})"
