"""Mailbox on MPI's two-sided messages, with two tags per box: one for headers, one for bodies.

A message is a header of fixed size and, if it has a body, the body in pieces. A matched probe finds headers. Several
bodies are received at the same time, so that a slow sender does not delay the others.
"""

import time
from collections import deque
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import numpy as np

from hvdx.comm.interfaces import HEADER_WORDS, BufferFor, Mailbox, Message

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI counts in a C int.
_PIECE = 1 << 30
# Seconds between two looks for ranks that have died.
_LOOK_SECONDS = 0.01


class Ranks:
    """Ranks of a communicator, none of which dies while the others go on.

    Attributes:
        gone: numbers of those that have died.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.gone: Set[int] = frozenset()

    def look(self) -> None:
        """Look for ranks that have died, unless this was done a moment ago."""

    @property
    def sources(self) -> list[int]:
        """Ranks in the communicator to receive from, which may be MPI's wildcard."""
        return [self._mpi.ANY_SOURCE]

    def place(self, number: int) -> int:
        """Return the rank in the communicator of a number."""
        return number

    def number(self, place: int) -> int:
        """Return the number of a rank of the communicator."""
        return place

    def is_death(self, error: Exception) -> bool:
        """Return whether an error says that a rank has died; `gone` has its number soon."""
        return False


class Mortals(Ranks):
    """Ranks of a communicator, some of which may die while the others go on.

    Args:
        comm: `MPI.Comm`, which returns errors.
        numbers: number of each of its ranks, which stays the same when others die.
    """

    def __init__(self, comm: "MPI.Comm", numbers: Sequence[int]):
        super().__init__()
        self._comm, self._numbers = comm, list(numbers)
        self._next_look = 0.0

    def look(self) -> None:
        now = time.monotonic()
        if now > self._next_look:
            self._next_look, failed = now + _LOOK_SECONDS, self._comm.Get_failed()
            if failed.Get_size() > len(self.gone):
                everyone, some = self._comm.Get_group(), list(range(failed.Get_size()))
                places = self._mpi.Group.Translate_ranks(failed, some, everyone)
                self.gone = frozenset(self._numbers[place] for place in places)

    @property
    def sources(self) -> list[int]:
        return [place for place, number in enumerate(self._numbers) if number not in self.gone]

    def place(self, number: int) -> int:
        return self._numbers.index(number)

    def number(self, place: int) -> int:
        return self._numbers[place]

    def is_death(self, error: Exception) -> bool:
        dead = (self._mpi.ERR_PROC_FAILED, self._mpi.ERR_PROC_FAILED_PENDING)
        return isinstance(error, self._mpi.Exception) and error.Get_error_class() in dead


class MpiMailbox(Mailbox):
    """Mailbox of this rank on MPI.

    Args:
        comm: `MPI.Comm` for mailboxes only, which all boxes share.
        box: number of the box.
        buffer_for: see `hvdx.comm.interfaces.BufferFor`.
        ranks: ranks of `comm`.
    """

    def __init__(self, comm: "MPI.Comm", box: int, buffer_for: BufferFor | None, ranks: Ranks | None = None):
        from mpi4py import MPI

        self._mpi, self._comm, self._box, self._buffer_for = MPI, comm, box, buffer_for
        self._ranks = ranks = ranks or Ranks()
        self.rank = ranks.number(comm.Get_rank())
        # Request, data and receiver of each send in flight.
        self._sends: list[tuple[MPI.Request, np.ndarray, int]] = []
        # What MPI may still use of messages from and to ranks that have died; senders of such a message.
        self._kept: list[object] = []
        self._lost: set[int] = set()
        # By sender: messages in the order of their headers, with the open requests for their bodies.
        self._arriving: dict[int, deque[tuple[Message, list[MPI.Request]]]] = {}

    def send(self, to: int, box: int, header: Sequence[int], body: np.ndarray | None = None) -> None:
        # The last word is the size of the body, or -1 for no body, which differs from an empty one.
        words = np.zeros(HEADER_WORDS + 1, np.int64)
        words[: len(header)] = header
        words[-1] = -1 if body is None else body.size
        if to in self.gone:
            return
        place = self._ranks.place(to)
        try:
            self._sends.append((self._comm.Isend(words, place, 2 * box), words, to))
            for piece in () if body is None else _pieces(body):
                self._sends.append((self._comm.Isend([piece, self._mpi.BYTE], place, 2 * box + 1), piece, to))
        except self._mpi.Exception as error:
            self._check(error)

    def pending_sends(self) -> int:
        self._sends = [send for send in self._sends if not self._is_over(*send)]
        return len(self._sends)

    def _is_over(self, request: "MPI.Request", data: np.ndarray, to: int) -> bool:
        """Return whether a send is complete, or has lost its receiver."""
        try:
            if request.Test():
                return True
            lost = to in self.gone  # MPI may leave such a request open for ever
        except self._mpi.Exception as error:
            self._check(error)
            lost = True
        if lost:
            self._kept.append((request, data))
        return lost

    def _check(self, error: Exception) -> None:
        """Raise an error again, unless it says that a rank has died, as ranks may."""
        if not self._ranks.is_death(error):
            raise error

    @property
    def gone(self) -> Set[int]:  # type: ignore[override]
        return self._ranks.gone

    def fetch(self) -> Message | None:
        self._ranks.look()
        for number in self.gone & self._arriving.keys():
            self._kept.append(self._arriving.pop(number))
        if self._sends:
            self.pending_sends()
        for place in self._ranks.sources:
            try:
                self._receive_headers(place)
            except self._mpi.Exception as error:
                self._check(error)
        for sender, waiting in self._arriving.items():
            if waiting and sender not in self._lost:
                message, missing = waiting[0]
                try:
                    missing[:] = [request for request in missing if not request.Test()]
                except self._mpi.Exception as error:
                    self._check(error)
                    self._lost.add(sender)
                    continue
                if not missing:
                    waiting.popleft()
                    # Move this sender to the end, so that the others come first next time.
                    self._arriving[sender] = self._arriving.pop(sender)
                    return message
        return None

    @property
    def receiving(self) -> bool:
        """True while a message has arrived in part, or a send is in flight."""
        return bool(self._sends) or any(self._arriving.values())

    def _receive_headers(self, source: int) -> None:
        """Receive the headers that have arrived from a source, and start to receive their bodies."""
        while True:
            status = self._mpi.Status()
            found = self._comm.Improbe(source, 2 * self._box, status)
            if found is None:
                return
            words = np.empty(HEADER_WORDS + 1, np.int64)
            found.Recv(words)
            *header, size = words.tolist()
            place = status.Get_source()
            sender = self._ranks.number(place)
            message, missing = Message(sender, tuple(header), None), []
            if size >= 0:
                body = self._buffer_for(sender, message.header, size) if self._buffer_for else None
                body = np.empty(size, np.uint8) if body is None else body
                message = Message(sender, message.header, body)
                missing = [
                    self._comm.Irecv([piece, self._mpi.BYTE], place, 2 * self._box + 1) for piece in _pieces(body)
                ]
            self._arriving.setdefault(sender, deque()).append((message, missing))


def _pieces(body: np.ndarray) -> list[np.ndarray]:
    return [body[at : at + _PIECE] for at in range(0, body.size, _PIECE)]
