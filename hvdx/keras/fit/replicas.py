"""The replicas of a model: are they alike, make them alike, prove that they are."""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdx.comm import Comm
from hvdx.errors import ReplicaError
from hvdx.keras.adapters.optimizer import optimizers_of
from hvdx.keras.adapters.optimizer_state import local_variables

# How many differing variables an error lists; the rest is counted.
_LISTED = 5


def state_of(model: Any) -> list[Any]:
    """Weights and optimiser variables of a model.

    What belongs to a rank is left out: metrics, the states of random generators, half-accumulated gradients.
    """
    return [*model.weights, *optimizer_state_of(model)]


def optimizer_state_of(model: Any) -> list[Any]:
    """The variables of a model's optimisers, but for gradients that they are still accumulating."""
    optimizers = optimizers_of(model)
    local = {id(v) for optimizer in optimizers for v in local_variables(optimizer)}
    variables = {id(v): v for optimizer in optimizers for v in optimizer.variables}
    return [v for i, v in variables.items() if i not in local]


def build_optimizers(model: Any, comm: Comm) -> None:
    """Make the variables of each optimiser that has them on some rank already; the others come with the first step."""
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


def check_alike(variables: Sequence[Any], comm: Comm) -> None:
    """Compare shapes and dtypes over the ranks.

    Args:
        variables: Keras variables.
        comm: the ranks.

    Raises:
        ReplicaError: on every rank, with the first variables that differ.
    """
    mine = [(tuple(v.shape), str(v.dtype)) for v in variables]
    everyone = comm.all_gather_object(mine, "shapes of the model")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ReplicaError(_shape_message(everyone[0], theirs, rank, variables))


def _shape_message(first: list[Any], theirs: list[Any], rank: int, variables: Sequence[Any]) -> str:
    remedy = "Every rank must build the same model: look for sizes that depend on the rank or on its data."
    for i, (a, b) in enumerate(zip(first, theirs, strict=False)):
        if a != b:
            name = variables[i].path if i < len(variables) else f"number {i}"
            return (
                f"the models differ: variable {name} is {a[1]}{a[0]} on rank 0, {b[1]}{b[0]} on rank {rank}. {remedy}"
            )
    return f"the models differ: rank 0 has {len(first)} variables, rank {rank} has {len(theirs)}. {remedy}"


def broadcast(variables: Sequence[Any], root: int, comm: Comm) -> None:
    """Overwrite variables with those of one rank.

    Args:
        variables: Keras or TensorFlow variables, alike in number, shape and dtype on all ranks.
        root: the rank whose values all get.
        comm: the ranks.
    """
    values = comm.broadcast([tf.convert_to_tensor(v) for v in variables], root, "weights")
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def broadcast_state(model: Any, root: int, comm: Comm, but: Collection[int] = ()) -> None:
    """Start all ranks from one rank's weights and optimiser state.

    Args:
        model: built.
        root: the rank whose values all get.
        comm: the ranks.
        but: `id` of variables that stay as they are on each rank.

    Raises:
        ReplicaError: on every rank, if the models differ.
    """
    build_optimizers(model, comm)
    variables = [v for v in state_of(model) if id(v) not in but]
    check_alike(variables, comm)
    broadcast(variables, root, comm)


def digests(variables: Sequence[Any]) -> list[bytes]:
    """One 8-byte digest a variable, of its very bits."""
    return [
        hashlib.blake2b(np.ascontiguousarray(tf.convert_to_tensor(v).numpy()).data, digest_size=8).digest()
        if 0 not in v.shape
        else b""
        for v in variables
    ]


def differing(variables: Sequence[Any], comm: Comm) -> dict[int, list[int]]:
    """Which variables differ from rank 0's.

    Args:
        variables: Keras variables, alike in number on all ranks.
        comm: the ranks.

    Returns:
        The index of each that differs, with the ranks where it does; the same on every rank.
    """
    everyone = comm.all_gather_object(digests(variables), "digests of the weights")
    found: dict[int, list[int]] = {}
    for rank, theirs in enumerate(everyone):
        for i, (a, b) in enumerate(zip(everyone[0], theirs, strict=True)):
            if a != b:
                found.setdefault(i, []).append(rank)
    return found


def check_identical(variables: Sequence[Any], comm: Comm, when: str) -> None:
    """Stop unless all ranks hold the same bits.

    Args:
        variables: Keras variables, alike in number on all ranks.
        comm: the ranks.
        when: for the message, such as "after epoch 3".

    Raises:
        ReplicaError: on every rank, with the first variables that differ.
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


def average_state(model: Any, comm: Comm) -> None:
    """Make the weights that no gradient reaches (moving averages and the like) the same on all ranks.

    Floating-point ones that differ become the mean over ranks, without ranks where they hold NaN or infinity; others
    those of rank 0.
    """
    variables = [v for v in model.non_trainable_weights if 0 not in v.shape]
    found = [variables[i] for i in differing(variables, comm)] if variables else []
    means = [v for v in found if tf.as_dtype(v.dtype).is_floating]
    others = [v for v in found if not tf.as_dtype(v.dtype).is_floating]
    if means:
        mine = [np.ravel(tf.convert_to_tensor(v).numpy()).astype(np.float64) for v in means]
        counts = np.array([np.isfinite(m).all() for m in mine], np.float64)
        shares = [m if count else np.zeros_like(m) for m, count in zip(mine, counts, strict=True)]
        total = comm.all_reduce_sum(np.concatenate([counts, *shares]), "moving averages")
        with np.errstate(invalid="ignore"):
            ranks = np.repeat(total[: len(means)], [m.size for m in mine])
            flat = total[len(means) :] / ranks
        for variable, piece in zip(means, np.split(flat, np.cumsum([m.size for m in mine])[:-1]), strict=True):
            variable.assign(piece.reshape(variable.shape).astype(tf.as_dtype(variable.dtype).as_numpy_dtype))
    if others:
        broadcast(others, 0, comm)
