"""The collectives of `horovod.tensorflow`, for eager code and graphs."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
import tensorflow as tf

from hvdx.comm import GraphComm
from hvdx.comm.interfaces import Reduction, Wire
from hvdx.comm.tensors import device_scope
from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.horovod.api import (
    Average,
    Compressing,
    Compression,
    Compressor,
    Max,
    Min,
    Operation,
    Product,
    Sum,
    UnsupportedError,
    operation,
    wire,
)
from hvdx.keras.horovod.objects import broadcast_variables, name_of
from hvdx.keras.horovod.process_sets import ProcessSet, comm_of, in_session, root_in
from hvdx.keras.seams.layers import raw_variable
from hvdx.keras.types import Gradient, TensorLike, Variable

F = TypeVar("F", bound=Callable[..., object])
_OTHERS = {Min: tf.reduce_min, Max: tf.reduce_max, Product: tf.reduce_prod}


class ShapeError(ConfigError, tf.errors.InvalidArgumentError):
    """A tensor has a shape, or `alltoall` got splits, that do not fit; also TensorFlow's class, which Horovod raises.

    Args:
        message: see `hvdx.errors`.
    """

    def __init__(self, message: str):
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


class EagerError(ConfigError, RuntimeError):
    """A function that needs a graph of TensorFlow 1. Horovod raises RuntimeError, which this one is too."""


def _named_value(function: F) -> F:
    """Let a function take its first argument as `value=` too, its name in `horovod.tensorflow.keras`."""

    @functools.wraps(function)
    def call(*arguments: object, **options: object) -> object:
        if "value" in options:
            options["tensor"] = options.pop("value")
        return function(*arguments, **options)

    return cast(F, call)


@_named_value
def allreduce(
    tensor: TensorLike | tf.IndexedSlices,
    average: bool | str | None = None,
    device_dense: str | bool | None = "",
    device_sparse: str = "",
    compression: Compressor | Compressing = Compression.none,
    op: Operation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
) -> Gradient:
    """Reduce a value over the ranks.

    Also called as in `horovod.tensorflow.keras`: `allreduce(value, name, average)`. The gradient is the same reduction
    of the ranks' gradients.

    Args:
        tensor: tensor or convertible to one, of the same shape and dtype on all ranks; or `tf.IndexedSlices`, whose
            rows are gathered, and divided by the number of ranks for Average.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        device_dense, device_sparse: devices of the operations on a tensor, and on `tf.IndexedSlices`.
        compression: data type on the network; see `Compression`.
        op: Average (the default), Sum, Min, Max or Product. The last three gather all ranks' values.
        prescale_factor, postscale_factor: factors before and after the reduction. Integers are multiplied in float64,
            and the result loses its fraction.
        name: name that identifies the collective on all ranks; not needed.
        process_set: ranks that take part, including this one; by default all.
        ignore_name_scope: has no effect, since names are used as they are.

    Returns:
        A tensor like the value, the same on all ranks; `tf.IndexedSlices` for those.

    Raises:
        ConfigError: if an argument is not supported; for Adasum and for `tf.IndexedSlices` it is NotImplementedError
            too.
        MismatchError: on all ranks, if they are in different calls, or their tensors have other shapes or dtypes.

    Example:
        >>> float(allreduce(3.0))  # in a world of one
        3.0
    """
    if isinstance(average, str):
        name, average, device_dense = average, None if device_dense == "" else device_dense, ""
    if not isinstance(device_dense, str) or not isinstance(device_sparse, str) or isinstance(average, str):
        raise ConfigError(
            f"allreduce: expected a tensor, average and devices, or a value, name and average, got {average!r}, "
            f"{device_dense!r} and {device_sparse!r}. Do: give the arguments after the first by their names."
        )
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
        function="allreduce",
    )[0]


@_named_value
def allgather(
    tensor: TensorLike, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet | None = None
) -> tf.Tensor:
    """Concatenate the ranks' values along their first dimension.

    The gradient is this rank's part of the mean of the ranks' gradients.

    Args:
        tensor: tensor or convertible to one, with one dimension or more; all but the first are the same on all ranks.
        name, ignore_name_scope, process_set: see `allreduce`.

    Raises:
        ConfigError, MismatchError: see `allreduce`.
    """
    comm, given = comm_of(process_set, "allgather"), _rows("allgather", tensor)
    tag = name or name_of("allgather", given)

    @tf.custom_gradient
    def run(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            its = name_of(f"{tag}.gradient", upstream)
            (mean,) = comm.all_reduce([upstream], Reduction(), its)
            counts = comm.all_gather(tf.shape(rows)[:1], f"{its}.rows")
            begin = tf.reduce_sum(counts[: comm.rank])
            return mean[begin : begin + tf.shape(rows)[0]]

        comm.check_call(_call("allgather", name), [rows[:0]])
        return comm.all_gather(rows, tag), gradient

    return run(given)


def grouped_allreduce(
    tensors: Sequence[TensorLike | tf.IndexedSlices],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | Compressing = Compression.none,
    op: Operation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
    *,
    function: str = "grouped_allreduce",
) -> list[Gradient]:
    """Reduce several values over the ranks, in one exchange.

    Args:
        tensors: tensors, values convertible to them, or `tf.IndexedSlices`; see `allreduce`.
        average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor: see `allreduce`.
        process_set, ignore_name_scope, name: see `allreduce`.
        function: name of the calling function, for error messages.
    """
    if average is not None and op is not None:
        raise ConfigError(f"{function}: give average or op, not both.")
    op = op if average is None else Average if average else Sum
    chosen = operation(op, (Average, Sum, *_OTHERS))
    scales = prescale_factor, postscale_factor
    comm = comm_of(process_set, function)
    result: list[Gradient] = list(tensors)
    sparse = [i for i, t in enumerate(result) if isinstance(t, tf.IndexedSlices)]
    dense = [i for i in range(len(result)) if i not in sparse]
    if sparse and (chosen in _OTHERS or scales != (1.0, 1.0)):
        raise UnsupportedError(
            f"{function}: expected Average or Sum without factors for tf.IndexedSlices, got {chosen!r} with {scales}. "
            "Do: convert them with tf.convert_to_tensor."
        )
    if dense:
        inputs = [_numbers(function, result[i]) for i in dense]
        tag = name or name_of(function, *inputs)
        with device_scope(device_dense):
            reduced = _allreduced(_call(function, name), comm, inputs, chosen, scales, compression, tag)
        for i, tensor in zip(dense, reduced, strict=True):
            result[i] = tensor
    for i in sparse:
        rows = result[i]
        with device_scope(device_sparse):
            values = allgather(rows.values, name and f"{name}.{i}.values", process_set=process_set)
            indices = allgather(rows.indices, name and f"{name}.{i}.indices", process_set=process_set)
            values = values / tf.cast(comm.size, values.dtype) if chosen == Average else values
        result[i] = tf.IndexedSlices(values, indices, rows.dense_shape)
    return result


def grouped_allgather(
    tensors: Sequence[TensorLike],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """Concatenate the ranks' values along the first dimension, for each of several values.

    Args:
        tensors: values; see `allgather`.
        name, ignore_name_scope, process_set: see `allreduce`.
    """
    return [allgather(v, name and f"{name}.{i}", process_set=process_set) for i, v in enumerate(tensors)]


@_named_value
def reducescatter(
    tensor: TensorLike,
    device_dense: str = "",
    compression: Compressor | Compressing = Compression.none,
    op: Operation = Average,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Sum or average a value over the ranks, and keep this rank's part of its first dimension.

    If the number of ranks does not divide the rows, the first ranks get one row more. The values are sent by an
    all-reduce. The gradient gathers the ranks' gradients; for Sum it is the number of ranks times that, as in Horovod.

    Args:
        tensor: tensor or convertible to one, with one dimension or more; of the same shape and dtype on all ranks.
        op: Average or Sum.
        device_dense, compression, name, process_set, ignore_name_scope: see `allreduce`.
        prescale_factor, postscale_factor: see `allreduce`.

    Raises:
        ConfigError, MismatchError: see `allreduce`.
    """
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        name=name,
        function="reducescatter",
    )[0]


def grouped_reducescatter(
    tensors: Sequence[TensorLike],
    device_dense: str = "",
    compression: Compressor | Compressing = Compression.none,
    op: Operation = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
    function: str = "grouped_reducescatter",
) -> list[tf.Tensor]:
    """Sum or average several values over the ranks, and keep this rank's part of the first dimension of each.

    Args:
        tensors: values; see `reducescatter`.
        device_dense, compression, op, process_set, prescale_factor, postscale_factor, name: see `reducescatter`.
        function: name of the calling function, for error messages.
    """
    chosen, scales = operation(op), (prescale_factor, postscale_factor)
    comm, inputs = comm_of(process_set, function), [_numbers(function, _rows(function, t)) for t in tensors]
    if not inputs:
        return []
    tag, call = name or name_of(function, *inputs), _call(function, name)
    gain = (comm.size if chosen == Sum else 1.0) * prescale_factor * postscale_factor

    @tf.custom_gradient
    def run(*values: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            its = name_of(f"{tag}.gradient", *upstream)
            return [comm.all_gather(_times(u, gain), f"{its}.{i}") for i, u in enumerate(upstream)]

        whole = _combined(call, comm, list(values), chosen, scales, compression, tag)
        return [_part(tensor, comm) for tensor in whole], gradient

    with device_scope(device_dense):
        parts: list[tf.Tensor] = run(*inputs)
    return parts


@_named_value
def alltoall(
    tensor: TensorLike,
    splits: TensorLike | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send each rank a part of this rank's value, and receive a part from each.

    The gradient sends the parts back.

    Args:
        tensor: tensor or convertible to one, with one dimension or more; all but the first are the same on all ranks.
        splits: int32[size], number of rows for each rank; by default, the same number for all.
        name, ignore_name_scope, process_set: see `allreduce`.

    Returns:
        The received parts, concatenated in rank order; if `splits` is given, also int32[size], the number of rows from
        each rank.

    Raises:
        ConfigError: if the splits, or equal parts, do not fit the first dimension.
        MismatchError: see `allreduce`.

    Example:
        >>> received, rows = alltoall([3.0, 4.0], splits=[2])  # in a world of one
        >>> received.numpy().tolist(), rows.numpy().tolist()
        ([3.0, 4.0], [2])

    Source: Horovod 0.28, `horovod.tensorflow.alltoall`.
    """
    comm, given = comm_of(process_set, "alltoall"), _rows("alltoall", tensor)
    rows, tag = given.shape[0], name or name_of("alltoall", given)
    if splits is None:
        if rows is not None and rows % comm.size:
            raise ShapeError(
                f"alltoall: expected a first dimension that {comm.size} ranks divide, got {rows}. Do: give splits."
            )
        parts = tf.fill([comm.size], tf.shape(given)[0] // comm.size)
    else:
        parts = tf.cast(_tensor("alltoall", splits), tf.int32)
        static = tf.get_static_value(parts)
        if parts.shape != (comm.size,) or (static is not None and (min(static) < 0 or rows not in (None, sum(static)))):
            raise ShapeError(
                f"alltoall: splits: expected {comm.size} numbers of rows that add up to {rows}, got {splits!r}. "
                "Do: give one for each rank."
            )

    @tf.custom_gradient
    def run(value: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
        comm.check_call(_call("alltoall", name), [value[:0]])
        received, counts = comm.all_to_all(value, parts, tag)

        def gradient(upstream: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            back, _ = comm.all_to_all(upstream, counts, name_of(f"{tag}.gradient", upstream))
            return tf.ensure_shape(back, value.shape)

        return (received, counts), gradient

    received, counts = run(given)
    return received if splits is None else (received, counts)


@_named_value
def broadcast(
    tensor: TensorLike,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """Return the value of one rank on all ranks.

    The gradient is the mean of the ranks' gradients on the root, and zero on other ranks.

    Args:
        tensor: tensor or convertible to one; of the same shape and dtype on all ranks.
        root_rank: rank whose value is sent, numbered among all ranks.
        name, ignore_name_scope, process_set: see `allreduce`.

    Raises:
        ConfigError, MismatchError: see `allreduce`.
    """
    comm, given = comm_of(process_set, "broadcast"), _tensor("broadcast", tensor)
    root, tag = root_in(process_set, root_rank), name or name_of("broadcast", given)

    @tf.custom_gradient
    def run(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            (mean,) = comm.all_reduce([upstream], Reduction(), name_of(f"{tag}.gradient", upstream))
            # TensorFlow leaves out an operation of Horovod whose result is not used, and the other ranks would wait for
            # this one. So the factor is not known before it runs.
            mine = tf.reshape(tf.numpy_function(lambda: np.float32(comm.rank == root), [], tf.float32), [])
            return tf.math.multiply_no_nan(mean, tf.cast(mine, mean.dtype))

        comm.check_call(_call("broadcast", name, f"root_rank={root_rank}"), [value])
        (result,) = comm.broadcast([value], root, tag)
        return tf.convert_to_tensor(result), gradient

    return run(given)


def broadcast_(
    variables: Sequence[Variable], root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> list[tf.Tensor]:
    """Overwrite variables with those of one rank, and return their new values.

    Args:
        variables: Keras or TensorFlow variables.
        root_rank, name, process_set: see `broadcast`.
    """
    values = []
    for i, variable in enumerate(variables):
        received = broadcast(variable, root_rank, name and f"{name}.{i}", process_set=process_set)
        assigned = variable.assign(received)
        with tf.control_dependencies([assigned] if in_session() else []):
            values.append(tf.identity(raw_variable(variable)))
    return values


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return the operation that overwrites the variables of a graph of TensorFlow 1 with those of one rank.

    Args:
        root_rank: rank whose values are sent.

    Raises:
        ConfigError: elsewhere, since TensorFlow 2 has no list of global variables; also a RuntimeError.
    """
    if in_session():
        return broadcast_variables(tf.compat.v1.global_variables(), root_rank)
    raise EagerError(
        "broadcast_global_variables: TensorFlow 2 has no global variables. Use broadcast_variables(model.variables, "
        "root_rank) or callbacks.BroadcastGlobalVariablesCallback(root_rank)."
    )


def _allreduced(
    call: str,
    comm: GraphComm,
    tensors: list[tf.Tensor],
    op: str,
    scales: tuple[float, float],
    compression: Compressor | Compressing,
    tag: str,
) -> list[tf.Tensor]:
    """Reduce tensors. The gradient is the same reduction of the ranks' gradients, as in Horovod."""

    @tf.custom_gradient
    def run(*values: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if op in _OTHERS:
                raise UnsupportedError(
                    f"{call}: expected Average or Sum for a gradient, got {op!r}. Do: use tf.stop_gradient."
                )
            its = name_of(f"{tag}.gradient", *upstream)
            return _combined(f"gradient of {call}", comm, list(upstream), op, scales, compression, its)

        return _combined(call, comm, list(values), op, scales, compression, tag), gradient

    results: list[tf.Tensor] = run(*tensors)
    return results


def _combined(
    call: str,
    comm: GraphComm,
    tensors: list[tf.Tensor],
    op: str,
    scales: tuple[float, float],
    compression: Compressor | Compressing,
    tag: str,
) -> list[tf.Tensor]:
    """Reduce tensors, with a factor before and one after; no gradient."""
    own = cast(Compressing, compression) if hasattr(compression, "compress") and not _is_known(compression) else None
    narrow: Wire = "none" if own else wire(cast(Compressor, compression))
    comm.check_call(f"{call}, {op} times {scales[0]} and {scales[1]}, compression {narrow}", tensors)
    kept = [own.compress(t) for t in tensors] if own else [(t, None) for t in tensors]
    sent = [_times(t, scales[0]) for t, _ in kept]
    after = scales[1]
    if op in _OTHERS:
        got = [_OTHERS[op](comm.all_gather(t[None], f"{tag}.{i}"), axis=0) for i, t in enumerate(sent)]
    else:
        # Integers are summed as such, and divided in float64.
        average = op == Average and not any(t.dtype.is_integer for t in sent)
        after = after / comm.size if op == Average and not average else after
        got = comm.all_reduce(sent, Reduction(average=average, wire=narrow), tag)
    got = [_times(t, after) for t in got]
    return [own.decompress(t, context) for t, (_, context) in zip(got, kept, strict=True)] if own else got


def _is_known(compression: Compressor | Compressing) -> bool:
    return isinstance(compression, str) or getattr(compression, "__module__", "").startswith("horovod.")


def _times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Multiply a tensor: integers in float64, 16 bits in float32, as in Horovod."""
    if factor == 1.0:
        return tensor
    wide = tf.float64 if tensor.dtype.is_integer else tf.float32 if tensor.dtype.size == 2 else tensor.dtype
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)


def _part(whole: tf.Tensor, comm: GraphComm) -> tf.Tensor:
    """Return this rank's rows of a tensor; if the ranks do not divide them, the first ranks have one more."""
    rows = whole.shape[0]
    if rows is None:
        each, more = tf.shape(whole)[0] // comm.size, tf.shape(whole)[0] % comm.size
        begin = comm.rank * each + tf.minimum(comm.rank, more)
        return whole[begin : begin + each + tf.cast(comm.rank < more, tf.int32)]
    each, more = divmod(rows, comm.size)
    begin = comm.rank * each + min(comm.rank, more)
    return whole[begin : begin + each + (comm.rank < more)]


def _call(function: str, name: str | None, *arguments: str) -> str:
    """Return the name of a call in error messages. A name of the user is compared between the ranks, as in Horovod."""
    return f"{function}({', '.join([*arguments, *([f'name={name!r}'] if name else [])])})"


def _tensor(function: str, value: TensorLike) -> tf.Tensor:
    backend.needs_tensorflow(function)
    if isinstance(value, tf.IndexedSlices):
        raise UnsupportedError(
            f"{function}: expected a tensor, got tf.IndexedSlices. Do: convert them with tf.convert_to_tensor."
        )
    tensor = tf.convert_to_tensor(raw_variable(value))
    if tensor.dtype in (tf.string, tf.variant, tf.resource):
        raise ConfigError(
            f"{function}: expected numbers, got {tensor.dtype.name}. Do: use broadcast_object or allgather_object."
        )
    return tensor


def _rows(function: str, value: TensorLike) -> tf.Tensor:
    tensor = _tensor(function, value)
    if tensor.shape.rank == 0:
        raise ShapeError(f"{function}: expected one dimension or more, got a scalar. Do: give [value].")
    return tensor


def _numbers(function: str, value: TensorLike) -> tf.Tensor:
    tensor = _tensor(function, value)
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise ConfigError(f"{function}: expected integers or floats, got {tensor.dtype.name}. Do: cast them.")
    return tensor
