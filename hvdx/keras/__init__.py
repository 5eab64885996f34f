"""Keras 3 on several workers: the `Distribute` callback, and the names of `horovod.tensorflow.keras`."""

from typing import NoReturn

from hvdx.errors import ConfigError
from hvdx.keras import callbacks
from hvdx.keras.checkpoint import Checkpoint
from hvdx.keras.collectives import (
    allgather,
    allgather_object,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    reducescatter,
)
from hvdx.keras.data import shard
from hvdx.keras.distribute import Distribute
from hvdx.keras.distributed_optimizer import DistributedGradientTape, DistributedOptimizer
from hvdx.keras.horovod_api import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    cross_rank,
    cross_size,
    init,
    is_initialized,
    load_model,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hvdx.keras.horovod_queries import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hvdx.keras.optimizer import count_samples, flush

__all__ = [
    "Adasum",
    "Average",
    "Checkpoint",
    "Compression",
    "Distribute",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "count_samples",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "flush",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
]

_NOT_HERE = (
    "PartialDistributedOptimizer",
    "ProcessSet",
    "add_process_set",
    "elastic",
    "global_process_set",
    "remove_process_set",
    "start_timeline",
    "stop_timeline",
)


def __getattr__(name: str) -> NoReturn:
    if name == "elastic":
        raise ConfigError(
            "hvdx.keras.elastic: ranks do not come and go while a job runs. hvdx.keras.Checkpoint saves, and "
            "`hvdx job` puts a job that lost a rank back into the queue; it goes on with as many ranks as it gets."
        )
    if name in _NOT_HERE:
        raise ConfigError(f"hvdx.keras.{name}: Horovod has it, hvdx does not support it.")
    raise AttributeError(f"module 'hvdx.keras' has no attribute {name!r}")
