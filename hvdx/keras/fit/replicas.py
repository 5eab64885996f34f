"""Comparison, broadcast and averaging of the replicas of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import keras
import numpy as np
import numpy.typing as npt
import xxhash

from hvdx.comm import Comm
from hvdx.comm.memory import is_aligned
from hvdx.comm.mesh import mesh_of
from hvdx.errors import ReplicaError
from hvdx.keras import backend
from hvdx.keras.adapters.optimizer import optimizers_of
from hvdx.keras.adapters.rank_local import declared, rank_local_ids
from hvdx.keras.backend import tf
from hvdx.keras.optimizer_state import accumulated_gradients
from hvdx.keras.seams.layers import raw_variable
from hvdx.keras.types import Variable
from hvdx.keras.variables import bytes_of, dtype_of, is_float, rows_within, view_of
from hvdx.keras.weight_parts import by_ranks, mark_state, part_of, whole_shape

# Bytes of a variable that are broadcast at a time.
_BLOCK_BYTES = 1 << 23
# Largest number of differing variables that an error lists.
_LISTED = 5


def state_of(model: keras.Model) -> list[Variable]:
    """Return the weights and optimiser variables of a model.

    Metrics, states of random generators and half-accumulated gradients are not included, since they are rank-local.
    """
    return [*model.weights, *optimizer_state_of(model)]


def optimizer_state_of(model: keras.Model) -> list[Variable]:
    """Return the variables of a model's optimisers, without half-accumulated gradients."""
    optimizers = optimizers_of(model)
    for optimizer in optimizers:
        mark_state(optimizer)
    local = {id(v) for optimizer in optimizers for v in accumulated_gradients(optimizer)}
    variables = {id(v): v for optimizer in optimizers for v in optimizer.variables}
    return [v for i, v in variables.items() if i not in local]


def shared_state_of(model: keras.Model) -> list[Variable]:
    """Return the trainable weights and optimiser variables that should have the same bits on all ranks."""
    own = rank_local_ids(model)
    return [v for v in (*model.trainable_weights, *optimizer_state_of(model)) if id(v) not in own]


def build_optimizers(model: keras.Model, comm: Comm) -> None:
    """Build each optimiser that is built on another rank; the first step builds all other optimisers. Collective.

    Raises:
        ReplicaError: on every rank, if the numbers of optimisers differ.
    """
    optimizers = optimizers_of(model)
    everyone = comm.all_gather_object([o.built for o in optimizers], "optimizers")
    if any(len(built) != len(optimizers) for built in everyone):
        raise ReplicaError(
            f"the models differ: they hold {[len(built) for built in everyone]} optimizers on the ranks. Every rank "
            "must build the same model."
        )
    for optimizer, *built in zip(optimizers, *everyone, strict=True):
        if any(built) and not optimizer.built:
            optimizer.build(model.trainable_variables)


def check_alike(variables: Sequence[Variable], comm: Comm) -> None:
    """Compare shapes and dtypes over the ranks. Collective.

    Args:
        variables: Keras variables.
        comm: the ranks.

    Raises:
        ReplicaError: on every rank, if they differ; the message names the first variable that differs.
    """
    mine = [(whole_shape(v), str(v.dtype)) for v in variables]
    everyone = comm.all_gather_object(mine, "shapes of the model")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ReplicaError(_shape_message(everyone[0], theirs, rank, variables))


def _shape_message(
    first: list[tuple[tuple[int, ...], str]],
    theirs: list[tuple[tuple[int, ...], str]],
    rank: int,
    variables: Sequence[Variable],
) -> str:
    remedy = "Every rank must build the same model: look for sizes that depend on the rank or on its data."
    for i, (a, b) in enumerate(zip(first, theirs, strict=False)):
        if a != b:
            name = variables[i].path if i < len(variables) else f"number {i}"
            return (
                f"the models differ: variable {name} is {a[1]}{a[0]} on rank 0, {b[1]}{b[0]} on rank {rank}. {remedy}"
            )
    return f"the models differ: rank 0 has {len(first)} variables, rank {rank} has {len(theirs)}. {remedy}"


def broadcast(variables: Sequence[Variable], root: int, comm: Comm) -> None:
    """Overwrite variables with those of one rank. Collective.

    Args:
        variables: Keras or TensorFlow variables; their number, shapes and dtypes are the same on all ranks.
        root: rank whose values all ranks receive.
        comm: the ranks.
    """
    if comm.survives:
        # If the root dies, another rank takes its place, and sends all variables once more.
        _broadcast_together(variables, root, comm)
        return
    for group in _blocks(variables):
        if bytes_of(group[0]) > _BLOCK_BYTES and backend.name() == "tensorflow":
            _broadcast_rows(group[0], root, comm)
        else:
            _broadcast_together(group, root, comm)


def _broadcast_together(variables: Sequence[Variable], root: int, comm: Comm) -> None:
    values = comm.broadcast([view_of(v) for v in variables], root, "weights")
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _blocks(variables: Sequence[Variable]) -> Iterator[list[Variable]]:
    """Yield the variables in groups of up to `_BLOCK_BYTES`; larger variables alone."""
    group: list[Variable] = []
    total = 0
    for variable in variables:
        size = bytes_of(variable)
        if group and total + size > _BLOCK_BYTES:
            yield group
            group, total = [], 0
        group.append(variable)
        total += size
    if group:
        yield group


def _broadcast_rows(variable: Variable, root: int, comm: Comm) -> None:
    """Overwrite a variable block by block: another array of its size would need as much memory again."""
    mine = view_of(variable) if comm.rank == root else None
    handle = raw_variable(variable).handle
    length, rows = int(variable.shape[0]), rows_within(variable, _BLOCK_BYTES)
    for low in range(0, length, rows):
        high = min(low + rows, length)
        # While another rank held a tensor of its own values, an assignment would copy all of them.
        empty = np.empty((high - low, *variable.shape[1:]), dtype_of(variable.dtype))
        (value,) = comm.broadcast([empty if mine is None else mine[low:high]], root, "weights")
        if mine is None:
            tf.raw_ops.ResourceScatterUpdate(
                resource=handle, indices=np.arange(low, high), updates=_without_copy(value)
            )
    if mine is None:
        # An assignment to rows makes each later step copy the variable that it reads.
        tf.raw_ops.DisableCopyOnRead(resource=handle)


def _without_copy(value: npt.ArrayLike) -> npt.ArrayLike:
    """Return an array as a tensor with the same memory; where TensorFlow knows no such way, the array."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or not is_aligned(value):
        return value
    return tf.experimental.dlpack.from_dlpack(value.__dlpack__())


def broadcast_state(model: keras.Model, root: int, comm: Comm, excluded: Collection[int] = ()) -> None:
    """Overwrite the weights and optimiser state of all ranks with those of one rank. Collective.

    Args:
        model: built model.
        root: rank whose values all ranks receive.
        comm: the ranks.
        excluded: `id` of each variable that stays unchanged on each rank.

    Raises:
        ReplicaError: on every rank, if the models differ.
    """
    build_optimizers(model, comm)
    broadcast_alike([v for v in state_of(model) if id(v) not in excluded], root, comm)


def broadcast_alike(variables: Sequence[Variable], root: int, comm: Comm) -> None:
    """Overwrite variables of a model, parts of split layers too, with those of one rank. Collective.

    Args:
        variables, root, comm: see `broadcast_state`.

    Raises:
        ReplicaError: on every rank, if shapes or dtypes differ.
    """
    check_alike(variables, comm)
    for ranks, some in by_ranks(variables, comm):
        broadcast(some, _root_among(ranks, root, comm), ranks)


def _root_among(ranks: Comm, root: int, comm: Comm) -> int:
    """Return the number of the root among all ranks, or of the root's group among the peers."""
    if ranks is comm:
        return root
    return next(i for i, group in enumerate(mesh_of(comm).groups) if root in group)


def digests(variables: Sequence[Variable]) -> list[bytes]:
    """Return a digest of 8 bytes of each variable's bits; b"" for an empty variable."""
    return [_digest(view_of(v)) if 0 not in v.shape else b"" for v in variables]


def _digest(array: np.ndarray) -> bytes:
    # Arrays of bfloat16 export no buffer, but views of their bytes do.
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return xxhash.xxh3_64_digest(content.data)


def differing(variables: Sequence[Variable], comm: Comm) -> dict[int, list[int]]:
    """Find the variables whose bits differ from those of rank 0. Collective.

    Args:
        variables: Keras variables; their number is the same on all ranks.
        comm: the ranks.

    Returns:
        The index of each variable that differs, with the ranks where it differs; the same on every rank.
    """
    everyone = comm.all_gather_object(digests(variables), "digests of the weights")
    found: dict[int, list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for i, (a, b) in enumerate(zip(everyone[0], theirs, strict=True)):
            if a != b:
                found.setdefault(i, []).append(rank)
    return found


def check_identical(variables: Sequence[Variable], comm: Comm, when: str) -> None:
    """Stop unless the variables have the same bits on all ranks. Collective.

    Args:
        variables: Keras variables; their number is the same on all ranks.
        comm: the ranks.
        when: time of the check for the message, such as "after epoch 3".

    Raises:
        ReplicaError: on every rank, if variables differ; the message lists the first of them.
    """
    found = differing(variables, comm)
    if not found:
        return
    listed = [f"{variables[i].path} (ranks {', '.join(map(str, ranks))})" for i, ranks in found.items()]
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    raise ReplicaError(
        f"the replicas differ {when}: {len(found)} of {len(variables)} variables are not those of rank 0: "
        f"{'; '.join(listed[:_LISTED])}{more}. Something changed weights outside the optimiser, or on one rank only: "
        "a callback, a custom train_step, a layer that keeps state. Training was stopped; no checkpoint of these "
        "weights should be used."
    )


def average_state(model: keras.Model, comm: Comm) -> list[Variable]:
    """Make the non-trainable weights (such as moving averages) the same on all ranks. Collective.

    Floating-point weights that differ become the mean over the ranks where they hold no NaN or infinity. Other weights
    that differ become those of rank 0. Weights that `Distribute(local=, summed=)` names do not change.

    Returns:
        The weights that became those of rank 0.
    """
    left_out = {id(v) for part in declared(model) for v in part}
    candidates = [v for v in model.non_trainable_weights if id(v) not in left_out]
    variables = [v for v in candidates if 0 not in v.shape and part_of(v) is None]
    found = [variables[i] for i in differing(variables, comm)] if variables else []
    means = [v for v in found if is_float(v)]
    others = [v for v in found if not is_float(v)]
    if means:
        mine = [np.ravel(view_of(v)).astype(np.float64) for v in means]
        counts = np.array([np.isfinite(m).all() for m in mine], np.float64)
        shares = [m if count else np.zeros_like(m) for m, count in zip(mine, counts, strict=True)]
        total = comm.all_reduce_sum(np.concatenate([counts, *shares]), "moving averages")
        with np.errstate(invalid="ignore"):
            ranks = np.repeat(total[: len(means)], [m.size for m in mine])
            flat = total[len(means) :] / ranks
        for variable, piece in zip(means, np.split(flat, np.cumsum([m.size for m in mine])[:-1]), strict=True):
            variable.assign(piece.reshape(variable.shape).astype(dtype_of(variable.dtype)))
    if others:
        broadcast(others, 0, comm)
    return others
