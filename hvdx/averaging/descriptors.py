"""The limit on open files, where there are many networks."""

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdx.averaging.sharded import INDEX_ENDING
from hvdx.errors import ConfigError

# An archive of Keras takes two descriptors, and its unpacked weights take one.
_PER_NETWORK = 3
# Descriptors for output, temporary files and libraries.
_OTHERS = 64


def _open_now() -> int:
    """Files that this process has open already."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def _files(path: Path) -> int:
    """Files of one network; those of a folder, or beside an index, may be its shards."""
    folder = path if path.is_dir() else path.parent if path.name.endswith(INDEX_ENDING) else None
    try:
        return _PER_NETWORK + (len(os.listdir(folder)) if folder is not None else 0)
    except OSError:
        # `open_network` reports it.
        return _PER_NETWORK


@contextlib.contextmanager
def room_for(paths: Sequence[Path]) -> Iterator[None]:
    """Have the system allow enough open files, until the block ends.

    Args:
        paths: networks that will be open at a time.

    Raises:
        ConfigError: the system does not.
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
