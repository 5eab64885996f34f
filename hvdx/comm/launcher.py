"""How this process was started: rank and size as the launcher tells them, before any MPI is up; and its share of cores.

Where the names of the variables come from: Open MPI's "Environment variables set for MPI applications"; srun(1),
"output environment variables"; pbs_resources(7B), "ompthreads"; IBM's "Environment variables set for job execution"
(Spectrum LSF). Hydra's (MPICH, Intel MPI) and those of Cray's PALS are what job scripts of sites with them read.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What a launcher told this process through its environment.

    Attributes:
        launcher: "Open MPI", "Hydra", "Slurm", "Horovod (Gloo)", "MVAPICH", "jsrun", "PALS" or "PMIx".
        rank, size: this process in the world; a size of None is known to MPI alone.
        local_rank, local_size: this process among those on its host; None where the launcher is silent.
    """

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None = None
    local_size: int | None = None


# launcher: rank, size, local rank, local size. The first whose rank and size are set is believed, so
# the innermost comes first: mpirun inside a Slurm job sees Slurm's variables too.
_VARIABLES = {
    "Horovod (Gloo)": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Cray's own PMI sets PMI_LOCAL_RANK; where MPI reaches PALS through PMIx, there is no size: see `detect`.
    "PALS": ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "jsrun": (
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    # SLURM_PROCID alone is also set in a batch script, where nothing was launched in parallel;
    # the number of tasks of a step is not.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def detect(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Read the launcher's variables.

    Args:
        environ: where to look; the process environment by default.

    Returns:
        What the launcher said, or None for a process that was started alone.

    Example:
        >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).rank
        1
    """
    environ = os.environ if environ is None else environ
    for launcher, names in _VARIABLES.items():
        rank, size, local_rank, local_size = (_integer(environ.get(name)) for name in names)
        if launcher == "Slurm":
            local_size = _tasks_here(environ.get(names[3], ""), _integer(environ.get("SLURM_NODEID")))
        if launcher == "Hydra" and local_rank is None and _by_srun(rank, size, environ):
            continue
        if rank is not None and size is not None:
            return Launch(launcher, rank, size, *_pair(local_rank, local_size, environ))
    for launcher, (name, _, *local) in (("PALS", _VARIABLES["PALS"]), ("PMIx", ("PMIX_RANK", ""))):
        rank = _integer(environ.get(name))
        if rank is not None:
            local_rank, local_size = [_integer(environ.get(n)) for n in local] or [None, None]
            return Launch(launcher, rank, None, *_pair(local_rank, local_size, environ))
    return None


def _by_srun(rank: int | None, size: int | None, environ: Mapping[str, str]) -> bool:
    """Whether PMI's variables are those of `srun --mpi=pmi2`, and not of a Hydra that srun may have started."""
    task, tasks, *_ = _VARIABLES["Slurm"]
    return (rank, size) == (_integer(environ.get(task)), _integer(environ.get(tasks)))


def _pair(local_rank: int | None, local_size: int | None, environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """A local rank and size that the same launcher gave; Cray's PMI has names of its own."""
    if local_rank is None or local_size is None:
        cray = _integer(environ.get("PMI_LOCAL_RANK")), _integer(environ.get("PMI_LOCAL_SIZE"))
        return cray if None not in cray else (local_rank, local_size)
    return local_rank, local_size


def _tasks_here(text: str, node: int | None) -> int | None:
    """How many tasks Slurm runs on a node: "2(x3),1" are 2 on each of three nodes, and 1 on the fourth."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    if not counts:
        return None
    return counts[node] if node is not None and node < len(counts) else counts[0]


def _integer(text: str | None) -> int | None:
    """The leading integer of `text`."""
    digits = ""
    for character in text or "":
        if not character.isdigit():
            break
        digits += character
    return int(digits) if digits else None


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def core_mask() -> int:
    """The cores this process may run on, a bit each."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def fair_cores(masks: Sequence[int], mine: int) -> int:
    """How many cores a rank has, where some are its own and others are shared with ranks beside it; at least one.

    Args:
        masks: of the ranks on this host, see `core_mask`.
        mine: which of them is meant.

    Example:
        >>> fair_cores([0b1111, 0b1111], 0)  # both may run on all four
        2
        >>> fair_cores([0b0011, 0b1100], 0)  # bound to two each
        2
    """
    share = 0.0
    for core in range(masks[mine].bit_length()):
        if masks[mine] >> core & 1:
            share += 1 / sum(mask >> core & 1 for mask in masks)
    return max(1, int(share + 1e-6))


# What `fair_cores` found when the world was joined; it takes all ranks of the host to know.
_fair: int | None = None


def set_fair_cores(cores: int | None) -> None:
    """Remember the outcome of `fair_cores`; None forgets it."""
    global _fair
    _fair = cores


@dataclass(frozen=True)
class Share:
    """How many threads a rank is to have.

    Attributes:
        threads: so many.
        source: who says so: the name of a variable, or "" for a share of the cores.
        chosen: whether the user did.
    """

    threads: int
    source: str = ""
    chosen: bool = False


#: Variables by which a user chooses TensorFlow's threads. It reads the first itself; the second is what job scripts
#: set for all libraries of a rank.
TENSORFLOW_THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def threads_for(
    ranks: int, environ: Mapping[str, str] | None = None, chosen_by: Sequence[str] = ("OMP_NUM_THREADS",)
) -> Share:
    """Threads for one of several ranks on a host: the one place that decides.

    What the user has set counts, whatever the cores are. Else a rank gets what the batch system gives a task, and no
    more than its share of the cores that it may run on, so that ranks do not take cores from each other.

    Args:
        ranks: on this host.
        environ: where to look; the process environment by default.
        chosen_by: variables by which a user chooses, the first one first.

    Example:
        >>> threads_for(2, {"OMP_NUM_THREADS": "3"})
        Share(threads=3, source='OMP_NUM_THREADS', chosen=True)
    """
    environ = os.environ if environ is None else environ
    for name in chosen_by:
        number = _integer(environ.get(name))
        if number and not _set_by_pbs(name, environ):
            return Share(number, name, True)
    cores = max(1, min(usable_cores(), (os.cpu_count() or 1) // ranks)) if _fair is None else _fair
    number, source = _batch_threads(ranks, environ)
    return Share(number, source) if number is not None and number < cores else Share(cores)


def _set_by_pbs(name: str, environ: Mapping[str, str]) -> bool:
    """PBS sets NCPUS and OMP_NUM_THREADS to `ompthreads`, or to all cores of the chunk where nobody asked for any."""
    return name == "OMP_NUM_THREADS" and "PBS_JOBID" in environ and environ.get(name) == environ.get("NCPUS")


def _batch_threads(ranks: int, environ: Mapping[str, str]) -> tuple[int | None, str]:
    """What the batch system gives a task, and the variable that says so."""
    # The first is set by the script of `hvdx job lsf`: LSF counts slots, whatever the cores of a slot are.
    for name in ("HVDX_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"):
        number = _integer(environ.get(name))
        if number:
            return number, name
    number = _integer(environ.get("SLURM_CPUS_ON_NODE"))
    if number:
        return max(1, number // ranks), "SLURM_CPUS_ON_NODE"
    if "PBS_JOBID" in environ and _integer(environ.get("NCPUS")):
        return _integer(environ.get("NCPUS")), "NCPUS"
    # "host cores host cores"; jsrun runs on hosts that this leaves out, and binds its ranks itself.
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    slots = {host.split(".")[0]: _integer(n) for host, n in zip(words[::2], words[1::2], strict=False)}
    number = slots.get(socket.gethostname().split(".")[0])
    if number and "JSM_NAMESPACE_RANK" not in environ:
        return max(1, number // ranks), "LSB_MCPU_HOSTS"
    return None, ""


def share_of_cores(ranks: int) -> int:
    """Cores for one of several ranks on a host, whatever the user says; see `threads_for`.

    Args:
        ranks: on this host.
    """
    return threads_for(ranks, chosen_by=()).threads


def kernel_threads(ranks: int) -> int | None:
    """Threads for one of several ranks on a host; None leaves it to OMP_NUM_THREADS, or to all cores for a rank alone.

    Args:
        ranks: on this host.
    """
    share = threads_for(ranks)
    return None if share.chosen or ranks <= 1 else share.threads
