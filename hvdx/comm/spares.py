"""Spares: processes that wait, and take the places of ranks that died. `surviving` uses them.

A spare runs the script as the others do, in a `EchoComm`, up to the place where it waits. docs/adr/0047 has the
reasons.
"""

import atexit
import contextlib
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdx.comm import waiting
from hvdx.comm.interfaces import BufferFor, Cast, Channel, Comm, Mailbox, Received, T, add_in_order
from hvdx.comm.launcher import SPARES as VARIABLE
from hvdx.comm.mpi import MpiComm
from hvdx.comm.waiting import until
from hvdx.errors import ConfigError, ExchangeError

# Tags: a spare waits; a rank has ended.
_READY_TAG, _END_TAG = 11, 12


def wanted(processes: int) -> int:
    """Return the number of spares that `HVDX_SPARES` asks for.

    Raises:
        ConfigError: if it is not a number that leaves two ranks, one of which may die.
    """
    text = os.environ.get(VARIABLE, "") or "0"
    if not text.isdigit() or (int(text) and processes - int(text) < 2):
        raise ConfigError.on_all_ranks(
            f"{VARIABLE}: expected a number of spares beside two ranks or more, got {text!r} of {processes} processes."
        )
    return int(text)


@dataclass(frozen=True)
class Group:
    """Ranks with their new ones.

    Attributes:
        comm: their communicator.
        members: number in the job of each rank.
        newcomers: the numbers of the new ones.
        units: units of collectives that the others have completed.
    """

    comm: MpiComm
    members: list[int]
    newcomers: list[int]
    units: int


class Spares:
    """The ranks and the spares of a job that live, on a communicator of their own. Creating it is collective.

    Attributes:
        world: `MPI.Comm` of those that live.
        ranks: number of ranks at the start.
        group: `MPI.Comm` of the ranks at the start; None on a spare.
    """

    def __init__(self, everyone: MpiComm, count: int):
        from mpi4py import MPI

        self._mpi, self._template, self._hosts = MPI, everyone, list(everyone.hosts)
        self._first = everyone.group.Get_group()
        self.ranks = everyone.size - count
        self.world: MPI.Comm = everyone.group.Dup()
        self.world.Set_errhandler(MPI.ERRORS_RETURN)
        self._number = everyone.rank
        # By process of `world`: whether it is a rank.
        self._trains = [number < self.ranks for number in range(everyone.size)]
        group = everyone.group.Split(0 if self._number < self.ranks else MPI.UNDEFINED, self._number)
        self.group: MPI.Comm | None = None if group == MPI.COMM_NULL else group
        # Places where spares wait, by process of `world`.
        self._ready: dict[int, int] = {}
        self._sent: list[MPI.Request] = []
        # Runs before MPI ends, in which processes wait for each other.
        atexit.register(self.leave)

    def hosts_of(self, members: Sequence[int]) -> list[str]:
        """Return the hosts of some processes, by their numbers in the job."""
        return [self._hosts[number] for number in members]

    def leave(self) -> None:
        """Tell the spares that wait that this process ends."""
        self._send(_END_TAG, 0, to_ranks=False)

    def _send(self, tag: int, word: int, to_ranks: bool) -> None:
        """Send a number to the ranks, or to the spares that wait."""
        me = self.world.Get_rank()
        for process in [p for p, trains in enumerate(self._trains) if trains is to_ranks and p != me]:
            # The dead, and a group that was revoked.
            with contextlib.suppress(self._mpi.Exception):
                self._sent.append(self.world.Isend(np.array([word], np.int64), process, tag))

    # -- on a rank ----------------------------------------------------------------------------------------------------

    def are_ready(self, place: int) -> bool:
        """Return whether all spares that live wait at a place, and there is one. Called by one rank."""
        failed = self.world.Get_failed()
        dead = set(self._mpi.Group.Translate_ranks(failed, list(range(failed.Get_size())), self.world.Get_group()))
        living = [process for process, trains in enumerate(self._trains) if not trains and process not in dead]
        for process in living:
            with contextlib.suppress(self._mpi.Exception):
                while self.world.Iprobe(process, _READY_TAG):
                    word = np.empty(1, np.int64)
                    self.world.Recv(word, process, _READY_TAG)
                    self._ready[process] = int(word[0])
        return bool(living) and all(self._ready.get(process) == place for process in living)

    # -- on a spare ---------------------------------------------------------------------------------------------------

    def wait(self, place: int) -> bool:
        """Wait until ranks need spares; return False if all ranks have ended."""
        self._send(_READY_TAG, place, to_ranks=True)
        gone: set[int] = set()

        def has_ended(process: int) -> bool:
            try:
                return bool(self.world.Iprobe(process, _END_TAG))
            except self._mpi.Exception as error:
                return bool(error.Get_error_class() == self._mpi.ERR_PROC_FAILED)

        def is_over() -> bool:
            gone.update(p for p, trains in enumerate(self._trains) if trains and p not in gone and has_ended(p))
            return bool(self.world.Is_revoked()) or len(gone) == sum(self._trains)

        until(is_over, math.inf)
        return bool(self.world.Is_revoked())

    # -- on all -------------------------------------------------------------------------------------------------------

    def shrink(self) -> None:
        """Leave out the dead."""
        with waiting.recorded("the spares"):
            self.world = self.world.Shrink()
        self.world.Set_errhandler(self._mpi.ERRORS_RETURN)

    def form(self, waits: bool, units: int) -> Group | None:
        """Make the group of the ranks that live, and of as many spares as places are free. Collective, after `shrink`.

        Args:
            waits: whether this process is a spare.
            units: see `Group`.

        Returns:
            The group; None on a spare that has no place in it.

        Raises:
            ExchangeError: if no rank lives.
        """
        group, size = self.world.Get_group(), self.world.Get_size()
        numbers = self._mpi.Group.Translate_ranks(group, list(range(size)), self._first)
        everyone = self._template.of_survivors(self.world, self.hosts_of(numbers))
        offered = everyone.all_gather_object((waits, units), "the spares")
        trained = [process for process, (is_spare, _) in enumerate(offered) if not is_spare]
        if not trained:
            raise ExchangeError("all ranks have died, and the spares do not have their state.")
        free = [process for process in range(size) if process not in trained][: self.ranks - len(trained)]
        self._ready, self._trains = {}, [process in trained or process in free for process in range(size)]
        mine = self._trains[everyone.rank]
        with waiting.recorded("the spares"):
            chosen = self.world.Split(0 if mine else self._mpi.UNDEFINED, everyone.rank)
        if not mine:
            return None
        chosen.Set_errhandler(self._mpi.ERRORS_RETURN)
        members = [number for number, trains in zip(numbers, self._trains, strict=True) if trains]
        comm = everyone.of_survivors(chosen, self.hosts_of(members))
        return Group(comm, members, [numbers[process] for process in free], max(offered[p][1] for p in trained))


class EchoComm(Comm):
    """Communicator of a spare that waits: of ranks that all send what this process sends.

    So the spare computes what a rank of the same script does, and exchanges nothing.

    Example:
        >>> EchoComm(2, 3, "here").all_gather_object("mine", "a test")
        ['mine', 'mine', 'mine']
    """

    def __init__(self, rank: int, size: int, host: str):
        self.rank = self.local_rank = rank
        self.size = self.local_size = size
        self.cross_rank, self.cross_size = 0, 1
        self.hosts = [host] * size

    def all_gather_object(self, value: T, what: str) -> list[T]:
        return [value] * self.size

    def all_reduce_sum(self, vector: np.ndarray, what: str) -> np.ndarray:
        return np.array(vector, np.float64) * self.size

    def broadcast(self, tensors: Sequence[npt.ArrayLike], root: int, what: str) -> list[np.ndarray]:
        return [np.array(tensor) for tensor in tensors]

    def channel(self, what: str) -> Channel:
        return EchoChannel(self.rank, self.size)

    def divide(self, part: int, key: int, what: str) -> Comm:
        return self

    def mailbox(self, box: int, buffer_for: BufferFor | None = None) -> Mailbox:
        """Raise ConfigError: a spare sends no messages to single ranks."""
        raise ConfigError.on_all_ranks(f"{VARIABLE}: a spare cannot wait in a strategy with messages to single ranks.")


class EchoChannel(Channel):
    """Channel of a `EchoComm`.

    Example:
        >>> EchoChannel(0, 2).exchange([7]).headers.tolist()
        [[7], [7]]
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def exchange(self, header: Sequence[int], message: np.ndarray | None = None) -> Received:
        headers = np.tile(np.array(header, np.int64), (self.size, 1))
        return Received(headers, [] if message is None else [message] * self.size, 0.0, 0.0)

    def all_reduce(self, vector: np.ndarray) -> None:
        vector *= self.size

    def sum_in_order(self, vector: np.ndarray, scale: float = 1.0, cast: Cast = np.ndarray.astype) -> None:
        add_in_order([vector.copy()] * self.size, vector, scale, cast)

    def gather_pieces(self, piece: np.ndarray, bounds: np.ndarray, into: np.ndarray) -> None:
        for begin, end in itertools.pairwise(bounds):
            into[begin:end] = np.resize(piece, end - begin)
