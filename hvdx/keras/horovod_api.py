"""The functions of `horovod.tensorflow.keras`, so that a script written for Horovod changes one import."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdx import comm as world
from hvdx.comm.base import Reduction
from hvdx.errors import ConfigError
from hvdx.keras import placement, replicas, separate
from hvdx.strategies import Strategy, join, leave
from hvdx.strategies.registry import set_default
from hvdx.strategies.serving.roles import after_joining

#: Reductions. Horovod's own constants are understood as well.
Average = "average"
Sum = "sum"
Adasum = "adasum"
Min = "min"
Max = "max"
Product = "product"

# Whoever joins, and this module is part of every `import hvdx.keras`.
after_joining(placement.place)
after_joining(separate.watch)


class Compression:
    """What a gradient becomes on the network. Horovod's own classes are understood as well."""

    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"


def init(comm: Any = None, process_sets: Any = None, strategy: Strategy | str | None = None) -> None:
    """Join the world, and share the cores and GPUs of a host among its ranks: see `hvdx.keras.placement`.

    Call it before TensorFlow does anything, so that the number of threads and the GPU can still be chosen: as many
    threads as the batch system gives a task, or a share of the cores, unless `TF_NUM_INTRAOP_THREADS`,
    `OMP_NUM_THREADS` or `tf.config.threading` says otherwise; and one GPU, unless `tf.config.set_visible_devices` has
    chosen some.

    Args:
        comm, process_sets: not supported; the world is all processes that were started.
        strategy: what callbacks and optimisers use that are told nothing else; by default what `HVDX_STRATEGY` says.
            Under a `ParameterServer` whose servers are ranks of their own, those serve here, and never return.

    Raises:
        ConfigError: an argument that is not supported.
        LaunchError, HorovodError: see `hvdx.comm.start`.
    """
    _unsupported("init", comm=comm, process_sets=process_sets)
    if strategy is not None:
        set_default(strategy)
    join(strategy)


def shutdown() -> None:
    """Leave the world."""
    leave()


def is_initialized() -> bool:
    """True after `init`, or after anything else that asked about ranks."""
    return world.current() is not None


def rank() -> int:
    """This process among all, from 0."""
    return join().rank


def size() -> int:
    """Number of processes."""
    return join().size


def local_rank() -> int:
    """This process among those on its host, from 0."""
    return join().local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return join().local_size


def cross_rank() -> int:
    """This host among the hosts that have a process of this local rank."""
    return join().cross_rank


def cross_size() -> int:
    """Number of hosts that have a process of this local rank."""
    return join().cross_size


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> tf.Tensor:
    """Sum or average a value over the ranks.

    Args:
        value: anything that becomes a tensor; one shape and dtype on all ranks.
        name: pairs up what the ranks send; not needed outside graphs.
        average: Horovod's older way to say `op`.
        prescale_factor, postscale_factor: factors before and after the sum.
        op: Average (the default) or Sum.
        compression: what the value becomes on the network.

    Returns:
        A tensor like the value, the same on all ranks.

    Example:
        >>> float(allreduce(3.0))  # in a world of one
        3.0
    """
    if average is not None and op is not None:
        raise ConfigError("allreduce: give average or op, not both.")
    op = Sum if average is False else op
    tensor = _tensor(value)
    how = Reduction(average=operation(op) == Average, wire=wire(compression))
    tensor = tensor * tf.cast(prescale_factor, tensor.dtype) if prescale_factor != 1.0 else tensor
    (result,) = world.graph().all_reduce([tensor], how, name or "allreduce")
    return result * tf.cast(postscale_factor, result.dtype) if postscale_factor != 1.0 else result


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Concatenate the ranks' values along their first dimension.

    Args:
        value: anything that becomes a tensor with at least one dimension; all but the first alike on all ranks.
        name: pairs up what the ranks send; not needed outside graphs.
    """
    return world.graph().all_gather(_tensor(value), name or "allgather")


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Give every rank the value of one.

    Args:
        value: anything that becomes a tensor; one shape and dtype on all ranks.
        root_rank: the rank whose value it is.
        name: pairs up what the ranks send; not needed outside graphs.
    """
    (result,) = world.graph().broadcast([_tensor(value)], _checked_root(root_rank), name or "broadcast")
    return result


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrite variables with those of one rank.

    Args:
        variables: Keras or TensorFlow variables, such as `model.variables` or `optimizer.variables`.
        root_rank: the rank whose values all get.

    Raises:
        ReplicaError: the ranks' variables differ in number, shape or dtype.
    """
    variables = list(variables() if callable(variables) else variables)
    replicas.check_alike(variables, join())
    replicas.broadcast(variables, _checked_root(root_rank), join())


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Give every rank one rank's picklable object.

    Args:
        obj: picklable; what the other ranks give is ignored.
        root_rank: the rank whose object it is.
        name: for messages.
    """
    root = _checked_root(root_rank)
    mine = obj if rank() == root else None
    return join().all_gather_object(mine, name or "broadcast of an object")[root]


def broadcast_global_variables(root_rank: int) -> None:
    """Not supported: TensorFlow 2 keeps no list of global variables.

    Raises:
        ConfigError: always; it names what to call instead.
    """
    raise ConfigError(
        "broadcast_global_variables: TensorFlow 2 has no global variables. Use broadcast_variables(model.variables, "
        "root_rank) or callbacks.BroadcastGlobalVariablesCallback(root_rank)."
    )


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a saved model and distribute its optimiser, whose state goes on where it was.

    Args:
        filepath: what `keras.models.load_model` takes.
        custom_optimizers: optimiser classes of your own that the model was saved with.
        custom_objects: as for `keras.models.load_model`.
        compression: see `DistributedOptimizer`.
        legacy_opts: not supported; Keras 3 has no legacy optimisers.

    Returns:
        The model, compiled.
    """
    from hvdx.keras.distributed_optimizer import DistributedOptimizer

    _unsupported("load_model", legacy_opts=legacy_opts)
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def operation(op: Any) -> str:
    """ "average" or "sum", of whatever spelling Horovod or hvdx has for it; None means average."""
    if op is None or op == Average:
        return Average
    if op == Sum:
        return Sum
    # Horovod's constants are small integers that only its library knows.
    named = _horovod_constants()
    known = {named.get("Average"): Average, named.get("Sum"): Sum}
    if not isinstance(op, str) and op in known:
        return known[op]
    raise ConfigError(f"op: expected Average or Sum, got {op!r}. Other reductions are not supported.")


def wire(compression: Any) -> Any:
    """ "none", "fp16" or "bf16", of whatever spelling Horovod or hvdx has for it."""
    if isinstance(compression, str) and compression in ("none", "fp16", "bf16"):
        return compression
    known = {"NoneCompressor": "none", "FP16Compressor": "fp16"}
    if getattr(compression, "__module__", "").startswith("horovod.") and compression.__name__ in known:
        return known[compression.__name__]
    raise ConfigError(
        f"compression: expected Compression.none, .fp16 or .bf16, got {compression!r}. Compressors of your own are "
        "not supported."
    )


def _horovod_constants() -> dict[str, Any]:
    import sys

    module = sys.modules.get("horovod.tensorflow")
    return {} if module is None else {k: getattr(module, k) for k in ("Average", "Sum")}


def _unsupported(function: str, **arguments: Any) -> None:
    """Raise for arguments that are neither None nor False."""
    given = [k for k, v in arguments.items() if v is not None and v is not False]
    if given:
        raise ConfigError(f"{function}: {', '.join(given)}: not supported by hvdx. Leave it out.")


def _checked_root(root_rank: int) -> int:
    if not 0 <= root_rank < size():
        raise ConfigError(f"root_rank: expected 0 to {size() - 1}, got {root_rank}.")
    return root_rank


def _tensor(value: Any) -> tf.Tensor:
    return tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)
