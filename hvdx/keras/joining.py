"""Joining the world from Keras: also assign cores and GPUs, and warn about a `fit` that is not distributed."""

from __future__ import annotations

import os
import re
import socket
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdx import strategies
from hvdx.comm import Comm, GraphComm
from hvdx.comm.launcher import TENSORFLOW_THREADS, detect, own_cores, threads_for
from hvdx.keras import backend, separate
from hvdx.keras.backend import tf
from hvdx.keras.backends import stepped
from hvdx.keras.seams.graphs import leave_to_python
from hvdx.log import Log
from hvdx.strategies import Strategy

_log = Log(__name__)


@dataclass(frozen=True)
class Gpu:
    """GPU of a rank.

    Attributes:
        index: index among the GPUs that the rank sees; None if it sees none.
        shared: True if other ranks use the same GPU.
    """

    index: int | None = None
    shared: bool = False


def choose_gpu(visible: int, local_rank: int, local_size: int, environs: Sequence[Mapping[str, str]]) -> Gpu:
    """Choose one GPU for a rank.

    Args:
        visible: number of GPUs that this rank sees.
        local_rank, local_size: index of this rank on its host, and number of ranks there.
        environs: environment variables of the ranks on this host; see `has_own_gpus`.

    Returns:
        The first GPU if each rank has its own; else the GPU `local_rank` modulo `visible`, which is shared if
        there are more ranks than GPUs.

    Example:
        >>> choose_gpu(4, 1, 4, [{}] * 4)
        Gpu(index=1, shared=False)
        >>> choose_gpu(2, 3, 4, [{}] * 4)
        Gpu(index=1, shared=True)
    """
    if visible == 0:
        return Gpu()
    if local_size == 1 or has_own_gpus(visible, environs):
        return Gpu(0)
    return Gpu(local_rank % visible, shared=visible < local_size)


def has_own_gpus(visible: int, environs: Sequence[Mapping[str, str]]) -> bool:
    """Return whether each rank on a host has GPUs that the other ranks do not see.

    The answer is True if the lists in CUDA_VISIBLE_DEVICES have no GPU in common. In a container or a control group,
    every rank's GPU has the number 0, and only the launcher's variables give the answer: srun(1) sets
    SLURM_GPUS_PER_TASK if `--gpus-per-task` was given, and jsrun gives each resource set its own GPUs.
    SLURM_GPUS_PER_TASK counts only if a rank sees no more GPUs than this number: with `--gpu-bind=none`, and under
    mpirun in such a job, every rank sees all GPUs.

    Args:
        visible: number of GPUs that this rank sees.
        environs: environment variables of the ranks on this host.

    Example:
        >>> has_own_gpus(1, [{"SLURM_GPUS_PER_TASK": "a100:1"}] * 4)
        True
        >>> has_own_gpus(4, [{"SLURM_GPUS_PER_TASK": "a100:1"}] * 4)
        False
    """
    lists = [set(filter(None, e.get("CUDA_VISIBLE_DEVICES", "").split(","))) for e in environs]
    if all(lists) and sum(map(len, lists)) == len(set().union(*lists)):
        return True
    return all("JSM_NAMESPACE_RANK" in e or visible <= _gpus_of_a_task(e) for e in environs)


def _gpus_of_a_task(environ: Mapping[str, str]) -> int:
    """Return the number in SLURM_GPUS_PER_TASK ("2", "a100:2" or "a100:1,v100:1"); 0 if it is not set."""
    return sum(map(int, re.findall(r"(?:^|[:,])(\d+)(?=,|$)", environ.get("SLURM_GPUS_PER_TASK", ""))))


# Environment variables that `has_own_gpus` reads.
_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK", "JSM_NAMESPACE_RANK")


def place(comm: Comm) -> None:
    """Assign the host's cores and GPUs to its ranks, and print one line about it. Collective.

    Settings that the script has made stay. If TensorFlow has started already, its settings stay, too.

    Args:
        comm: communicator of the ranks that train.
    """
    if comm.size == 1:
        return
    threads = _set_threads(comm.local_size)
    mine = {name: os.environ[name] for name in _GPU_VARIABLES if name in os.environ}
    ranks = [(socket.gethostname(), comm.local_size, mine, own_cores(comm.local_size))] * comm.local_size
    if not isinstance(comm, GraphComm):  # An all-gather by Horovod would start TensorFlow before its GPU is chosen.
        ranks = comm.all_gather_object(ranks[0], "the GPUs of each rank")
    gpu = _set_gpu(comm, [environ for host, _, environ, _ in ranks if host == socket.gethostname()])
    if comm.rank == 0:
        sizes = sorted(size for _, size, _, _ in ranks)
        _log.info(f"{_describe_ranks(comm, sizes)}; {threads} and {gpu} a worker.")
        host, size, _, share = min(ranks, key=lambda found: found[3])
        if share < 1 and gpu == "no GPU":
            cores = max(1, round(share * size))
            _log.warning(
                f"{size} workers on {cores} core{'s' * (cores != 1)} of {host}: they are slower than {cores} would be. "
                f"Start at most one a core (hvdx run -n {cores}), or use more hosts.",
                head="hvdx: warning: ",
            )


def _describe_ranks(comm: Comm, sizes: list[int]) -> str:
    """Describe the numbers of workers and hosts, and the launcher.

    Args:
        comm: communicator of the ranks that train.
        sizes: number of ranks on the host of each rank, ascending.
    """
    launch = detect()
    by = f", started by {launch.launcher}" if launch is not None else ""
    if comm.cross_size == 1:
        return f"{comm.size} workers on one host{by}"
    each = f"{sizes[0]} each" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} each"
    return f"{comm.size} workers on {comm.cross_size} hosts ({each}){by}"


def _set_threads(ranks: int) -> str:
    """Give TensorFlow this rank's share of the cores; return the number of threads and its source, in words."""
    on_tensorflow = backend.name() == "tensorflow"
    share = threads_for(ranks, chosen_by=TENSORFLOW_THREADS if on_tensorflow else ("OMP_NUM_THREADS",))
    text = f"{share.threads} thread{'s' * (share.threads != 1)}" + f" ({share.source})" * bool(share.source)
    if share.source == TENSORFLOW_THREADS[0] or not on_tensorflow:
        return text  # TensorFlow reads this variable itself; on other backends a fit sets the number.
    threading = tf.config.threading
    setters = [
        (threading.get_intra_op_parallelism_threads, threading.set_intra_op_parallelism_threads),
        (threading.get_inter_op_parallelism_threads, threading.set_inter_op_parallelism_threads),
    ]
    found = [get() for get, _ in setters]
    if found[0]:
        text = f"{found[0]} thread{'s' * (found[0] != 1)} (set by the script)"
    try:
        for (_, choose), number in zip(setters, found, strict=True):
            if number == 0:
                choose(share.threads)
    except RuntimeError:
        return "TensorFlow's own number of threads (it started before hvdx: use `hvdx run`, or call hvdx.init() first)"
    return text


def _set_gpu(comm: Comm, environs: Sequence[Mapping[str, str]]) -> str:
    """Let TensorFlow see one GPU; return a description of the choice. On other backends the script chooses."""
    if backend.name() != "tensorflow":
        return "the GPU that the script chose" if stepped().has_gpu() else "no GPU"
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "no GPU"
    if tf.config.get_visible_devices("GPU") != gpus:
        return "the GPU that the script chose"
    chosen = choose_gpu(len(gpus), comm.local_rank, comm.local_size, environs)
    assert chosen.index is not None  # `gpus` is not empty
    try:
        tf.config.set_visible_devices(gpus[chosen.index], "GPU")
        tf.config.experimental.set_memory_growth(gpus[chosen.index], True)
    except (RuntimeError, ValueError):
        return "all GPUs of its host (TensorFlow started before hvdx: call hvdx.init() first)"
    if chosen.shared:
        if comm.local_rank == 0:
            _log.warning(
                f"{comm.local_size} workers on this host share {len(gpus)} "
                f"GPU{'s' * (len(gpus) != 1)}. Start one worker per GPU.",
                head="hvdx: warning: ",
            )
        return "part of a GPU"
    return "one GPU"


_joined: weakref.WeakSet[Comm] = weakref.WeakSet()


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
        place(comm)
        separate.watch(comm)
        # No function of hvdx has a Python condition on a tensor. For each one, a conversion would write a file to the
        # temporary folder, which stays there if the process is killed, and warn about compiled modules such as mpi4py.
        if backend.name() == "tensorflow":
            leave_to_python("hvdx", "mpi4py", convert=["hvdx.jobs"])
    return comm
