"""The collectives of `horovod.tensorflow`: on values, tensors and variables, in eager code and inside graphs."""

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdx import comm as world
from hvdx.comm.base import Reduction
from hvdx.errors import ConfigError
from hvdx.keras import replicas
from hvdx.keras.horovod_api import Average, Compression, Sum, is_partial, operation, rank, size, unsupported, wire
from hvdx.strategies import join


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
    how = _reduction("allreduce", average, op, compression)
    tensor = _tensor(value)
    tensor = tensor * tf.cast(prescale_factor, tensor.dtype) if prescale_factor != 1.0 else tensor
    (result,) = world.graph().all_reduce([tensor], how, name or _name("allreduce", tensor))
    return result * tf.cast(postscale_factor, result.dtype) if postscale_factor != 1.0 else result


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Concatenate the ranks' values along their first dimension.

    Args:
        value: anything that becomes a tensor with at least one dimension; all but the first alike on all ranks.
        name: pairs up what the ranks send; not needed outside graphs.
    """
    tensor = _tensor(value)
    return world.graph().all_gather(tensor, name or _name("allgather", tensor))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's picklable object, in the order of the ranks.

    Args:
        obj: picklable.
        name: for messages.
    """
    return join().all_gather_object(obj, name or "gathering of objects")


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    op: Any = None,
    compression: Any = Compression.none,
    name: str | None = None,
    process_set: Any = None,
) -> list[Any]:
    """Sum or average several values over the ranks, in one exchange.

    Args:
        tensors: anything that becomes tensors; shapes and dtypes alike on all ranks.
        average, op, compression, name: see `allreduce`.
        process_set: not supported, but for the set of all.
    """
    _all_only("grouped_allreduce", process_set)
    how = _reduction("grouped_allreduce", average, op, compression)
    given = [_tensor(value) for value in tensors]
    return world.graph().all_reduce(given, how, name or _name("grouped_allreduce", *given[:1])) if given else []


def grouped_allgather(tensors: Sequence[Any], name: str | None = None, process_set: Any = None) -> list[Any]:
    """Concatenate the ranks' values along their first dimension, for each of several.

    Args:
        tensors: see `allgather`.
        name: see `allgather`.
        process_set: not supported, but for the set of all.
    """
    _all_only("grouped_allgather", process_set)
    return [allgather(value, None if name is None else f"{name}.{i}") for i, value in enumerate(tensors)]


def reducescatter(value: Any, op: Any = Average, name: str | None = None, process_set: Any = None) -> tf.Tensor:
    """Sum or average a value over the ranks, and keep this rank's part of its first dimension.

    The first ranks have a row more where the rows do not come out even. It travels as an all-reduce does.

    Args:
        value: anything that becomes a tensor with at least one dimension; alike in shape and dtype on all ranks.
        op: Average or Sum.
        name: see `allreduce`.
        process_set: not supported, but for the set of all.
    """
    _all_only("reducescatter", process_set)
    whole = allreduce(value, name=name, op=op)
    each, more = divmod(int(whole.shape[0]), size())
    begin = rank() * each + min(rank(), more)
    return whole[begin : begin + each + (rank() < more)]


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Give every rank the value of one.

    Args:
        value: anything that becomes a tensor; one shape and dtype on all ranks.
        root_rank: the rank whose value it is.
        name: pairs up what the ranks send; not needed outside graphs.
    """
    tensor = _tensor(value)
    (result,) = world.graph().broadcast([tensor], _checked_root(root_rank), name or _name("broadcast", tensor))
    return result


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Overwrite variables with those of one rank; inside a `tf.function` too, as Horovod's examples do.

    Args:
        variables: Keras or TensorFlow variables, such as `model.variables` or `optimizer.variables`.
        root_rank: the rank whose values all get.

    Raises:
        ReplicaError: the ranks' variables differ in number, shape or dtype.
    """
    variables = list(variables() if callable(variables) else variables)
    replicas.check_alike(variables, join())
    root = _checked_root(root_rank)
    if tf.executing_eagerly() or not variables or size() == 1:
        replicas.broadcast(variables, root, join())
        return
    values = [tf.convert_to_tensor(v) for v in variables]
    received = world.graph().broadcast(values, root, _name("broadcast_variables", values[0]))
    for variable, value in zip(variables, received, strict=True):
        variable.assign(value)


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


def _reduction(function: str, average: bool | None, op: Any, compression: Any) -> Reduction:
    """What Horovod's arguments mean; `average` is its older way to say `op`."""
    if average is not None and op is not None:
        raise ConfigError(f"{function}: give average or op, not both.")
    op = Sum if average is False else op
    return Reduction(average=operation(op) == Average, wire=wire(compression))


def _checked_root(root_rank: int) -> int:
    if not 0 <= root_rank < size():
        raise ConfigError(f"root_rank: expected 0 to {size() - 1}, got {root_rank}.")
    return root_rank


def _tensor(value: Any) -> tf.Tensor:
    return tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)


def _name(what: str, *tensors: tf.Tensor) -> str:
    """The name of a collective: in a graph after its tensor, as Horovod's, since two may be on their way at once."""
    if tf.executing_eagerly() or not tensors:
        return what
    return f"{what}.{re.sub(r'[^0-9A-Za-z]+', '_', tensors[0].name)}"


def _all_only(function: str, process_set: Any) -> None:
    if is_partial(process_set):
        unsupported(function, process_set=process_set)
