"""The collectives of `horovod.tensorflow`, for eager code and graphs."""

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdx.comm import Comm
from hvdx.comm.base import Reduction
from hvdx.errors import ConfigError
from hvdx.keras.fit import replicas
from hvdx.keras.horovod.api import Average, Compression, Compressor, Operation, Sum, operation, rank, wire
from hvdx.keras.horovod.process_sets import ProcessSet, comm_of, is_partial, root_in
from hvdx.keras.joining import join
from hvdx.keras.seams.layers import raw_variable
from hvdx.keras.types import TensorLike, Variable


def allreduce(
    value: TensorLike,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Operation | None = None,
    compression: Compressor = Compression.none,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Sum or average a value over the ranks.

    Args:
        value: tensor or convertible to one; of the same shape and dtype on all ranks.
        name: name that identifies the collective on all ranks; not needed in eager code.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        prescale_factor, postscale_factor: factors before and after the sum.
        op: Average (the default) or Sum.
        compression: data type on the network; see `Compression`.
        process_set: ranks that take part, including this one; by default all.

    Returns:
        A tensor like the value, the same on all ranks.

    Example:
        >>> float(allreduce(3.0))  # in a world of one
        3.0
    """
    how = _reduction("allreduce", average, op, compression)
    tensor = _tensor(value)
    tensor = tensor * tf.cast(prescale_factor, tensor.dtype) if prescale_factor != 1.0 else tensor
    (result,) = comm_of(process_set, "allreduce").all_reduce([tensor], how, name or name_of("allreduce", tensor))
    return result * tf.cast(postscale_factor, result.dtype) if postscale_factor != 1.0 else result


def allgather(value: TensorLike, name: str | None = None, process_set: ProcessSet | None = None) -> tf.Tensor:
    """Concatenate the ranks' values along their first dimension.

    Args:
        value: tensor or convertible to one, with one dimension or more; all but the first are the same on all ranks.
        name, process_set: see `allreduce`.
    """
    tensor = _tensor(value)
    return comm_of(process_set, "allgather").all_gather(tensor, name or name_of("allgather", tensor))


def allgather_object(obj: object, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        obj: picklable object of this rank.
        name: name of the collective in error messages.
        process_set: see `allreduce`.
    """
    return _host_comm(process_set, "allgather_object").all_gather_object(obj, name or "gathering of objects")


def grouped_allreduce(
    tensors: Sequence[TensorLike],
    average: bool | None = None,
    op: Operation | None = None,
    compression: Compressor = Compression.none,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Sum or average several values over the ranks, in one exchange.

    Args:
        tensors: tensors or values convertible to them; of the same shapes and dtypes on all ranks.
        average, op, compression, name, process_set: see `allreduce`.
    """
    how = _reduction("grouped_allreduce", average, op, compression)
    inputs = [_tensor(value) for value in tensors]
    comm = comm_of(process_set, "grouped_allreduce")
    return comm.all_reduce(inputs, how, name or name_of("grouped_allreduce", *inputs[:1])) if inputs else []


def grouped_allgather(
    tensors: Sequence[TensorLike], name: str | None = None, process_set: ProcessSet | None = None
) -> list[tf.Tensor]:
    """Concatenate the ranks' values along the first dimension, for each of several values.

    Args:
        tensors: values; see `allgather`.
        name, process_set: see `allreduce`.
    """
    return [allgather(v, None if name is None else f"{name}.{i}", process_set) for i, v in enumerate(tensors)]


def reducescatter(
    value: TensorLike, op: Operation = Average, name: str | None = None, process_set: ProcessSet | None = None
) -> tf.Tensor:
    """Sum or average a value over the ranks, and keep this rank's part of its first dimension.

    If the number of ranks does not divide the rows, the first ranks get one row more. The values are sent by an
    all-reduce.

    Args:
        value: tensor or convertible to one, with one dimension or more; of the same shape and dtype on all ranks.
        op: Average or Sum.
        name, process_set: see `allreduce`.
    """
    comm = comm_of(process_set, "reducescatter")
    whole = allreduce(value, name=name, op=op, process_set=process_set)
    each, more = divmod(int(whole.shape[0]), comm.size)
    begin = comm.rank * each + min(comm.rank, more)
    return whole[begin : begin + each + (comm.rank < more)]


def grouped_reducescatter(
    tensors: Sequence[TensorLike],
    op: Operation = Average,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Sum or average several values over the ranks, and keep this rank's part of the first dimension of each.

    Args:
        tensors: values; see `reducescatter`.
        op, name, process_set: see `reducescatter`.
    """
    return [reducescatter(v, op, None if name is None else f"{name}.{i}", process_set) for i, v in enumerate(tensors)]


def alltoall(
    value: TensorLike, splits: TensorLike | None = None, name: str | None = None, process_set: ProcessSet | None = None
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send each rank a part of this rank's value, and receive a part from each.

    Args:
        value: tensor or convertible to one, with one dimension or more; all but the first are the same on all ranks.
        splits: int32[size], number of rows for each rank; by default, the same number for all.
        name, process_set: see `allreduce`.

    Returns:
        The received parts, concatenated in rank order; if `splits` is given, also int32[size], the number of rows from
        each rank.

    Raises:
        ConfigError: if the splits, or equal parts, do not fit the first dimension.

    Example:
        >>> received, rows = alltoall([3.0, 4.0], splits=[2])  # in a world of one
        >>> received.numpy().tolist(), rows.numpy().tolist()
        ([3.0, 4.0], [2])

    Source: Horovod 0.28, `horovod.tensorflow.alltoall`.
    """
    comm, tensor = comm_of(process_set, "alltoall"), _tensor(value)
    rows = tensor.shape[0]
    if splits is None:
        if rows is None or rows % comm.size:
            raise ConfigError(
                f"alltoall: expected a first dimension that {comm.size} ranks divide, got {rows}. Do: give splits."
            )
        parts = tf.fill([comm.size], rows // comm.size)
    else:
        parts = tf.cast(_tensor(splits), tf.int32)
        static = tf.get_static_value(parts)
        if parts.shape != (comm.size,) or (static is not None and (min(static) < 0 or rows not in (None, sum(static)))):
            raise ConfigError(
                f"alltoall: splits: expected {comm.size} numbers of rows that add up to {rows}, got {splits!r}. "
                "Do: give one for each rank."
            )
    received, counts = comm.all_to_all(tensor, parts, name or name_of("alltoall", tensor))
    return received if splits is None else (received, counts)


def broadcast(
    value: TensorLike, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> tf.Tensor:
    """Return the value of one rank on all ranks.

    Args:
        value: tensor or convertible to one; of the same shape and dtype on all ranks.
        root_rank: rank whose value is sent, numbered among all ranks.
        name, process_set: see `allreduce`.
    """
    tensor, comm = _tensor(value), comm_of(process_set, "broadcast")
    (result,) = comm.broadcast([tensor], root_in(process_set, root_rank), name or name_of("broadcast", tensor))
    return result


def broadcast_variables(variables: Sequence[Variable], root_rank: int, process_set: ProcessSet | None = None) -> None:
    """Overwrite variables with those of one rank. The function may be called inside a `tf.function`.

    Args:
        variables: Keras or TensorFlow variables, such as `model.variables` or `optimizer.variables`.
        root_rank: rank whose values are sent, numbered among all ranks.
        process_set: see `allreduce`.

    Raises:
        ReplicaError: if the ranks' variables differ in number, shape or dtype.
    """
    variables = list(variables() if callable(variables) else variables)
    comm, root = _host_comm(process_set, "broadcast_variables"), root_in(process_set, root_rank)
    replicas.check_alike(variables, comm)
    if tf.executing_eagerly() or not variables or comm.size == 1:
        replicas.broadcast(variables, root, comm)
        return
    values = [tf.convert_to_tensor(v) for v in variables]
    received = comm_of(process_set, "broadcast_variables").broadcast(
        values, root, name_of("broadcast_variables", values[0])
    )
    for variable, value in zip(variables, received, strict=True):
        variable.assign(value)


def broadcast_object(
    obj: object, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Return the object of one rank on all ranks.

    Args:
        obj: picklable object; it is ignored on other ranks than `root_rank`.
        root_rank: rank whose object is sent, numbered among all ranks.
        name: name of the collective in error messages.
        process_set: see `allreduce`.
    """
    root = root_in(process_set, root_rank)
    mine = obj if rank() == root_rank else None
    return _host_comm(process_set, "broadcast_object").all_gather_object(mine, name or "broadcast of an object")[root]


def broadcast_global_variables(root_rank: int) -> None:
    """Raise an error: TensorFlow 2 has no list of global variables.

    Raises:
        ConfigError: always; the message names functions to call instead.
    """
    raise ConfigError(
        "broadcast_global_variables: TensorFlow 2 has no global variables. Use broadcast_variables(model.variables, "
        "root_rank) or callbacks.BroadcastGlobalVariablesCallback(root_rank)."
    )


def _reduction(function: str, average: bool | None, op: Operation | None, compression: Compressor) -> Reduction:
    """Return the reduction for Horovod's arguments."""
    if average is not None and op is not None:
        raise ConfigError(f"{function}: give average or op, not both.")
    op = Sum if average is False else op
    return Reduction(average=operation(op) == Average, wire=wire(compression))


def _tensor(value: TensorLike) -> tf.Tensor:
    return tf.convert_to_tensor(raw_variable(value))


def name_of(function: str, *tensors: tf.Tensor) -> str:
    """Return the name of a collective.

    In a graph two collectives may be in flight, so the tensor's name is added, as in Horovod.
    """
    if tf.executing_eagerly() or not tensors:
        return function
    return f"{function}.{re.sub(r'[^0-9A-Za-z]+', '_', tensors[0].name)}"


def _host_comm(process_set: ProcessSet | None, function: str) -> Comm:
    """Return the communicator for objects. For all ranks it is that of `join`, so that no engine is started."""
    return comm_of(process_set, function) if is_partial(process_set) else join()
