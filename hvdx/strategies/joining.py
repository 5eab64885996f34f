"""Joining the world: who trains and who serves is decided here, before anybody asks for a rank."""

import sys

from hvdx import comm as world
from hvdx.comm import Comm
from hvdx.strategies.base import Strategy
from hvdx.strategies.registry import resolve, set_default
from hvdx.strategies.serving.client import client_of, close_all


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
    joined = world.start(chosen.dedicated)
    if joined.serves:
        chosen.serve(joined)
        sys.exit(0)
    if joined.servers:
        # Servers wait for the good-bye of every worker, whether it trains or not.
        client_of(joined)
    return joined


def leave() -> None:
    """Leave the servers, and then the world."""
    close_all()
    set_default(None)
    world.stop()
