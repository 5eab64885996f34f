"""Joining the world: workers and servers are separated before a script can read its rank."""

import sys

from hvdx import comm as world
from hvdx.comm import Comm
from hvdx.strategies.base import Strategy
from hvdx.strategies.registry import resolve, set_default
from hvdx.strategies.serving.client import client_of, close_all


def join(strategy: Strategy | str | None = None) -> Comm:
    """Join the world at the first call, and return the same communicator at later calls.

    A rank that the strategy needs as a server serves here until all workers have disconnected, and then exits.

    Args:
        strategy: strategy that determines the number of ranks that only serve; for None see `hvdx.strategies.resolve`.

    Returns:
        The communicator of the workers.

    Raises:
        ConfigError, LaunchError, HorovodError: see `hvdx.strategies.resolve` and `hvdx.comm.start`.
        SystemExit: on a server, after all workers have disconnected.
    """
    joined = world.current()
    if joined is not None:
        return joined
    chosen = resolve(strategy)
    joined = world.start(chosen.dedicated)
    if joined.serves:
        chosen.serve(joined)
        sys.exit(0)
    if joined.servers:
        # Servers wait until every worker has disconnected. Even a worker that never trains needs a client for that.
        client_of(joined)
    return joined


def leave() -> None:
    """Disconnect from the servers, then leave the world."""
    close_all()
    set_default(None)
    world.stop()
