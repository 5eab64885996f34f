"""Rank and size of this process from the launcher's environment, before MPI starts, and its share of the cores.

Sources of the variables' names: Open MPI's "Environment variables set for MPI applications"; srun(1), "output
environment variables"; pbs_resources(7B), "ompthreads"; IBM's "Environment variables set for job execution" (Spectrum
LSF). Those of Hydra (MPICH, Intel MPI) and of Cray's PALS are taken from the job scripts of sites that use them.
"""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Environment variable: number of spares, which are the last processes of the job.
SPARES = "HVDX_SPARES"


def spares() -> int:
    """Return the number of spares in the environment; 0 if it is no number, which `hvdx.comm.spares` refuses."""
    text = os.environ.get(SPARES, "")
    return int(text) if text.isdigit() else 0


@dataclass(frozen=True)
class Launch:
    """Launcher of this process, with the rank and size from its environment variables.

    Attributes:
        launcher: "Open MPI", "Hydra", "Slurm", "Horovod (Gloo)", "MVAPICH", "jsrun", "PALS" or "PMIx".
        rank, size: rank of this process and size of the world; a size of None has to be read from MPI.
        local_rank, local_size: rank among the ranks on this host, and their number; None if the launcher omits it.
    """

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None = None
    local_size: int | None = None

    @property
    def computing_here(self) -> int:
        """Number of ranks on this host, of which spares, the last ranks of the job, compute nothing; at least 1."""
        here = self.local_size or 1
        # On several hosts, where they are is not known before the ranks have met.
        return max(1, here - spares()) if here == self.size else here


# launcher: rank, size, local rank, local size. The first launcher whose rank and size are set is used, so the innermost
# comes first: mpirun inside a Slurm job sees Slurm's variables too.
_VARIABLES = {
    "Horovod (Gloo)": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Cray's own PMI sets PMI_LOCAL_RANK. If MPI reaches PALS through PMIx, no size is set; see `detect`.
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
    # A batch script has SLURM_PROCID too, although it is a single process; it does not have SLURM_STEP_NUM_TASKS.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def detect(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Read the launcher's variables.

    Args:
        environ: environment variables; those of the process by default.

    Returns:
        The launch, or None for a process that no launcher started.

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
    """Return whether PMI's variables are those of `srun --mpi=pmi2`, and not of a Hydra that srun may have started."""
    task, tasks, *_ = _VARIABLES["Slurm"]
    return (rank, size) == (_integer(environ.get(task)), _integer(environ.get(tasks)))


def _pair(local_rank: int | None, local_size: int | None, environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Return the local rank and size; if one is missing, use Cray's PMI variables if both of those are set."""
    if local_rank is None or local_size is None:
        cray = _integer(environ.get("PMI_LOCAL_RANK")), _integer(environ.get("PMI_LOCAL_SIZE"))
        return cray if None not in cray else (local_rank, local_size)
    return local_rank, local_size


def _tasks_here(text: str, node: int | None) -> int | None:
    """Return the number of Slurm tasks on a node: "2(x3),1" means 2 on each of three nodes, and 1 on the fourth."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    if not counts:
        return None
    return counts[node] if node is not None and node < len(counts) else counts[0]


def _integer(text: str | None) -> int | None:
    """Return the leading integer of `text`, or None."""
    digits = ""
    for character in text or "":
        if not character.isdigit():
            break
        digits += character
    return int(digits) if digits else None


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def usable_memory() -> int:
    """Return the bytes of memory of this host, or of its container if that has a limit; 0 if unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    limit = _container_memory()
    return total if limit is None else min(total, limit)


def _container_memory() -> int | None:
    """Return the limit of the container's memory in bytes; None if there is none."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdecimal() else None


def free_memory() -> int | None:
    """Return the bytes that this host, or its container, has free or could free at once; None if unknown."""
    try:
        available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    free, limit = None if available is None else 1024 * int(available[1]), _container_memory()
    if limit is None:
        return free
    try:
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        counts = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    except OSError:
        return free
    # The container's limit counts the files that it has read and written, which the kernel drops when it needs memory.
    own = limit - used + int(counts["file"]) - int(counts["shmem"])
    return own if free is None else min(own, free)


def core_mask() -> int:
    """Return the cores that this process may run on, as a bit mask."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def fair_cores(masks: Sequence[int], mine: int) -> float:
    """Return a rank's share of the cores, below 1 if ranks share one: a core that k ranks may use counts 1/k for each.

    Args:
        masks: `core_mask` of each rank on this host.
        mine: index of the rank in `masks`.

    Example:
        >>> fair_cores([0b1111, 0b1111], 0)  # both may run on all four
        2.0
        >>> fair_cores([0b0011, 0b1100], 0)  # bound to two each
        2.0
    """
    share = 0.0
    for core in range(masks[mine].bit_length()):
        if masks[mine] >> core & 1:
            share += 1 / sum(mask >> core & 1 for mask in masks)
    return share


# Result of `fair_cores`, which needs the masks of all ranks on the host; None until the world is joined.
_fair: float | None = None


def set_fair_cores(cores: float | None) -> None:
    """Store the result of `fair_cores`; None clears it."""
    global _fair
    _fair = cores


def own_cores(ranks: int) -> float:
    """Return a rank's share of the cores, below 1 if ranks share one; before the world is joined, an estimate.

    Args:
        ranks: number of ranks on this host.
    """
    return min(usable_cores(), (os.cpu_count() or 1) / ranks) if _fair is None else _fair


@dataclass(frozen=True)
class Share:
    """Number of threads for a rank, and its origin.

    Attributes:
        threads: number of threads.
        source: name of the variable that sets it, or "" for a share of the cores.
        chosen: True if the user set the variable.
    """

    threads: int
    source: str = ""
    chosen: bool = False


#: Variables by which a user chooses the number of TensorFlow's threads. TensorFlow reads the first itself; job scripts
#: set the second for all libraries of a rank.
TENSORFLOW_THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def threads_for(
    ranks: int, environ: Mapping[str, str] | None = None, chosen_by: Sequence[str] = ("OMP_NUM_THREADS",)
) -> Share:
    """Return the number of threads for one of several ranks on a host: the one rule for kernels and TensorFlow.

    A number that the user has set is used, regardless of the cores. Otherwise a rank gets the batch system's number for
    a task, but at most its share of the cores that it may run on, so that ranks do not compete for cores.

    Args:
        ranks: number of ranks on this host.
        environ: environment variables; those of the process by default.
        chosen_by: variables by which a user chooses, in order of precedence.

    Example:
        >>> threads_for(2, {"OMP_NUM_THREADS": "3"})
        Share(threads=3, source='OMP_NUM_THREADS', chosen=True)
    """
    environ = os.environ if environ is None else environ
    for name in chosen_by:
        number = _integer(environ.get(name))
        if number and not _set_by_pbs(name, environ):
            return Share(number, name, True)
    cores = max(1, int(own_cores(ranks) + 1e-6))
    number, source = _batch_threads(ranks, environ)
    return Share(number, source) if number is not None and number < cores else Share(cores)


def _set_by_pbs(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether PBS, and not the user, set a variable.

    PBS sets NCPUS and OMP_NUM_THREADS to `ompthreads`, or by default to all cores of the chunk.
    """
    return name == "OMP_NUM_THREADS" and "PBS_JOBID" in environ and environ.get(name) == environ.get("NCPUS")


def _batch_threads(ranks: int, environ: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the batch system's number of cores for a task, or None, and the name of its variable."""
    # The script of `hvdx job lsf` sets the first: LSF counts slots, and a slot may have several cores.
    for name in ("HVDX_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"):
        number = _integer(environ.get(name))
        if number:
            return number, name
    number = _integer(environ.get("SLURM_CPUS_ON_NODE"))
    if number:
        return max(1, number // ranks), "SLURM_CPUS_ON_NODE"
    if "PBS_JOBID" in environ and _integer(environ.get("NCPUS")):
        return _integer(environ.get("NCPUS")), "NCPUS"
    # The format is "host slots host slots ...". jsrun binds its ranks itself, on hosts that this list omits.
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    slots = {host.split(".")[0]: _integer(n) for host, n in zip(words[::2], words[1::2], strict=False)}
    number = slots.get(socket.gethostname().split(".")[0])
    if number and "JSM_NAMESPACE_RANK" not in environ:
        return max(1, number // ranks), "LSB_MCPU_HOSTS"
    return None, ""


def share_of_cores(ranks: int) -> int:
    """Return the number of cores for one of several ranks on a host, regardless of the user's variables.

    Args:
        ranks: number of ranks on this host.
    """
    return threads_for(ranks, chosen_by=()).threads


def kernel_threads(ranks: int) -> int | None:
    """Return the number of kernel threads for one of several ranks on a host.

    Args:
        ranks: number of ranks on this host.

    Returns:
        The number, or None for the kernels' default: OMP_NUM_THREADS if the user set it, or all cores for a single
        rank.
    """
    share = threads_for(ranks)
    return None if share.chosen or ranks <= 1 else share.threads
