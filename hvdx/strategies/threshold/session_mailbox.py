"""Packets of the asynchronous exchange: the mailbox of a rank, and the thread that reads it while the rank computes.

Without the thread, the sequencer would place messages only between two of its own steps, and large messages would not
move while their receiver computes.
"""

import atexit
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from hvdx.comm import Comm, Message
from hvdx.comm.interfaces import HEADER_WORDS
from hvdx.comm.waiting import until
from hvdx.strategies.sessions import PerComm, Polling, Series
from hvdx.strategies.threshold.replica import Kind, Packet, Replica

#: Number of the mailbox; the parameter server, which also hands out steps, has 0 and 1.
BOX = 2
#: Bytes of a header on the wire.
HEADER_BYTES = 8 * (HEADER_WORDS + 1)
# Seconds that the end of the process waits for the thread.
_JOIN_SECONDS = 5.0


class Payload:
    """Message of a step: numbers for the header, and a body.

    Args:
        words: at most 6 integers.
        body: uint8[bytes], which does not change.
    """

    __slots__ = ("body", "words")

    def __init__(self, words: Sequence[int], body: np.ndarray):
        self.words, self.body = tuple(words), body


class Session:
    """Session of an exchange.

    Args:
        number: its number, the same on all ranks.
        replica: state of this rank.
        members: number in mailboxes of each rank.

    Attributes:
        packets: number of packets received.
    """

    def __init__(self, number: int, replica: Replica, members: Sequence[int]):
        self.number, self.replica, self.members, self.packets = number, replica, list(members), 0
        self._sent = self._received = 0

    def count_sent(self, size: int) -> None:
        """Count a packet that leaves, and the bytes of its body."""
        self._sent += HEADER_BYTES + size

    def count_received(self, size: int) -> None:
        """Count a packet that has come, and the bytes of its body."""
        self.packets += 1
        self._received += HEADER_BYTES + size

    def take_bytes(self) -> tuple[int, int]:
        """Return the bytes sent and received since the last call."""
        counted, self._sent, self._received = (self._sent, self._received), 0, 0
        return counted


class SessionMailbox:
    """Mailbox of a rank for the packets of all its sessions. Made by all ranks of a communicator together.

    Args:
        comm: the ranks.

    Attributes:
        lock: held while the mailbox or a replica is used.
        series: numbers of sessions.
    """

    def __init__(self, comm: Comm):
        self._box, self.lock, self.series = comm.mailbox(BOX), threading.RLock(), Series()
        # An exchange owns its sessions. When it is gone, their packets are dropped.
        self._sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        # Sessions that have begun and not ended; the thread runs while there are any.
        self._active: weakref.WeakSet[Session] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def register(self, session: Session) -> None:
        """Accept packets of a session from now on."""
        with self.lock:
            self._sessions[session.number] = session

    def drop(self, session: Session) -> None:
        """Drop the packets of a session from now on."""
        with self.lock:
            self._sessions.pop(session.number, None)
            self._active.discard(session)

    def start(self, session: Session) -> None:
        """Read packets in a thread until the session is dropped."""
        with self.lock:
            self._active.add(session)
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="hvdx packets", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread, before the world is left."""
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(_JOIN_SECONDS)

    def send(self, session: Session, packets: Sequence[Packet]) -> None:
        """Start to send packets of a session."""
        with self.lock:
            for packet in packets:
                words, body = _pack(packet)
                to, numbers = session.members[packet.to], (session.number, packet.number, packet.seen)
                self._box.send(to, BOX, [packet.kind, *numbers, *words], body)
                session.count_sent(0 if body is None else body.size)

    def poll(self) -> int:
        """Take in the packets that have arrived, and announce places; return the number of packets.

        Raises:
            ExchangeError: if packets were lost; also one that the thread found.
        """
        with self.lock:
            if self._error is not None:
                raise self._error
            count, touched = 0, {}
            while (message := self._box.fetch()) is not None:
                count += 1
                session = self._sessions.get(message.header[1])
                if session is None:
                    continue  # of a session that an exception ended
                session.count_received(0 if message.body is None else message.body.size)
                session.replica.receive(session.members.index(message.sender), _unpack(message))
                touched[session.number] = session
            for session in touched.values():
                self.send(session, session.replica.announce())
            return count

    def is_whole(self, session: Session) -> bool:
        """Return whether all ranks of a session live."""
        return self._box.gone.isdisjoint(session.members)

    def has_others(self, session: Session) -> bool:
        """Return whether other sessions are active."""
        with self.lock:
            return any(other is not session for other in self._active)

    def pending_sends(self) -> int:
        """Return the number of sends in flight."""
        with self.lock:
            return self._box.pending_sends()

    def all_sent(self, limit: float) -> bool:
        """Wait until all packets have left; return False after the time limit.

        Args:
            limit: seconds.
        """
        return until(lambda: not self.pending_sends(), limit)

    def _run(self) -> None:
        polling = Polling()
        while not self._stop.is_set():
            try:
                count = self.poll()
            except BaseException as error:
                # The next poll of the main thread raises it.
                self._error = error
                return
            if count:
                polling.found()
                continue
            with self.lock:
                receiving = self._box.receiving
                if not self._active:
                    self._thread = None
                    return
            polling.sleep(receiving)


def _pack(packet: Packet) -> tuple[Sequence[int], np.ndarray | None]:
    """Return the numbers that follow the fixed part of a header, and the body."""
    payload = packet.payload
    if payload is None:
        return (), None
    if packet.kind == Kind.UPDATE:
        return payload.words, payload.body
    if packet.kind == Kind.ORDER:
        return (), np.array(payload, np.int32).view(np.uint8)
    return (), payload


def _unpack(message: Message) -> Packet:
    kind, _, number, seen, *words = message.header
    payload: object = message.body
    if message.body is not None and kind == Kind.UPDATE:
        payload = Payload(words, message.body)
    elif message.body is not None and kind == Kind.ORDER:
        payload = tuple(message.body.view(np.int32).tolist())
    return Packet(-1, Kind(kind), number, seen, payload)


_mailboxes: PerComm[SessionMailbox] = PerComm(SessionMailbox)
#: Function that returns the mailbox of a communicator; its first call makes it, and is collective.
session_mailbox_of = _mailboxes.of


@atexit.register
def stop_all() -> None:
    """End the threads, before the world is left."""
    for mailbox in _mailboxes.take_all():
        mailbox.stop()
