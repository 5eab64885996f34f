"""Keras 3 on several workers: the `Distribute` callback, and the names of `horovod.tensorflow.keras`."""

from typing import NoReturn

from hvdx.errors import ConfigError
from hvdx.keras import callbacks
from hvdx.keras.checkpoint import Checkpoint
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
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
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
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "count_samples",
    "cross_rank",
    "cross_size",
    "flush",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
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
    "reducescatter",
    "remove_process_set",
    "start_timeline",
    "stop_timeline",
)


def __getattr__(name: str) -> NoReturn:
    if name in _NOT_HERE:
        raise ConfigError(f"hvdx.keras.{name}: Horovod has it, hvdx does not support it.")
    raise AttributeError(f"module 'hvdx.keras' has no attribute {name!r}")
