"""Who trains and who serves: decided when the world is joined, before anybody asks for a rank."""

import sys
from collections.abc import Callable

from hvdx import comm as world
from hvdx.comm import Comm
from hvdx.comm.launcher import kernel_threads
from hvdx.comm.signals import Announcement
from hvdx.strategies.base import Strategy
from hvdx.strategies.parameter_server import ParameterServer
from hvdx.strategies.registry import resolve, set_default
from hvdx.strategies.serving.desk import Desk
from hvdx.strategies.serving.messages import SERVER_BOX
from hvdx.strategies.serving.office import close_all, office_of, serve

# Called with the communicator once the world is joined, by every rank that trains.
_hooks: list[Callable[[Comm], None]] = []


def after_joining(hook: Callable[[Comm], None]) -> None:
    """Have something done each time the world is joined, on the ranks that train.

    Args:
        hook: takes the communicator; collective.
    """
    if hook not in _hooks:
        _hooks.append(hook)


def join(strategy: Strategy | str | None = None) -> Comm:
    """Join the world, the first time; later calls return the same communicator.

    A rank that the strategy wants as a server serves here until all workers have ended, and then ends as well.

    Args:
        strategy: what the workers will use, if they do not say otherwise; None for what `HVDX_STRATEGY` says.

    Returns:
        The communicator of the workers.

    Raises:
        ConfigError, LaunchError, HorovodError: see `hvdx.strategies.resolve` and `hvdx.comm.start`.
        SystemExit: on a server, in the end.
    """
    joined = world.current()
    if joined is not None:
        return joined
    chosen = resolve(strategy)
    joined = world.start(chosen.dedicated if isinstance(chosen, ParameterServer) else 0)
    if joined.serves:
        # Workers decide when to end. A signal that tells all ranks must not end a server before them.
        Announcement.ignore()
        postbox = joined.postbox(SERVER_BOX)
        serve(postbox, Desk(joined.workers, threads=kernel_threads(joined.local_size)))
        sys.exit(0)
    if joined.servers:
        # Servers wait for the good-bye of every worker, whether it trains or not.
        office_of(joined)
    for hook in _hooks:
        hook(joined)
    return joined


def leave() -> None:
    """Leave the servers, and then the world."""
    close_all()
    set_default(None)
    world.stop()
