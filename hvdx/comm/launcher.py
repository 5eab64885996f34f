"""How this process was started: rank and size as the launcher tells them, before any MPI is up."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """What a launcher told this process through its environment.

    Attributes:
        launcher: "Open MPI", "Hydra", "Slurm", "Horovod (Gloo)", "MVAPICH", "jsrun" or "PMIx".
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
        if rank is not None and size is not None:
            return Launch(launcher, rank, size, local_rank, local_size)
    rank = _integer(environ.get("PMIX_RANK"))
    return None if rank is None else Launch("PMIx", rank, None)


def _integer(text: str | None) -> int | None:
    """The leading integer of `text` ("2(x3)" is Slurm's way to write 2 on each of 3 nodes)."""
    digits = ""
    for character in text or "":
        if not character.isdigit():
            break
        digits += character
    return int(digits) if digits else None


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def share_of_cores(ranks: int) -> int:
    """Cores of the host for each of its ranks, and no more than this process may use; at least one.

    Args:
        ranks: on this host.
    """
    return max(1, min(usable_cores(), (os.cpu_count() or 1) // ranks))


def kernel_threads(ranks: int) -> int | None:
    """Threads for one of several ranks on a host; None leaves it to OMP_NUM_THREADS, or to all cores for a rank alone.

    Args:
        ranks: on this host.
    """
    return None if os.environ.get("OMP_NUM_THREADS") or ranks <= 1 else share_of_cores(ranks)
