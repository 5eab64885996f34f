"""Keras 3 on several workers: the `Distribute` callback and the names of `horovod.tensorflow.keras`."""

from typing import TYPE_CHECKING, NoReturn

from hvdx.keras import backend, callbacks
from hvdx.keras.adapters.optimizer import count_samples
from hvdx.keras.checkpoint import Checkpoint
from hvdx.keras.costs import summary
from hvdx.keras.distribute import Distribute
from hvdx.keras.fit.data import shard
from hvdx.keras.gathering import gather
from hvdx.keras.horovod.api import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    error_for,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    rocm_built,
    shutdown,
    size,
    size_op,
)
from hvdx.keras.horovod.distributed_optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    PartialDistributedOptimizer,
    load_model,
)
from hvdx.keras.horovod.objects import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables
from hvdx.keras.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdx.keras.inference import evaluate, predict
from hvdx.keras.loops import combine, flush, prepare

if TYPE_CHECKING or backend.name() == "tensorflow":
    from hvdx.keras import layers
    from hvdx.keras.horovod.batch_norm import SyncBatchNormalization
    from hvdx.keras.horovod.collectives import (
        allgather,
        allreduce,
        alltoall,
        broadcast,
        broadcast_,
        broadcast_global_variables,
        grouped_allgather,
        grouped_allreduce,
        grouped_reducescatter,
        reducescatter,
    )

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
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "combine",
    "count_samples",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "evaluate",
    "flush",
    "gather",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "layers",
    "load_model",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "predict",
    "prepare",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "size_op",
    "summary",
]


def __getattr__(name: str) -> NoReturn:
    if name in __all__:
        backend.needs_tensorflow(f"hvdx.keras.{name}")
    raise error_for(name)
