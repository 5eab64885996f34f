"""Process sets: subsets of the ranks, with collectives of their own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TypeGuard

from hvdx import comm as world
from hvdx.comm import Comm, GraphComm
from hvdx.comm.interfaces import Engine
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras import backend, separate
from hvdx.keras.backend import tf
from hvdx.keras.joining import join


class ProcessSet:
    """Subset of the ranks; it can be used after `add_process_set` on all ranks.

    Args:
        ranks: int[n], distinct ranks.

    Attributes:
        ranks: ranks in ascending order.
        process_set_id: number of the set, from 1; None before it is added.

    Raises:
        ConfigError: if `ranks` is not a list of distinct ranks, or is empty.

    Example:
        >>> ProcessSet([2, 0]).ranks
        [0, 2]

    Source: Horovod 0.28, `horovod.common.process_sets`.
    """

    def __init__(self, ranks: Sequence[int]):
        listed = list(ranks) if isinstance(ranks, Sequence | range) else []
        if not listed or len(set(listed)) < len(listed) or not all(type(r) is int and r >= 0 for r in listed):
            raise ConfigError(
                f"ProcessSet: expected different ranks, such as [0, 2], got {ranks!r}. Do: give a list of ranks; "
                "communicators of MPI are not supported."
            )
        self.ranks = sorted(listed)
        self.process_set_id: int | None = None
        self._comm: GraphComm | None = None
        self._world: Comm | None = None

    def _assign(self, number: int | None, comm: GraphComm | None = None, world: Comm | None = None) -> None:
        """Record that the set was added, or without a number that it was removed."""
        self.process_set_id, self._comm, self._world = number, comm, world

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return join().rank in self.ranks

    def size(self) -> int | None:
        """Return the number of ranks; None before the set is added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's number in the set, from 0; None before the set is added, and on a rank outside of it."""
        return None if self.process_set_id is None or not self.included() else self.ranks.index(join().rank)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _AllRanks(ProcessSet):
    """Set of all ranks, which need not be added."""

    def __init__(self) -> None:
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        """All ranks."""
        return list(range(join().size))


#: The set of all ranks; the same as a `process_set` of None.
global_process_set = _AllRanks()
_sets: list[ProcessSet] = []
_numbers = itertools.count(1)


def allow() -> None:
    """Make Horovod accept process sets at any time; effective only before Horovod starts."""
    from hvdx.comm.horovod import PROCESS_SETS

    os.environ[PROCESS_SETS] = "1"


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set ready for use, and return it. Collective: all ranks add the same sets in the same order.

    Args:
        process_set: set, or its ranks.

    Raises:
        ConfigError: if a rank does not exist, the set has all ranks or was added before, or Horovod sends tensors and
            was started without process sets.
        ReplicaError: on all ranks, if they add different sets.

    Example:
        >>> add_process_set([0, 1])  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        hvdx.errors.ConfigError: add_process_set: expected some of the ranks 0 to 0, ...
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    joined = join()
    everyone = joined.all_gather_object(added.ranks, "a process set")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ReplicaError(
                f"add_process_set: expected one set on all ranks, got {everyone[0]} on rank 0, {theirs} on "
                f"rank {rank}. Do: add every set on every rank, in the same order, also on ranks outside of the set."
            )
    present = [s.ranks for s in _sets if s._world is joined]
    if added.ranks[-1] >= joined.size or len(added.ranks) == joined.size or added.ranks in present:
        raise ConfigError(
            f"add_process_set: expected some of the ranks 0 to {joined.size - 1}, in a set that was not added before, "
            f"got {added.ranks}. Do: use global_process_set for all ranks, or the set that was added before."
        )
    if not world.graph_calls():
        allow()
    _sets.append(added)
    added._assign(next(_numbers), world.graph(engine="auto").subset(added.ranks), joined)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, after which another set of the same ranks may be added.

    Args:
        process_set: set that `add_process_set` has returned.

    Returns:
        True if the set was removed; False if it had not been added.

    Example:
        >>> remove_process_set(global_process_set)
        False
    """
    if process_set not in _sets:
        return False
    _sets.remove(process_set)
    process_set._assign(None)
    return True


def comm_of(process_set: ProcessSet | None, function: str) -> GraphComm:
    """Return the communicator of a process set that includes this rank.

    Args:
        process_set: set of hvdx; None and Horovod's own global set mean all ranks.
        function: name of the calling function, for error messages.

    Raises:
        ConfigError: if it is not a set of hvdx, was not added, or does not include this rank.
    """
    found = comm_or_none(process_set, function)
    if not function.startswith("broadcast"):
        separate.script_combines()
    if found is None:
        raise ConfigError(
            f"{function}: process_set: expected a set that includes rank {join().rank}, got {process_set}. "
            "Do: call it where process_set.included()."
        )
    return found


def comm_or_none(process_set: ProcessSet | None, function: str, engine: Engine = "auto") -> GraphComm | None:
    """Return the communicator of a process set, or None on a rank outside of it; see `comm_of`.

    Args:
        process_set, function: see `comm_of`.
        engine: engine of the set of all ranks; smaller sets have that of "auto".
    """
    if not is_partial(process_set):
        return world.graph(engine="horovod" if in_session() else engine)
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
        raise ConfigError(
            f"{function}: process_set: expected a set that was added, got {process_set}. "
            "Do: call hvdx.keras.add_process_set(ranks) on all ranks, and give the set that it returns."
        )
    if process_set._world is not world.current():
        raise ConfigError(
            f"{function}: process_set: expected a set of this world, got one added before shutdown(). Do: add it again."
        )
    if in_session():
        raise ConfigError(
            f"{function}: process_set: expected eager code or a tf.function, got a graph of TensorFlow 1. Do: leave "
            "the set out, or the session."
        )
    return process_set._comm


def in_session() -> bool:
    """Return whether operations go to a graph of TensorFlow 1, which a session runs in no order; Horovod finds one."""
    if backend.name() != "tensorflow":
        return False
    with tf.init_scope():  # outside of functions
        return not tf.executing_eagerly()


def root_in(process_set: ProcessSet | None, root_rank: int) -> int:
    """Return the number of a rank in its process set.

    Args:
        process_set: see `comm_of`.
        root_rank: rank, numbered among all ranks.

    Raises:
        ConfigError: if the set does not include the rank.
    """
    ranks = process_set.ranks if is_partial(process_set) else list(range(join().size))
    if root_rank not in ranks:
        raise ConfigError(f"root_rank: expected one of {ranks}, got {root_rank}. Do: give a rank of the set.")
    return int(ranks.index(root_rank))


def set_of(number: int) -> ProcessSet:
    """Return a process set by its number.

    Args:
        number: its `process_set_id`; 0 is that of all ranks.

    Raises:
        ConfigError: if there is none.
    """
    present: dict[int | None, ProcessSet] = {s.process_set_id: s for s in (global_process_set, *_sets)}
    if number not in present:
        raise ConfigError(f"process_set_id: expected one of {list(present)}, got {number!r}. Do: add the set first.")
    return present[number]


def is_partial(process_set: ProcessSet | None) -> TypeGuard[ProcessSet]:
    """Return whether a set has only some of the ranks; None, and a set with the number 0, mean all ranks."""
    return process_set is not None and getattr(process_set, "process_set_id", None) != 0
