"""The process's one communicator: started once, found by everyone."""

import os
import socket
from dataclasses import replace

from hvdx.comm import failure, mpi
from hvdx.comm.base import Comm
from hvdx.comm.launcher import Launch, detect, usable_cores
from hvdx.comm.local import LocalComm
from hvdx.errors import LaunchError

# Ranks that poll for messages starve each other; past a few a core a step takes minutes, which looks like a hang.
_RANKS_PER_CORE = 4

_comm: Comm | None = None


def start() -> Comm:
    """Join the world, the first time; later calls return the same communicator.

    A process that no launcher started is a world of one, and nothing is started for it.

    Returns:
        The communicator of this process.

    Raises:
        LaunchError: more ranks than the machine bears, or a launcher and an MPI that do not know each other.
        HorovodError: Horovod is missing or does not fit this environment.
    """
    global _comm
    if _comm is None:
        launch = detect()
        if launch is not None and launch.size is None:
            launch = replace(launch, size=mpi.initialise())
        if launch is None or launch.size == 1:
            _comm = LocalComm()
        else:
            _check_machine(launch)
            failure.install(launch.rank, launch.size or 0)
            # Imported here, since it imports TensorFlow, which a world of one may never need.
            from hvdx.comm.horovod import HorovodComm

            _comm = HorovodComm(launch)
    return _comm


def current() -> Comm | None:
    """The communicator, or None before `start`."""
    return _comm


def stop() -> None:
    """Leave the world; `start` may join it again."""
    global _comm
    if _comm is not None:
        _comm.close()
        _comm = None


def _check_machine(launch: Launch) -> None:
    cores, here = usable_cores(), launch.local_size or 1
    # A launcher that binds each rank to a core leaves it one, which says nothing about the machine.
    cores = max(cores, os.cpu_count() or 1)
    bearable = int(os.environ.get("HVDX_RANKS_PER_CORE", _RANKS_PER_CORE)) * cores
    if here > bearable:
        raise LaunchError(
            f"{here} ranks on {socket.gethostname()}: expected at most {bearable} for its {cores} cores. "
            f"Start fewer (mpirun -n {min(bearable, cores)}), use more hosts, or set HVDX_RANKS_PER_CORE "
            f"(now {bearable // cores}) if you know better."
        )
