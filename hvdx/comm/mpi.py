"""What hvdx asks of MPI itself, through mpi4py."""

import sys


def initialise() -> int:
    """Start MPI with full thread support and return the size of its world.

    Importing mpi4py starts MPI with MPI_THREAD_MULTIPLE, which Horovod needs, since it calls MPI from a thread
    of its own; started by Horovod itself the level would depend on its build.
    """
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_size()


def abort(code: int) -> None:
    """End every process of the job now, where this process has started MPI; else return.

    Args:
        code: the exit status, 1 to 255.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.COMM_WORLD.Abort(code)
