"""One order for the messages of all ranks: the protocol of the asynchronous exchange, as a state machine of one rank.

Each rank sends its messages to all others. One rank, the *sequencer*, also gives each message a place in one order, and
announces it. Every rank applies the messages in this order, its own included. So the weights of all ranks go through
the same values, to the bit, at different times. A flush ends the session: each rank waits until all messages of all
ranks have been applied.

The code reads no clock and sends no messages, so that tests can go through all orders of delivery. It relies on
mailboxes, in which the messages from one rank to another arrive in the order in which they were sent.

Sources: state machine replication, Schneider 1990, "Implementing fault-tolerant services using the state machine
approach"; a fixed sequencer, Défago et al. 2004, "Total order broadcast and multicast algorithms"; the bound, Ho et al.
2013, "More effective distributed ML via a stale synchronous parallel parameter server".
"""

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from hvdx.errors import ExchangeError

#: Rank that orders the messages.
SEQUENCER = 0
#: Messages of a rank that another rank may not have applied yet; the sender of more waits.
MOST_AHEAD = 64


class Kind(IntEnum):
    """Type of a packet.

    BEGIN: [has weights] from the sequencer: the session begins, with the weights in the payload, or with those of the
        last flush.
    UPDATE: [number of the sender's message, messages of the receiver that the sender has applied] the payload is None
        for a step that changes nothing.
    ORDER: [place of the first] from the sequencer: the payload lists the senders of the next messages in the order.
    SEEN: [messages of the receiver that the sender has applied].
    FLUSH: [messages of the sender] it sends no more in this session.
    """

    BEGIN = 1
    UPDATE = 2
    ORDER = 3
    SEEN = 4
    FLUSH = 5


class Packet(NamedTuple):
    """Unit that one rank sends to another: a message to be ordered, or a notice.

    Attributes:
        to: rank of the receiver.
        kind: type.
        number, seen: numbers of the type, see `Kind`.
        payload: see `Kind`.
    """

    to: int
    kind: Kind
    number: int
    seen: int = 0
    payload: Any = None


class Replica:
    """State of one rank in one session.

    Args:
        rank, size: rank, and number of ranks.
        most: limit of the messages in flight, see `MOST_AHEAD`.
        room: limit of their bytes; one message may exceed it.

    Attributes:
        sent: number of this rank's messages.
        begun: whether the sequencer has begun the session.
        applied: number of messages that this rank has applied, by sender.

    Example:
        >>> first, second = Replica(0, 2), Replica(1, 2)
        >>> packet, *_ = second.send("update")
        >>> first.receive(1, packet)
        >>> [order] = first.announce()
        >>> second.receive(0, order)
        >>> first.take(), second.take(), second.take()
        ((1, 'update'), (1, 'update'), None)
    """

    def __init__(self, rank: int, size: int, most: int = MOST_AHEAD, room: int = 1 << 62):
        self.rank, self.size, self._most, self._room = rank, size, most, room
        self.sent, self.begun, self._weights = 0, rank == SEQUENCER, None
        self._others = [r for r in range(size) if r != rank]
        self.applied = [0] * size
        # By sender: messages that are not applied yet; messages received; their total after a FLUSH.
        self._arrived: list[deque[Any]] = [deque() for _ in range(size)]
        self._received = [0] * size
        self._totals: list[int | None] = [None] * size
        # Senders of the next messages in the order, the place after the last of them, and those to be announced.
        self._order: deque[int] = deque()
        self._placed = 0
        self._news: list[int] = []
        # By rank: own messages that it has applied, and messages of it that it knows to be applied here.
        self._confirmed, self._told = [0] * size, [0] * size
        # Bytes of own messages that a rank may not have applied.
        self._unconfirmed: deque[int] = deque()

    # -- packets ------------------------------------------------------------------------------------------------------

    def begin(self, weights: Any) -> list[Packet]:
        """Begin the session, on the sequencer.

        Args:
            weights: payload for the other ranks; None if they have the weights.
        """
        return [Packet(r, Kind.BEGIN, int(weights is not None), payload=weights) for r in self._others]

    def send(self, payload: Any, size: int = 0) -> list[Packet]:
        """Send this rank's next message to all; `awaited_to_send` must be empty.

        Args:
            payload: the message; None for a step that changes nothing.
            size: its bytes.
        """
        packets = [Packet(r, Kind.UPDATE, self.sent, self._tell(r), payload) for r in self._others]
        self.sent += 1
        if self._others:
            self._unconfirmed.append(size)
        self._accept(self.rank, payload)
        return packets

    def announce(self) -> list[Packet]:
        """Announce the places given since the last call; empty on all ranks but the sequencer."""
        news, self._news = tuple(self._news), []
        return [Packet(r, Kind.ORDER, self._placed - len(news), payload=news) for r in self._others] if news else []

    def tell(self) -> list[Packet]:
        """Tell each rank how many of its messages were applied here, if it does not know."""
        behind = [r for r in self._others if self._told[r] < self.applied[r]]
        return [Packet(r, Kind.SEEN, self._tell(r)) for r in behind]

    def flush(self) -> list[Packet]:
        """Declare that this rank sends no more messages in this session; empty if it has done so."""
        if self._totals[self.rank] is not None:
            return []
        self._totals[self.rank] = self.sent
        return [Packet(r, Kind.FLUSH, self.sent) for r in self._others]

    def receive(self, sender: int, packet: Packet) -> None:
        """Take in a packet.

        Args:
            sender: rank of the sender.
            packet: the packet.

        Raises:
            ExchangeError: if packets of the sender were lost, or arrived twice.
        """
        _, kind, number, seen, payload = packet
        if kind == Kind.UPDATE:
            self._expect(sender, number, self._received[sender])
            self._confirm(sender, seen)
            self._accept(sender, payload)
        elif kind == Kind.ORDER:
            self._expect(sender, number, self._placed)
            self._order.extend(payload)
            self._placed += len(payload)
        elif kind == Kind.SEEN:
            self._confirm(sender, number)
        elif kind == Kind.FLUSH:
            self._totals[sender] = number
        else:
            self.begun, self._weights = True, payload

    def take_weights(self) -> Any:
        """Return the payload of BEGIN, once; None before it has come, and if there is none."""
        weights, self._weights = self._weights, None
        return weights

    # -- messages -----------------------------------------------------------------------------------------------------

    def take(self) -> tuple[int, Any] | None:
        """Return the next message in the order, with its sender, and count it as applied; None if it is not there."""
        if not self._order or not self._arrived[self._order[0]]:
            return None
        sender = self._order.popleft()
        self.applied[sender] += 1
        return sender, self._arrived[sender].popleft()

    # -- ranks that this rank waits for: it may go on when none is left -----------------------------------------------

    def awaited_to_send(self, size: int = 0) -> list[int]:
        """Return the ranks that must apply messages of this rank before it may send another.

        Args:
            size: bytes of the message to be sent.
        """
        full = bool(self._unconfirmed) and sum(self._unconfirmed) + size > self._room
        least = self.sent - len(self._unconfirmed) if full else self.sent - self._most
        return [r for r in self._others if self._confirmed[r] <= least]

    def awaited_to_end(self) -> list[int]:
        """Return the ranks that must flush, or whose messages must be applied here, before the session is over."""
        training = [r for r in self._others if self._totals[r] is None]
        return training or self._blocking([r for r in range(self.size) if self.applied[r] != self._totals[r]])

    # -- parts of the above -------------------------------------------------------------------------------------------

    def _accept(self, sender: int, payload: Any) -> None:
        self._received[sender] += 1
        self._arrived[sender].append(payload)
        if self.rank == SEQUENCER:
            self._order.append(sender)
            self._news.append(sender)
            self._placed += 1

    def _tell(self, rank: int) -> int:
        self._told[rank] = self.applied[rank]
        return self._told[rank]

    def _confirm(self, rank: int, applied: int) -> None:
        self._confirmed[rank] = max(self._confirmed[rank], applied)
        least = min(self._confirmed[r] for r in self._others)
        while self.sent - len(self._unconfirmed) < least:
            self._unconfirmed.popleft()

    def _blocking(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that must act before messages of the given ones can be applied."""
        unplaced = self._order[0] if self._order else SEQUENCER
        return sorted({r if self._received[r] == self.applied[r] else unplaced for r in ranks})

    def _expect(self, sender: int, number: int, expected: int) -> None:
        if number != expected:
            raise ExchangeError(
                f"rank {self.rank} expected message {expected} of rank {sender}, got {number}: the network lost or "
                "repeated a message. Start the job again."
            )
