"""Horovod's queries about its build and the libraries in use."""

from hvdx.comm import horovod, launcher
from hvdx.keras.joining import join


def _query(name: str) -> int:
    return getattr(horovod.load(), name)()


def mpi_built() -> bool:
    """Return whether Horovod was built with MPI."""
    return bool(_query("mpi_built"))


def gloo_built() -> bool:
    """Return whether Horovod was built with Gloo."""
    return bool(_query("gloo_built"))


def nccl_built() -> int:
    """Return the version of NCCL that Horovod was built with; 0 for none."""
    return int(_query("nccl_built"))


def ddl_built() -> bool:
    """Return whether Horovod was built with IBM's DDL."""
    return bool(_query("ddl_built"))


def ccl_built() -> bool:
    """Return whether Horovod was built with Intel's oneCCL."""
    return bool(_query("ccl_built"))


def cuda_built() -> bool:
    """Return whether Horovod was built with CUDA."""
    return bool(_query("cuda_built"))


def rocm_built() -> bool:
    """Return whether Horovod was built with ROCm."""
    return bool(_query("rocm_built"))


def mpi_enabled() -> bool:
    """Return whether the ranks of this job communicate by MPI; False for a process without a launcher."""
    found = launcher.detect()
    return found is not None and not gloo_enabled()


def gloo_enabled() -> bool:
    """Return whether Horovod's own launcher started the ranks of this job, with Gloo."""
    found = launcher.detect()
    return found is not None and found.launcher == "Horovod (Gloo)"


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI; hvdx starts MPI only in this mode."""
    return mpi_enabled()


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks. Collective."""
    joined = join()
    return len(set(joined.all_gather_object(joined.local_size, "ranks of each host"))) == 1
