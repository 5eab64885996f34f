"""Mailbox on MPI's two-sided messages, with two tags per box: one for headers, one for bodies.

A message is a header of fixed size and, if it has a body, the body in pieces. A matched probe finds headers. Several
bodies are received at the same time, so that a slow sender does not delay the others.
"""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvdx.comm.base import HEADER_WORDS, BufferFor, Mailbox, Message

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI counts in a C int.
_PIECE = 1 << 30


class MpiMailbox(Mailbox):
    """Mailbox of this rank on MPI.

    Args:
        comm: `MPI.Comm` for mailboxes only, which all boxes share.
        box: number of the box.
        buffer_for: see `hvdx.comm.base.BufferFor`.
    """

    def __init__(self, comm: "MPI.Comm", box: int, buffer_for: BufferFor | None):
        from mpi4py import MPI

        self._mpi, self._comm, self._box, self._buffer_for = MPI, comm, box, buffer_for
        self.rank = comm.Get_rank()
        self._sends: list[tuple[MPI.Request, np.ndarray]] = []
        # By sender: messages in the order of their headers, with the open requests for their bodies.
        self._arriving: dict[int, deque[tuple[Message, list[MPI.Request]]]] = {}

    def send(self, to: int, box: int, header: Sequence[int], body: np.ndarray | None = None) -> None:
        # The last word is the size of the body, or -1 for no body, which differs from an empty one.
        words = np.zeros(HEADER_WORDS + 1, np.int64)
        words[: len(header)] = header
        words[-1] = -1 if body is None else body.size
        self._sends.append((self._comm.Isend(words, to, 2 * box), words))
        for piece in () if body is None else _pieces(body):
            self._sends.append((self._comm.Isend([piece, self._mpi.BYTE], to, 2 * box + 1), piece))

    def pending_sends(self) -> int:
        self._sends = [(request, data) for request, data in self._sends if not request.Test()]
        return len(self._sends)

    def fetch(self) -> Message | None:
        if self._sends:
            self.pending_sends()
        self._receive_headers()
        for sender, waiting in self._arriving.items():
            if waiting:
                message, missing = waiting[0]
                missing[:] = [request for request in missing if not request.Test()]
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

    def _receive_headers(self) -> None:
        """Receive the headers that have arrived, and start to receive their bodies."""
        while True:
            status = self._mpi.Status()
            found = self._comm.Improbe(self._mpi.ANY_SOURCE, 2 * self._box, status)
            if found is None:
                return
            words = np.empty(HEADER_WORDS + 1, np.int64)
            found.Recv(words)
            *header, size = words.tolist()
            sender = status.Get_source()
            message, missing = Message(sender, tuple(header), None), []
            if size >= 0:
                body = self._buffer_for(sender, message.header, size) if self._buffer_for else None
                body = np.empty(size, np.uint8) if body is None else body
                message = Message(sender, message.header, body)
                missing = [
                    self._comm.Irecv([piece, self._mpi.BYTE], sender, 2 * self._box + 1) for piece in _pieces(body)
                ]
            self._arriving.setdefault(sender, deque()).append((message, missing))


def _pieces(body: np.ndarray) -> list[np.ndarray]:
    return [body[at : at + _PIECE] for at in range(0, body.size, _PIECE)]
