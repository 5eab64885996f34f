"""Start, ranks, constants and queries of `horovod.tensorflow.keras`, and a remedy for each name that hvdx lacks.

The collectives are in `collectives`.
"""

from __future__ import annotations

import importlib.util
import operator
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, cast

import keras
import numpy as np

from hvdx import comm as world
from hvdx.comm import launcher
from hvdx.comm.interfaces import Wire
from hvdx.errors import ConfigError
from hvdx.keras.backend import tf
from hvdx.keras.horovod.process_sets import ProcessSet, add_process_set, allow, set_of
from hvdx.keras.joining import join
from hvdx.strategies import Strategy, leave
from hvdx.strategies.registry import set_default

#: Reductions. Horovod's own constants are accepted as well.
Average = "average"
Sum = "sum"
Adasum = "adasum"
Min = "min"
Max = "max"
Product = "product"


class _Compressor(str):
    """Name of a data type on the network, with the two functions of Horovod's compressors."""

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Return a tensor in the dtype on the network, and its own dtype for `decompress`."""
        narrow = {"fp16": tf.float16, "bf16": tf.bfloat16}.get(str(self))
        return (tf.cast(tensor, narrow) if narrow and tensor.dtype.is_floating else tensor), tensor.dtype

    def decompress(self, tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        """Return a tensor in its dtype before `compress`."""
        return tf.cast(tensor, ctx)


class Compression:
    """Data types of gradients on the network. Horovod's own classes are accepted as well."""

    none = _Compressor("none")
    fp16 = _Compressor("fp16")
    bf16 = _Compressor("bf16")


class UnsupportedError(ConfigError, NotImplementedError):
    """A reduction or argument that is not supported. Horovod raises NotImplementedError, which this one is too."""


#: Reduction of hvdx, or a constant of Horovod.
Operation: TypeAlias = str | int
#: Name in `Compression`, or a class of Horovod.
Compressor: TypeAlias = str | type


class Compressing(Protocol):
    """Compressor of a user: a class or an object with the two functions of Horovod's compressors."""

    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, object]:
        """Return what is sent, and what `decompress` needs."""

    def decompress(self, tensor: tf.Tensor, ctx: object) -> tf.Tensor:
        """Return the tensor."""


def init(
    comm: None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    strategy: Strategy | str | None = None,
    split: int | str | None = None,
    seed: int | None = None,
) -> None:
    """Join the world, and assign the cores and GPUs of a host to its ranks; see `hvdx.keras.joining`.

    Call it before TensorFlow starts, because the number of threads and the GPU cannot change later. A rank gets the
    number of threads that the batch system gives a task, or a share of the cores, unless `TF_NUM_INTRAOP_THREADS`,
    `OMP_NUM_THREADS` or `tf.config.threading` sets another number. It gets one GPU, unless
    `tf.config.set_visible_devices` has chosen some.

    Args:
        comm: not supported; the world is all processes that were started.
        process_sets: list of `ProcessSet`, which are added; or "dynamic", after which `add_process_set` works at any
            time. By default it works only before the first collective in a graph.
        strategy: default strategy of callbacks and optimisers; by default, that of `HVDX_STRATEGY`. If it is a
            `ParameterServer` whose servers are ranks of their own, these ranks serve in this call and do not return.
        split: number M of ranks that share the layers of `hvdx.keras.layers`; or "node" for the ranks of a host. The
            ranks form groups of M, of ranks of one host where possible. By default, the value of `HVDX_SPLIT`, or 1.
        seed: seed of the generators of Python, NumPy, TensorFlow and Keras, the same on all ranks: shuffles, splits,
            vocabularies and initial weights are then alike. `Distribute` lets each rank draw dropout masks and the like
            of its own. By default, the value of `HVDX_SEED`; without it, nothing is seeded.

    Raises:
        ConfigError: if an argument is not supported, `split` does not divide the number of ranks, or the seed is not an
            integer from 0 to 2^32 - 1.
        LaunchError, HorovodError: see `hvdx.comm.start`.
    """
    unsupported("init", comm=comm)
    if process_sets is not None:
        allow()
    if strategy is not None:
        set_default(strategy)
    if split is not None:
        world.set_split(split)
    chosen = _seed(seed)
    join(strategy)
    if chosen is not None:
        # After `join`, since TensorFlow may start here.
        keras.utils.set_random_seed(chosen)
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ConfigError(
            f"init: process_sets: expected a list or 'dynamic', got {process_sets!r}. Do: give one of them."
        )
    for process_set in () if isinstance(process_sets, str) else process_sets or ():
        add_process_set(process_set)


def _seed(seed: int | None) -> int | None:
    """Return the seed of `init` or of HVDX_SEED, checked; None if there is none."""
    name, value = ("init: seed", seed) if seed is not None else ("HVDX_SEED", os.environ.get("HVDX_SEED", "").strip())
    if value == "":
        return None
    try:
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < 2**32:
        raise ConfigError(
            f"{name}: expected an integer from 0 to {2**32 - 1}, got {value!r}. Do: give one to all ranks."
        )
    return number


def shutdown() -> None:
    """Leave the world."""
    leave()


def is_initialized() -> bool:
    """Return whether this process has joined the world, by `init` or by another function that needs ranks."""
    return world.current() is not None


def rank() -> int:
    """Return the number of this process among all, from 0."""
    return join().rank


def size() -> int:
    """Return the number of processes."""
    return join().size


def local_rank() -> int:
    """Return the number of this process among those on its host, from 0."""
    return join().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return join().local_size


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a process of this local rank, from 0."""
    return join().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a process of this local rank."""
    return join().cross_size


def _query(name: str) -> int:
    if importlib.util.find_spec("horovod") is None:
        return int(name == "mpi_built")  # MPI carries what Horovod would
    from hvdx.comm.horovod import load

    return getattr(load(), name)()


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


def operation(op: Operation | None, known: Sequence[str] = (Average, Sum)) -> str:
    """Return a reduction of hvdx for one of hvdx or Horovod, of those in `known`; None means "average".

    Raises:
        UnsupportedError: if it is another one.
    """
    if op is None:
        return Average
    # Horovod's constants are small integers, which its library defines.
    stock = sys.modules.get("horovod.tensorflow")
    for name in known:
        if op == name or (not isinstance(op, str) and stock is not None and op == getattr(stock, name.capitalize())):
            return name
    names = [name.capitalize() for name in known]
    raise UnsupportedError(
        f"op: expected {', '.join(names[:-1])} or {names[-1]}, got {op!r}. Other reductions are not supported."
    )


def wire(compression: Compressor) -> Wire:
    """Return "none", "fp16" or "bf16" for a compression of hvdx or Horovod."""
    if isinstance(compression, str) and compression in ("none", "fp16", "bf16"):
        return cast(Wire, compression)
    known: dict[str, Wire] = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
    name = getattr(compression, "__name__", "")
    if getattr(compression, "__module__", "").startswith("horovod.") and name in known:
        return known[name]
    raise ConfigError(
        f"compression: expected Compression.none, .fp16 or .bf16, got {compression!r}. Compressors of your own are "
        "not supported."
    )


def unsupported(function: str, **arguments: object) -> None:
    """Raise ConfigError if an argument is neither None nor False."""
    passed = [k for k, v in arguments.items() if v is not None and v is not False]
    if passed:
        raise ConfigError(f"{function}: {', '.join(passed)}: not supported by hvdx. Leave it out.")


_INTERNAL = "It is a part of Horovod that scripts do not need. Do: leave it out, or import it from horovod.tensorflow."

#: Remedies for names of Horovod that hvdx does not have.
REMEDIES = {
    "run": "Do: call the function in the script, and start the script with `hvdx run -n N python SCRIPT`.",
    "elastic": (
        "The number of ranks is fixed while a job runs. Do: save with hvdx.keras.Checkpoint and start with `hvdx job`. "
        "It puts a job that lost a rank back into the queue, and the job resumes with the number of ranks that it gets."
    ),
    "start_timeline": "Do: set HOROVOD_TIMELINE=FILE in the environment of the job.",
    "stop_timeline": "Do: set HOROVOD_TIMELINE=FILE in the environment of the job; the file ends with it.",
    "LocalGradientAggregationHelper": "Do: give DistributedOptimizer backward_passes_per_step.",
    "keras": "Do: import hvdx.keras as hvd; it has the names directly.",
    "compression": "Do: take Compression.none, .fp16 or .bf16 from hvdx.keras.",
    "functions": "Do: take broadcast_object, allgather_object and broadcast_variables from hvdx.keras.",
    "mpi_ops": "Do: take the functions from hvdx.keras.",
    "sync_batch_norm": "Do: take SyncBatchNormalization from hvdx.keras.",
    **dict.fromkeys(
        (
            "check_extension",
            "check_num_rank_power_of_2",
            "gpu_available",
            "gradient_aggregation",
            "gradient_aggregation_eager",
            "handle_average_backwards_compatibility",
            "is_version_greater_equal_than",
            "refs_to_vars",
            "split_list",
            "util",
            "vars_to_refs",
        ),
        _INTERNAL,
    ),
    "join": (
        "It shuts Horovod down under grouped collectives, which hvdx uses for gradients. Do: give every rank the same "
        "number of steps with hvdx.shard(data, batch_size), or train with the callback Distribute, which ends an epoch "
        "of uneven data on all ranks together."
    ),
}


def error_for(name: str) -> Exception:
    """Return the error for a name that `hvdx.keras` does not have, with a remedy if Horovod has it.

    Example:
        >>> type(error_for("elastic")).__name__, type(error_for("nonsense")).__name__
        ('ConfigError', 'AttributeError')
    """
    if name in REMEDIES:
        return ConfigError(f"hvdx.keras.{name}: expected a name of hvdx.keras, got one of Horovod's. {REMEDIES[name]}")
    return AttributeError(f"module 'hvdx.keras' has no attribute {name!r}")
