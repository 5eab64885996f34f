"""The limit on open files, where there are many networks."""

import contextlib
import resource
from collections.abc import Iterator

from hvdx.errors import ConfigError

# An archive of Keras is open twice, and its unpacked weights beside it; and what else this process has open.
_PER_NETWORK = 3
_OTHERS = 64


@contextlib.contextmanager
def room_for(networks: int) -> Iterator[None]:
    """Have the system allow enough open files, until the block ends.

    Args:
        networks: that will be open at a time.

    Raises:
        ConfigError: the system does not.
    """
    needed = _PER_NETWORK * networks + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        yield
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{networks} networks: expected a limit of {needed} open files, got {hard}. Do: ulimit -n {needed}; or "
            "average them in groups, and then the means, weighted by the sizes of the groups."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
