"""Process sets: some of the ranks, which run collectives of their own."""

import os
from collections.abc import Sequence
from typing import Any

from hvdx import comm as world
from hvdx.comm import Comm, GraphComm
from hvdx.comm.base import Engine
from hvdx.comm.horovod import PROCESS_SETS
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras.joining import join


class ProcessSet:
    """Some of the ranks; `add_process_set` on all ranks makes it ready for use.

    Args:
        ranks: int[n], different ones.

    Attributes:
        ranks: in ascending order.
        process_set_id: its number, from 1, once it was added; else None.

    Raises:
        ConfigError: no ranks, one of them twice, or something else.

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

    def included(self) -> bool:
        """Whether this rank is one of them."""
        return join().rank in self.ranks

    def size(self) -> int | None:
        """Number of ranks; None before it was added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This rank among them, from 0; None before it was added, and on a rank that is not included."""
        return None if self.process_set_id is None or not self.included() else self.ranks.index(join().rank)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _AllRanks(ProcessSet):
    """The set of all ranks, which nobody has to add."""

    def __init__(self) -> None:
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        """All ranks."""
        return list(range(join().size))


#: The set of all ranks; what a `process_set` of None means.
global_process_set = _AllRanks()
_sets: list[ProcessSet] = []


def allow() -> None:
    """Have Horovod, which is not started yet, take process sets later."""
    os.environ[PROCESS_SETS] = "1"


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set ready for use. Collective: all ranks add the same sets in the same order.

    Args:
        process_set: a set, or its ranks.

    Returns:
        The set.

    Raises:
        ConfigError: ranks that there are not, all ranks, a set that was added already, or Horovod was started without
            process sets.
        ReplicaError: on every rank, if they add different ones.

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
                f"rank {rank}. Do: add every set on every rank, in the same order, those that a rank is no part of too."
            )
    there = [s.ranks for s in _sets if s._world is joined]
    if added.ranks[-1] >= joined.size or len(added.ranks) == joined.size or added.ranks in there:
        raise ConfigError(
            f"add_process_set: expected some of the ranks 0 to {joined.size - 1}, in a set that is not there yet, got "
            f"{added.ranks}. Do: use global_process_set for all ranks, and the set that was added before."
        )
    if not world.graph_calls():
        allow()
    added._comm, added._world = world.graph().subset(added.ranks), joined
    _sets.append(added)
    added.process_set_id = len(_sets)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Have no more use for a process set; another of the same ranks may be added then.

    Args:
        process_set: of `add_process_set`.

    Returns:
        Whether it was there.

    Example:
        >>> remove_process_set(global_process_set)
        False
    """
    if process_set not in _sets:
        return False
    _sets.remove(process_set)
    process_set.process_set_id = process_set._comm = process_set._world = None
    return True


def comm_of(process_set: Any, function: str) -> GraphComm:
    """The communicator of a process set that this rank is part of.

    Args:
        process_set: None and Horovod's own global set mean all ranks.
        function: for messages.

    Raises:
        ConfigError: it is no set of hvdx, was not added, or this rank is no part of it.
    """
    found = comm_or_none(process_set, function)
    if found is None:
        raise ConfigError(
            f"{function}: process_set: expected a set that rank {join().rank} is part of, got {process_set}. "
            "Do: call it where process_set.included()."
        )
    return found


def comm_or_none(process_set: Any, function: str, engine: Engine = "horovod") -> GraphComm | None:
    """See `comm_of`; None where this rank is no part of the set. All ranks may have another engine than Horovod."""
    if not is_partial(process_set):
        return world.graph(engine=engine)
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
        raise ConfigError(
            f"{function}: process_set: expected a set that was added, got {process_set}. "
            "Do: call hvdx.keras.add_process_set(ranks) on all ranks, and give what it returns."
        )
    if process_set._world is not world.current():
        raise ConfigError(
            f"{function}: process_set: expected a set of this world, got one added before shutdown(). Do: add it anew."
        )
    return process_set._comm


def root_in(process_set: Any, root_rank: int) -> int:
    """The number, in its set, of a rank of the world.

    Args:
        process_set: see `comm_of`.
        root_rank: among all ranks.

    Raises:
        ConfigError: it is no rank of the set.
    """
    ranks = process_set.ranks if is_partial(process_set) else list(range(join().size))
    if root_rank not in ranks:
        raise ConfigError(f"root_rank: expected one of {ranks}, got {root_rank}. Do: give a rank of the set.")
    return int(ranks.index(root_rank))


def is_partial(process_set: Any) -> bool:
    """Whether it is a set of some ranks only; Horovod's set of all ranks has the number 0, and None means it too."""
    return process_set is not None and getattr(process_set, "process_set_id", None) != 0
