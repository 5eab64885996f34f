"""Communicators of this process, shared by all modules.

`start` starts MPI, which carries exchanges on the host. Horovod starts with the first exchange inside a TensorFlow
graph, because its thread polls and takes a large part of a core from the training. MPI also carries tensors, unless
Horovod can send those of GPUs directly.
"""

import multiprocessing
import os
import socket
import sys
from dataclasses import replace
from importlib import metadata

from hvdx.comm import failure, mesh, mpi, surviving
from hvdx.comm.interfaces import Comm, Engine, GraphComm
from hvdx.comm.launcher import Launch, detect, usable_cores
from hvdx.comm.local import LocalComm
from hvdx.errors import ConfigError, LaunchError
from hvdx.log import Log, set_rank

_log = Log(__name__)

# Ranks that poll for messages starve each other. With more ranks per core, a step takes minutes and looks like a hang.
_RANKS_PER_CORE = 4

# Environment variable: process id of a rank that has joined, for its child processes.
_RANK_PROCESS = "HVDX_RANK_PROCESS"

_comm: Comm | None = None
# Communicators for the graph, by engine; "auto" is not a key.
_graphs: dict[str, GraphComm] = {}
# The same for the ranks that hold the same parts of split layers, by class of communicator and groups.
_peer_graphs: dict[tuple[str, tuple[tuple[int, ...], ...]], GraphComm] = {}
# The engine that "auto" stands for in this world; None until it is chosen.
_chosen: Engine | None = None
_launch: Launch | None = None
_servers_ended = False
_graph_calls = 0
# The option `split` of `init`; None if it was not given.
_split: int | str | None = None


def start(servers: int = 0) -> Comm:
    """Join the world and return its communicator; later calls return the same one.

    A process that no launcher started is a world of one rank, and no library is started for it; so is a child process
    of a rank, such as one of multiprocessing, whose environment is that of the rank.

    Args:
        servers: number of server ranks, taken from the end of the world; see `Comm.servers`. Ignored in a world of one.

    Raises:
        LaunchError: if there are more ranks than the machine can run, the launcher does not belong to the MPI, or no
            rank is left beside the servers.
        HorovodError: if Horovod's own launcher was used, and Horovod is missing or does not fit this environment.
    """
    global _comm, _launch
    if _comm is None and _servers_ended:
        raise LaunchError(
            "this job had server ranks, which ended with hvdx.shutdown(), so the world cannot be joined again. Call "
            "hvdx.shutdown() at the end only, or have workers serve: servers='colocated'."
        )
    if _comm is None:
        _launch = None if _is_child_of_rank() else detect()
        if _launch is not None and _launch.size is None:
            _launch = replace(_launch, size=mpi.initialise())
        if _launch is None or _launch.size == 1:
            _comm = LocalComm()
            set_rank(0)
        else:
            set_rank(_launch.rank)
            split = mesh.parse(os.environ.get(mesh.VARIABLE) if _split is None else _split)
            _check_machine(_launch)
            survives = surviving.is_wanted()
            failure.install(_launch.rank, _launch.size or 0, survives)
            if survives:
                _check_survival(split)
                _check_servers(servers, _launch.size)
                _comm = surviving.SurvivingComm(_launch, servers)
            elif _launch.launcher == "Horovod (Gloo)":
                if split != 1:
                    raise ConfigError(
                        f"split={split}: layers are split by MPI, but these processes were started by Horovod's own "
                        "launcher, without MPI. Start them with mpirun, or horovodrun --mpi."
                    )
                _comm = _horovod(_launch)
            else:
                _check_servers(servers, _launch.size)
                _comm = mpi.MpiComm(_launch, servers, split)
            os.environ[_RANK_PROCESS] = str(os.getpid())
    return _comm


def _is_child_of_rank() -> bool:
    """Return whether this is a child process of a rank that has joined; say so if it is.

    Ranks that this process's own launcher started are children of the launcher.
    """
    rank = os.environ.get(_RANK_PROCESS)
    # While a child runs the script again, its module is `__mp_main__`, and no parent is known yet.
    runs_again = sys.modules.get("__mp_main__") is not sys.modules["__main__"]
    spawned = runs_again or multiprocessing.parent_process() is not None
    if rank in (None, str(os.getpid())) or not (spawned or rank == str(os.getppid())):
        return False
    _log.warning(
        f"process {os.getpid()} was started by a worker, process {rank}, and does not join the workers: hvdx.size() "
        "is 1 in it. If it runs the script again, as multiprocessing's spawn does, put the training under "
        "`if __name__ == '__main__':`, hvdx.init() included."
    )
    return True


def set_split(split: int | str | None) -> None:
    """Set the number of ranks that split a layer, before `start`.

    Args:
        split: a positive number, "node", or None for the value of `HVDX_SPLIT`.

    Raises:
        ConfigError: if it is anything else, or if the ranks were joined with another split.
    """
    global _split
    wanted = mesh.parse(split)
    if split is not None and _comm is not None and _comm.size > 1:
        groups = mesh.arrange(_comm.hosts, wanted)
        present = tuple((rank,) for rank in range(_comm.size)) if _comm.mesh is None else _comm.mesh.groups
        if sorted(groups) != sorted(present):
            raise ConfigError(
                f"split={split}: the ranks have been joined in groups of {len(present[0])} already. Call "
                f"hvdx.init(split={split!r}) before anything else that needs ranks, or set {mesh.VARIABLE}."
            )
    _split = split


def graph(rarely: bool = False, engine: Engine = "horovod") -> GraphComm:
    """Return the communicator for TensorFlow graphs; the first call starts the engine. Collective.

    Args:
        rarely: True if most steps exchange nothing in the graph; Horovod's thread then polls less often.
        engine: transport of the tensors; see `Engine`. Under Horovod's own launcher, "auto" is Horovod.

    Raises:
        LaunchError, HorovodError: see `start`.
        ConfigError: if MPI is requested under Horovod's own launcher.
    """
    global _graph_calls, _chosen
    _graph_calls += 1
    comm = start()
    if isinstance(comm, GraphComm):
        if engine == "mpi" and comm.size > 1:
            comm.channel("what engine='mpi' sends")  # raises the error that names the remedy
        return comm
    assert _launch is not None  # a world of one has returned above
    if comm.survives and engine == "horovod":
        raise ConfigError.on_all_ranks(
            f"{surviving.VARIABLE}=1: engine='horovod': Horovod does not survive the death of a rank. Do: "
            "engine='mpi', or hvdx run --max-restarts N in place of --survive."
        )
    if comm.survives:
        engine = "mpi"
    if engine == "auto":
        engine = _chosen = _chosen or _choose(comm, *_horovod_and_gpus())
    if engine not in _graphs:
        group = comm.group if isinstance(comm, mpi.MpiComm) and comm.servers else None
        _graphs[engine] = _horovod(_launch, rarely, group) if engine == "horovod" else _host_graph(comm)
    return _graphs[engine]


def graph_of_peers(rarely: bool = False, engine: Engine = "horovod") -> GraphComm:
    """Return the communicator for graphs of the ranks that hold the same parts of split layers. Collective.

    Args:
        rarely, engine: see `graph`.
    """
    groups = mesh.mesh_of(start())
    if groups.peers.size == 1:
        return LocalComm()
    whole = graph(rarely, engine)
    engine_used = type(whole).__name__
    key = engine_used, groups.groups
    if key not in _peer_graphs:
        # Horovod makes every process set on all ranks, in the same order.
        sets = [whole.subset(sorted(ranks)) for ranks in groups.peer_ranks] if engine_used == "HorovodComm" else []
        mine = next((s for s in sets if s is not None), None)
        _peer_graphs[key] = _host_graph(groups.peers) if mine is None else mine
    return _peer_graphs[key]


def _choose(comm: Comm, installed: bool, gpus: bool, nccl: bool) -> Engine:
    """Choose the engine for "auto", and print on rank 0 what another one would need. Collective.

    Args:
        installed: whether Horovod is installed for this rank.
        gpus: whether TensorFlow has GPUs on this rank.
        nccl: whether Horovod sends the tensors of GPUs directly on this rank.
    """
    direct = comm.all_gather_object(nccl, "the choice of an engine")
    if all(direct):
        return "horovod"
    if comm.rank == 0 and any(direct):
        _log.info(f"Horovod has no NCCL on rank {direct.index(False)}, so MPI on the host exchanges the tensors.")
    elif comm.rank == 0 and gpus:
        _log.info(
            "MPI on the host exchanges the tensors, which leave the GPU for it. Horovod with NCCL sends them directly: "
            "hvdx build-horovod --gpu nccl"
        )
    elif comm.rank == 0 and installed:
        _log.info("MPI exchanges the tensors, faster than Horovod on CPUs; engine='horovod' uses Horovod.")
    return "mpi"


def _horovod_and_gpus() -> tuple[bool, bool, bool]:
    """Return whether Horovod is installed, whether TensorFlow has GPUs, and whether Horovod sends their tensors."""
    import tensorflow as tf

    installed, gpus = _horovod_is_installed(), bool(tf.config.list_physical_devices("GPU"))
    if not (installed and gpus):
        return installed, gpus, False
    # Horovod is loaded only here. It raises an error if it does not fit, as training must not become slower unnoticed.
    from hvdx.comm.horovod import load

    return installed, gpus, bool(load().nccl_built())


def _horovod_is_installed() -> bool:
    try:
        metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return False
    return True


def graph_calls() -> int:
    """Return the number of calls of `graph`. A training step that exchanges in the graph calls it when traced."""
    return _graph_calls


def _horovod(launch: Launch, rarely: bool = False, group: object = None) -> GraphComm:
    # Imported here because it imports TensorFlow, which a world of one may never need.
    from hvdx.comm.horovod import PROCESS_SETS, HorovodComm

    if _comm is not None and _comm.mesh is not None:
        os.environ[PROCESS_SETS] = "1"
    return HorovodComm(launch, rarely, group)


def _host_graph(comm: Comm) -> GraphComm:
    # Imported here for the same reason.
    from hvdx.comm.host_graph import HostGraphComm

    return HostGraphComm(comm)


def _check_survival(split: int | str) -> None:
    """Refuse what does not survive the death of a rank."""
    if split != 1:
        raise ConfigError.on_all_ranks(
            f"{surviving.VARIABLE}=1: expected a training that goes on without a rank that dies, got split={split}. "
            "Do: hvdx run --max-restarts N in place of --survive."
        )


def _check_servers(servers: int, size: int | None) -> None:
    if size is not None and servers >= size:
        raise LaunchError.on_all_ranks(
            f"{servers} servers and {size} ranks: expected at least one rank more than servers, to do the training. "
            f"Start more (mpirun -n {servers + 2}), or have workers serve: servers='colocated'."
        )


def current() -> Comm | None:
    """Return the communicator, or None before `start`."""
    return _comm


def stop() -> None:
    """Leave the world. Unless it had server ranks, `start` may join it again."""
    global _comm, _chosen, _launch, _servers_ended
    _servers_ended = _servers_ended or bool(_comm is not None and _comm.servers)
    for comm in (*_graphs.values(), *(() if _comm is None else (_comm,))):
        comm.close()
    _graphs.clear()
    _peer_graphs.clear()
    _comm = _launch = _chosen = _split = None


def _check_machine(launch: Launch) -> None:
    cores, here = usable_cores(), launch.computing_here
    # A launcher may bind each rank to one core, which says nothing about the machine.
    cores = max(cores, os.cpu_count() or 1)
    most = int(os.environ.get("HVDX_RANKS_PER_CORE", _RANKS_PER_CORE)) * cores
    if here > most:
        raise LaunchError(
            f"{here} ranks on {socket.gethostname()}: expected at most {most} for its {cores} cores. "
            f"Start fewer (mpirun -n {min(most, cores)}), use more hosts, or raise HVDX_RANKS_PER_CORE "
            f"(now {most // cores})."
        )
