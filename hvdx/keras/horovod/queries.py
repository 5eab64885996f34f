"""What Horovod is asked about itself: how it was built, and what it uses."""

from typing import Any

from hvdx.comm import horovod, launcher
from hvdx.keras.joining import join


def _ask(name: str) -> Any:
    return getattr(horovod.load(), name)()


def mpi_built() -> bool:
    """Whether Horovod was built with MPI."""
    return bool(_ask("mpi_built"))


def gloo_built() -> bool:
    """Whether Horovod was built with Gloo."""
    return bool(_ask("gloo_built"))


def nccl_built() -> int:
    """The version of the NCCL that Horovod was built with; 0 for none."""
    return int(_ask("nccl_built"))


def ddl_built() -> bool:
    """Whether Horovod was built with IBM's DDL."""
    return bool(_ask("ddl_built"))


def ccl_built() -> bool:
    """Whether Horovod was built with Intel's oneCCL."""
    return bool(_ask("ccl_built"))


def cuda_built() -> bool:
    """Whether Horovod was built with CUDA."""
    return bool(_ask("cuda_built"))


def rocm_built() -> bool:
    """Whether Horovod was built with ROCm."""
    return bool(_ask("rocm_built"))


def mpi_enabled() -> bool:
    """Whether the ranks of this job reach each other by MPI; a process that was started alone reaches nobody."""
    found = launcher.detect()
    return found is not None and not gloo_enabled()


def gloo_enabled() -> bool:
    """Whether the ranks of this job were started by Horovod's own launcher, with Gloo."""
    found = launcher.detect()
    return found is not None and found.launcher == "Horovod (Gloo)"


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI: hvdx starts no other."""
    return mpi_enabled()


def is_homogeneous() -> bool:
    """Whether every host has as many ranks. Collective."""
    joined = join()
    return len(set(joined.all_gather_object(joined.local_size, "ranks of each host"))) == 1
