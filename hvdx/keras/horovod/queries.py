"""Horovod's queries about its build, which without Horovod are about MPI, and about the ranks."""

import importlib.util
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvdx.comm import horovod, launcher
from hvdx.keras.horovod.process_sets import set_of
from hvdx.keras.joining import join


def _query(name: str) -> int:
    if importlib.util.find_spec("horovod") is None:
        return int(name == "mpi_built")  # MPI carries what Horovod would
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


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return an operation with the rank of the process that runs it, int32[].

    Args:
        name: name of the operation.
    """
    return _number(lambda: join().rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return an operation with the rank among those of the host of the process that runs it; see `rank_op`."""
    return _number(lambda: join().local_rank, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return an operation with the number of ranks when it runs, int32[].

    Args:
        process_set_id: number of a process set; 0 is all ranks.
        name: name of the operation.
    """
    return _number(lambda: set_of(process_set_id).size() or 0, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return an operation with the number of ranks on this host when it runs; see `rank_op`."""
    return _number(lambda: join().local_size, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return an operation with 1 if the process that runs it is in a process set, else 0; see `size_op`."""
    return _number(lambda: int(set_of(process_set_id).included()), name)


def _number(value: Callable[[], int], name: str | None) -> tf.Tensor:
    result = tf.numpy_function(lambda: np.int32(value()), [], tf.int32, name=name)
    result.set_shape([])
    return result
