"""Limit on open files, raised for many networks."""

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdx.averaging.sharded import INDEX_ENDING
from hvdx.errors import ConfigError

# A Keras archive takes two descriptors, and its unpacked weights take one.
_PER_NETWORK = 3
# Descriptors for output, temporary files and libraries.
_OTHERS = 64


def _open_now() -> int:
    """Return the number of files that this process has open."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def _files(path: Path) -> int:
    """Return the maximum number of open files of a network; those in its folder, or beside its index, may be shards."""
    folder = path if path.is_dir() else path.parent if path.name.endswith(INDEX_ENDING) else None
    try:
        return _PER_NETWORK + (len(os.listdir(folder)) if folder is not None else 0)
    except OSError:
        # `open_network` reports the error.
        return _PER_NETWORK


@contextlib.contextmanager
def room_for(paths: Sequence[Path]) -> Iterator[None]:
    """Raise the limit on open files, if necessary, until the block ends.

    Args:
        paths: networks that will be open at the same time.

    Raises:
        ConfigError: if the system does not allow enough open files.
    """
    needed = sum(map(_files, paths)) + _open_now() + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        yield
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{len(paths)} networks: expected a limit of {needed} open files, got {hard}. Do: ulimit -n {needed}; or "
            "average them in groups, and then the means, weighted by the sizes of the groups."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
