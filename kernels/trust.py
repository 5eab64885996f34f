"""Files whose content is executed: they are used only if no other user can have written them."""

import contextlib
import os
from pathlib import Path


def check(path: Path) -> None:
    """Check that a file or folder belongs to this user or to root, and that nobody else may write to it.

    Args:
        path: the file or folder; the last part of the path must not be a symbolic link.

    Raises:
        PermissionError: if another user can have written to it; the message says why.
        OSError: if it does not exist, or cannot be opened.

    Example:
        >>> check(Path("/usr"))
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(descriptor, path)
    finally:
        os.close(descriptor)


def read(path: Path) -> bytes:
    """Return the content of a file; check the file and its folder.

    Args:
        path: path of the file.

    Raises:
        PermissionError, OSError: see `check`.
    """
    with contextlib.ExitStack() as stack:
        # The file is looked up in the folder that was checked, even if the folder is replaced meanwhile.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        _check(folder, path.parent)
        file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        content = stack.enter_context(os.fdopen(file, "rb"))
        _check(file, path)
        return content.read()


def _check(descriptor: int, path: Path) -> None:
    status = os.fstat(descriptor)
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user (number {status.st_uid})")
    if status.st_mode & 0o022:
        raise PermissionError(f"others may write to {path} (mode {status.st_mode & 0o777:o})")
