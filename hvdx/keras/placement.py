"""Which cores and which GPU a rank takes: decided once, when the world is joined."""

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from hvdx.comm import Comm, GraphComm
from hvdx.comm.launcher import TENSORFLOW_THREADS, detect, threads_for


@dataclass(frozen=True)
class Gpu:
    """Which GPU a rank takes.

    Attributes:
        index: among those that it sees; None where it sees none.
        shared: whether other ranks have to take the same.
    """

    index: int | None = None
    shared: bool = False


def choose_gpu(visible: int, local_rank: int, local_size: int, environs: Sequence[Mapping[str, str]]) -> Gpu:
    """One GPU a rank.

    Args:
        visible: how many GPUs this rank sees.
        local_rank, local_size: this rank among those on its host.
        environs: of the ranks on this host, in the order of their local ranks: what tells whether each sees others.

    Returns:
        Where each has GPUs of its own, the first of them; else one after the other, and shared where there are not
        enough.

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
    """Whether the launcher has given each rank on a host GPUs that the others do not see.

    The lists in CUDA_VISIBLE_DEVICES say so where they have no GPU in common. Behind a container or a control group
    every rank's GPU is number 0: then it takes the word of whoever dealt them out. srun(1) sets SLURM_GPUS_PER_TASK
    where `--gpus-per-task` was asked for, and jsrun gives each resource set its own. Slurm's word counts where a rank
    sees no more GPUs than it says: with `--gpu-bind=none`, and under mpirun in such a job, every rank sees all.

    Args:
        visible: how many GPUs this rank sees.
        environs: of the ranks on this host.

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
    """What `--gpus-per-task` asked for: "2", or "a100:2", or "a100:1,v100:1"; 0 where nothing did."""
    return sum(map(int, re.findall(r"(?:^|[:,])(\d+)(?=,|$)", environ.get("SLURM_GPUS_PER_TASK", ""))))


_ASKED = ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK", "JSM_NAMESPACE_RANK")


def place(comm: Comm) -> None:
    """Share the host's cores and GPUs among its ranks, and say so in one line. Collective.

    What TensorFlow has started already stays as it is, and so does what the script has chosen.

    Args:
        comm: the ranks that train.
    """
    if comm.size == 1:
        return
    threads = _set_threads(comm.local_size)
    mine = {name: os.environ[name] for name in _ASKED if name in os.environ}
    said = [(socket.gethostname(), comm.local_size, mine)] * comm.local_size
    if not isinstance(comm, GraphComm):  # Horovod's would start TensorFlow, and nothing could be chosen any more
        said = comm.all_gather_object(said[0], "who sees which GPUs")
    gpu = _set_gpu(comm, [environ for host, _, environ in said if host == socket.gethostname()])
    if comm.rank == 0:
        sizes = sorted(size for _, size, _ in said)
        print(f"hvdx: {_who(comm, sizes)}; {threads} and {gpu} a worker.", file=sys.stderr, flush=True)


def _who(comm: Comm, sizes: list[int]) -> str:
    """How many ranks where, and by whom; `sizes` are the ranks on each rank's host."""
    launch = detect()
    by = f", started by {launch.launcher}" if launch is not None else ""
    if comm.cross_size == 1:
        return f"{comm.size} workers on one host{by}"
    each = f"{sizes[0]} each" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]} each"
    return f"{comm.size} workers on {comm.cross_size} hosts ({each}){by}"


def _set_threads(ranks: int) -> str:
    """Have TensorFlow use this rank's share of the cores: what there is to say of it."""
    share, threading = threads_for(ranks, chosen_by=TENSORFLOW_THREADS), tf.config.threading
    said = f"{share.threads} thread{'s' * (share.threads != 1)}" + f" ({share.source})" * bool(share.source)
    if share.source == TENSORFLOW_THREADS[0]:
        return said  # TensorFlow has read it
    setters = [
        (threading.get_intra_op_parallelism_threads, threading.set_intra_op_parallelism_threads),
        (threading.get_inter_op_parallelism_threads, threading.set_inter_op_parallelism_threads),
    ]
    found = [get() for get, _ in setters]
    if found[0]:
        said = f"{found[0]} thread{'s' * (found[0] != 1)} (set by the script)"
    try:
        for (_, choose), number in zip(setters, found, strict=True):
            if number == 0:
                choose(share.threads)
    except RuntimeError:
        return "TensorFlow's own number of threads (it started before hvdx; `hvdx run` tells it, or hvdx.init() first)"
    return said


def _set_gpu(comm: Comm, environs: Sequence[Mapping[str, str]]) -> str:
    """Have TensorFlow see one GPU: what there is to say of it."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "no GPU"
    if tf.config.get_visible_devices("GPU") != gpus:
        return "the GPU that the script chose"
    chosen = choose_gpu(len(gpus), comm.local_rank, comm.local_size, environs)
    assert chosen.index is not None  # there are some
    try:
        tf.config.set_visible_devices(gpus[chosen.index], "GPU")
        tf.config.experimental.set_memory_growth(gpus[chosen.index], True)
    except (RuntimeError, ValueError):
        return "all GPUs of its host (TensorFlow started before hvdx: call hvdx.init() first)"
    if chosen.shared:
        if comm.local_rank == 0:
            print(
                f"hvdx: warning: {comm.local_size} workers on this host share {len(gpus)} "
                f"GPU{'s' * (len(gpus) != 1)}. Start one a GPU.",
                file=sys.stderr,
                flush=True,
            )
        return "part of a GPU"
    return "one GPU"
