"""The collectives of `horovod.tensorflow` for objects and for variables of models, which need no TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from hvdx.comm import Comm
from hvdx.keras import backend
from hvdx.keras.backend import tf
from hvdx.keras.fit import replicas
from hvdx.keras.horovod.api import rank
from hvdx.keras.horovod.process_sets import ProcessSet, comm_of, in_session, is_partial, root_in
from hvdx.keras.joining import join
from hvdx.keras.types import Variable


def allgather_object(
    obj: object, session: object = None, name: str | None = None, process_set: ProcessSet | None = None
) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        obj: picklable object of this rank.
        session: has no effect; nothing runs in a session of TensorFlow 1.
        name: name of the collective in error messages.
        process_set: see `allreduce`.
    """
    return _host_comm(process_set, "allgather_object").all_gather_object(obj, name or "gathering of objects")


def broadcast_variables(
    variables: Sequence[Variable], root_rank: int, process_set: ProcessSet | None = None, inplace: bool = False
) -> tf.Operation | None:
    """Overwrite variables with those of one rank. The function may be called inside a `tf.function`.

    Args:
        variables: Keras or TensorFlow variables, such as `model.variables` or `optimizer.variables`.
        root_rank: rank whose values are sent, numbered among all ranks.
        process_set: see `allreduce`.
        inplace: has no effect.

    Returns:
        The operation to run, in a graph of TensorFlow 1; None elsewhere.

    Raises:
        ReplicaError: if the ranks' variables differ in number, shape or dtype.
    """
    variables = list(variables() if callable(variables) else variables)
    comm, root = _host_comm(process_set, "broadcast_variables"), root_in(process_set, root_rank)
    replicas.check_alike(variables, comm)
    eager = backend.name() != "tensorflow" or tf.executing_eagerly()
    if eager or not variables or comm.size == 1:
        replicas.broadcast(variables, root, comm)
        return tf.no_op() if in_session() else None
    values = [tf.convert_to_tensor(v) for v in variables]
    received = comm_of(process_set, "broadcast_variables").broadcast(
        values, root, name_of("broadcast_variables", values[0])
    )
    assigned = [variable.assign(value) for variable, value in zip(variables, received, strict=True)]
    return tf.group(*assigned) if in_session() else None


def broadcast_object(
    obj: object,
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Return the object of one rank on all ranks.

    Args:
        obj: picklable object; it is ignored on other ranks than `root_rank`.
        root_rank: rank whose object is sent, numbered among all ranks.
        session: has no effect; nothing runs in a session of TensorFlow 1.
        name: name of the collective in error messages.
        process_set: see `allreduce`.
    """
    root = root_in(process_set, root_rank)
    mine = obj if rank() == root_rank else None
    return _host_comm(process_set, "broadcast_object").all_gather_object(mine, name or "broadcast of an object")[root]


def broadcast_object_fn(
    root_rank: int = 0, session: object = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Callable[[object], object]:
    """Return a function of an object that returns the object of one rank on all ranks.

    Args:
        root_rank, session, name, process_set: see `broadcast_object`.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


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
