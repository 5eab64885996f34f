"""Keras 3 on several workers: the `Distribute` callback and the names of `horovod.tensorflow.keras`."""

from typing import NoReturn

from hvdx.keras import backend, callbacks, layers  # noqa: F401  backend is first: it refuses others than TensorFlow
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
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hvdx.keras.horovod.batch_norm import SyncBatchNormalization
from hvdx.keras.horovod.collectives import (
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hvdx.keras.horovod.distributed_optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    PartialDistributedOptimizer,
    load_model,
)
from hvdx.keras.horovod.names import error_for
from hvdx.keras.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdx.keras.horovod.queries import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    local_rank_op,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank_op,
    rocm_built,
    size_op,
)
from hvdx.keras.inference import evaluate, predict
from hvdx.keras.loops import combine, flush, prepare

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
    raise error_for(name)
