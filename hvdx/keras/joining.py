"""Joining the world from Keras: also assign cores and GPUs, and warn about a `fit` that is not distributed."""

import weakref

from hvdx import strategies
from hvdx.comm import Comm
from hvdx.keras import placement, separate
from hvdx.keras.seams.graphs import leave_to_python
from hvdx.strategies import Strategy

_joined: "weakref.WeakSet[Comm]" = weakref.WeakSet()


def join(strategy: Strategy | str | None = None) -> Comm:
    """Join the world in the first call; later calls return the same communicator. Collective.

    Args:
        strategy: see `hvdx.strategies.join`.

    Returns:
        The communicator of the ranks that train; ranks that serve do not return.

    Raises:
        ConfigError, LaunchError, HorovodError: see `hvdx.strategies.join`.
    """
    comm = strategies.join(strategy)
    if comm not in _joined:
        _joined.add(comm)
        placement.place(comm)
        separate.watch(comm)
        # No function of hvdx has a Python condition on a tensor. For each one, a conversion would write a file to the
        # temporary folder, which stays there if the process is killed, and warn about compiled modules such as mpi4py.
        leave_to_python("hvdx", "mpi4py", convert=["hvdx.jobs"])
    return comm
