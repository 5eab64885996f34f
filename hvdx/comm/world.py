"""The process's communicators: started once, found by everyone.

MPI carries what the host exchanges, and is there from the start. Horovod is started by what exchanges tensors inside a
graph, and only then: its thread polls, and takes a good part of a core from the training. Where Horovod is not
installed, MPI carries tensors too.
"""

import os
import socket
import sys
from dataclasses import replace
from importlib import metadata
from typing import Any

from hvdx.comm import failure, mpi
from hvdx.comm.base import Comm, Engine, GraphComm
from hvdx.comm.launcher import Launch, detect, usable_cores
from hvdx.comm.local import LocalComm
from hvdx.errors import LaunchError

# Ranks that poll for messages starve each other; past a few a core a step takes minutes, which looks like a hang.
_RANKS_PER_CORE = 4

_comm: Comm | None = None
# By engine, which is not "auto".
_graphs: dict[str, GraphComm] = {}
# What "auto" is in this world.
_chosen: Engine | None = None
_launch: Launch | None = None
_servers_ended = False
_graph_calls = 0


def start(servers: int = 0) -> Comm:
    """Join the world, the first time; later calls return the same communicator.

    A process that no launcher started is a world of one, and nothing is started for it.

    Args:
        servers: so many of the last ranks only serve the others, who are the world then; see `Comm.servers`. A process
            that was started alone has none.

    Returns:
        The communicator of this process.

    Raises:
        LaunchError: more ranks than the machine bears, a launcher and an MPI that do not know each other, or servers
            for whom there are no ranks.
        HorovodError: Horovod's own launcher was used, and Horovod is missing or does not fit this environment.
    """
    global _comm, _launch
    if _comm is None and _servers_ended:
        raise LaunchError(
            "this job had servers, which ended when the world was left: it cannot be joined again. Call "
            "hvdx.shutdown() at the end only, or have workers serve: servers='colocated'."
        )
    if _comm is None:
        _launch = detect()
        if _launch is not None and _launch.size is None:
            _launch = replace(_launch, size=mpi.initialise())
        if _launch is None or _launch.size == 1:
            _comm = LocalComm()
        else:
            _check_machine(_launch)
            failure.install(_launch.rank, _launch.size or 0)
            if _launch.launcher == "Horovod (Gloo)":
                _comm = _horovod(_launch)
            else:
                _check_servers(servers, _launch.size)
                _comm = mpi.MpiComm(_launch, servers)
    return _comm


def graph(rarely: bool = False, engine: Engine = "horovod") -> GraphComm:
    """The communicator that works inside TensorFlow graphs; the first call starts Horovod. Collective.

    Args:
        rarely: most steps do without it, so Horovod's thread may look around less often, and leave the cores to them.
        engine: what carries the tensors; see `Engine`. Horovod's own launcher has no other.

    Raises:
        LaunchError, HorovodError: see `start`.
        ConfigError: MPI is asked for under Horovod's own launcher.
    """
    global _graph_calls, _chosen
    _graph_calls += 1
    comm = start()
    if isinstance(comm, GraphComm):
        if engine == "mpi" and comm.size > 1:
            comm.channel("what engine='mpi' sends")  # refuses, and says what can
        return comm
    assert _launch is not None  # a world of one has its communicator
    if engine == "auto":
        engine = _chosen = _chosen or _choose(comm, _horovod_is_installed())
    if engine not in _graphs:
        group = comm.group if isinstance(comm, mpi.MpiComm) and comm.servers else None
        _graphs[engine] = _horovod(_launch, rarely, group) if engine == "horovod" else _host_graph(comm)
    return _graphs[engine]


def _choose(comm: Comm, has_horovod: bool) -> Engine:
    """Decide what "auto" is: one rank without Horovod decides for all, and rank 0 says so. Collective."""
    everyone = comm.all_gather_object(has_horovod, "the choice of an engine")
    if all(everyone):
        return "horovod"
    if comm.rank == 0:
        where = f" on rank {everyone.index(False)}" if any(everyone) else ""
        print(
            f"hvdx: Horovod is not installed{where}, so MPI on the host combines what the ranks train. "
            "`hvdx build-horovod` brings collectives that run inside the TensorFlow graph, without a call of Python.",
            file=sys.stderr,
            flush=True,
        )
    return "mpi"


def _horovod_is_installed() -> bool:
    try:
        metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return False
    return True


def graph_calls() -> int:
    """How often `graph` was called: who combines something inside a graph asks for it, each time it is traced."""
    return _graph_calls


def _horovod(launch: Launch, rarely: bool = False, group: Any = None) -> GraphComm:
    # Imported here, since it imports TensorFlow, which a world of one may never need.
    from hvdx.comm.horovod import HorovodComm

    return HorovodComm(launch, rarely, group)


def _host_graph(comm: Comm) -> GraphComm:
    # Imported here for the same reason.
    from hvdx.comm.host_graph import HostGraphComm

    return HostGraphComm(comm)


def _check_servers(servers: int, size: int | None) -> None:
    if size is not None and servers >= size:
        error = LaunchError(
            f"{servers} servers and {size} ranks: expected at least one rank more than servers, to do the training. "
            f"Start more (mpirun -n {servers + 2}), or have workers serve: servers='colocated'."
        )
        error.collective = True
        raise error


def current() -> Comm | None:
    """The communicator, or None before `start`."""
    return _comm


def stop() -> None:
    """Leave the world; `start` may join it again."""
    global _comm, _chosen, _launch, _servers_ended
    _servers_ended = _servers_ended or bool(_comm is not None and _comm.servers)
    for comm in (*_graphs.values(), *(() if _comm is None else (_comm,))):
        comm.close()
    _graphs.clear()
    _comm = _launch = _chosen = None


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
