"""A server: the answers to messages, and the loop that fetches messages and sends the answers.

The loop runs on a rank of its own, or in a thread of a worker.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from hvdx.comm import Mailbox, Message
from hvdx.comm.waiting import time_limit
from hvdx.errors import HvdxError, WireError
from hvdx.strategies.serving.messages import WORKER_BOX, MessageType, SessionConfig
from hvdx.strategies.serving.shard import Addend, Release, Shard
from hvdx.strategies.serving.update_codecs import decoder
from hvdx.strategies.sessions import Polling


class StepDispenser:
    """Dispenser of the steps of a round, which is an epoch. It hands out each step once, in the order of the requests.

    Example:
        >>> dispenser = StepDispenser()
        >>> [dispenser.ask(round_=1, steps=2) for _ in range(3)]
        [(True, 1, False), (True, 2, False), (False, 2, False)]
    """

    def __init__(self) -> None:
        self._round = self._handed_out = 0
        self._stopped = False

    def ask(self, round_: int, steps: int, stop: bool = False, known: int = 0) -> tuple[bool, int, bool]:
        """Request another step, or stop the round.

        Args:
            round_: number of the round. The first request with a higher number begins a new round.
            steps: number of steps in the round; the same in all requests.
            stop: end the round for all workers.
            known: number of steps that the worker knows to be handed out, by a dispenser before this one.

        Returns:
            Whether the step is granted, the number of steps handed out in the round, and whether the round was stopped.
        """
        if round_ > self._round:
            self._round, self._handed_out, self._stopped = round_, 0, False
        current = round_ == self._round
        if current:
            self._handed_out = max(self._handed_out, known)
        # A round without steps left is over, and cannot be stopped.
        self._stopped = self._stopped or (stop and current and self._handed_out < steps)
        granted = current and not self._stopped and self._handed_out < steps
        self._handed_out += granted
        return granted, self._handed_out, self._stopped


#: A message to send: rank of the receiver, header and body.
Answer = tuple[int, list[int], np.ndarray | None]

# Seconds of waiting between wait notices to a worker; at most this share of the time limit.
_WAIT_NOTICE_SECONDS = 5.0
_WAIT_NOTICE_SHARE = 0.25
# Seconds between checks for workers that have waited long.
_WAIT_NOTICE_EVERY = 1.0


@dataclass
class _Session:
    """Session at this server: the training on one shard of the weights.

    Attributes:
        config: configuration of the session.
        decode: decoder of its updates.
        shard: the shard; None until they are loaded.
        opened: time of OPEN, in seconds.
        working: seconds spent on updates.
        sent, received: bytes sent to and received from other ranks.
        pushed: time of each unanswered PUSH, by worker.
        asked: time of each unanswered message, or of the last wait notice about it, by worker.
    """

    config: SessionConfig
    decode: Callable[[np.ndarray, int], Addend | None]
    shard: Shard | None = None
    opened: float = 0.0
    working: float = 0.0
    sent: int = 0
    received: int = 0
    pushed: dict[int, float] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)


class RequestHandler:
    """Part of a server that turns each message into answers. It neither waits nor sends.

    Args:
        workers: number of workers.
        rank: rank of the server if it is a worker too, else -1; messages from this rank to itself are not counted as
            traffic.
        threads: threads of the codecs' kernels.
        clock: function that returns the time in seconds.

    Attributes:
        present: workers that have not disconnected.
    """

    def __init__(
        self,
        workers: int,
        rank: int = -1,
        threads: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.present = set(range(workers))
        self._rank, self._threads, self._clock = rank, threads, clock
        self._notice_after = min(_WAIT_NOTICE_SECONDS, _WAIT_NOTICE_SHARE * time_limit())
        self._sessions: dict[int, _Session] = {}
        # Traffic of closed sessions.
        self._traffic: dict[int, tuple[int, int]] = {}
        self._dispenser = StepDispenser()

    def handle(self, message: Message) -> list[Answer]:
        """Return the answers to a message.

        Returns:
            Messages to workers; an ERROR to the sender if its message was refused.
        """
        kind, number, *_ = message.header
        if kind == MessageType.STEP:
            round_, steps, stop, known = message.header[2:6]
            granted, handed_out, stopped = self._dispenser.ask(round_, steps, bool(stop), known)
            return [(message.sender, [MessageType.GRANT, number, int(granted), handed_out, int(stopped)], None)]
        if kind == MessageType.DISCONNECT:
            return self.leave(message.sender)
        try:
            return self._in_session(MessageType(kind), number, message)
        except (HvdxError, ValueError) as error:
            damaged = isinstance(error, WireError)
            # The worker knows whose message it was.
            text = np.frombuffer((error.problem if isinstance(error, WireError) else str(error)).encode(), np.uint8)
            return [(message.sender, [MessageType.ERROR, number, int(damaged)], text)]

    def wait_notices(self) -> list[Answer]:
        """Return messages that tell waiting workers which ranks they wait for."""
        now = self._clock()
        messages: list[Answer] = []
        for number, session in self._sessions.items():
            for worker, since in session.asked.items():
                awaited = session.shard.awaited_by(worker) if session.shard is not None else []
                if awaited and now - since > self._notice_after:
                    session.asked[worker] = now
                    messages.append(
                        (
                            worker,
                            [MessageType.WAIT_NOTICE, number],
                            np.frombuffer(json.dumps(awaited).encode(), np.uint8),
                        )
                    )
        return messages

    def traffic(self, number: int) -> tuple[int, int]:
        """Return the bytes that a session sent to other ranks, and received from them.

        Args:
            number: number of the session; the traffic of a closed session is returned once.
        """
        session = self._sessions.get(number)
        return (session.sent, session.received) if session else self._traffic.pop(number, (0, 0))

    def leave(self, worker: int) -> list[Answer]:
        """Return the messages to others after a worker has disconnected, or died: nobody waits for it any more."""
        self.present.discard(worker)
        messages: list[Answer] = []
        for number, session in self._sessions.items():
            if session.shard is not None:
                messages += self._released(number, session, session.shard.leave(worker))
        return messages

    def _in_session(self, kind: MessageType, number: int, message: Message) -> list[Answer]:
        if kind == MessageType.OPEN:
            assert message.body is not None
            config = SessionConfig.from_json(message.body.tobytes())
            self._sessions[number] = _Session(config, decoder(config, self._threads), opened=self._clock())
            return []
        if kind == MessageType.CLOSE:
            if number in self._sessions and self._rank >= 0:
                # The worker of this rank calls `traffic` later, in another thread.
                self._traffic[number] = self.traffic(number)
            self._sessions.pop(number, None)
            return []
        session = self._sessions.get(number)
        if session is None or (session.shard is None and kind != MessageType.LOAD):
            raise ValueError(f"session {number} is not open at this server: the ranks are in different fits.")
        if kind == MessageType.LOAD:
            session.shard = Shard(session.config, _weights(session.config, message.body))
            for gone in set(session.config.members) - self.present:
                session.shard.leave(gone)
            return [(message.sender, [MessageType.READY, number], None)]
        assert session.shard is not None
        session.asked[message.sender] = now = self._clock()
        if kind == MessageType.PUSH:
            version, finite, *_ = message.header[2:]
            newest = session.shard.version
            if not 0 <= version <= newest:
                raise ValueError(f"the update is of version {version}, and the weights are of version {newest}.")
            update = session.decode(message.body, message.sender) if finite and message.body is not None else None
            if message.body is not None and message.sender != self._rank:
                session.received += message.body.size
            session.pushed[message.sender] = now
            released = session.shard.push(message.sender, version, update)
        elif kind == MessageType.FLUSH:
            released = session.shard.flush(message.sender)
        else:
            raise ValueError(f"{kind.name} is not a message to a server.")
        session.working += self._clock() - now
        return self._released(number, session, released)

    def _released(self, number: int, session: _Session, released: list[Release]) -> list[Answer]:
        return list(self._messages(number, session, released)) if released else []

    def _messages(self, number: int, session: _Session, released: list[Release]) -> Iterator[Answer]:
        shard, now = session.shard, self._clock()
        assert shard is not None
        # A copy, shared by these messages: the next update may change the weights while they are in flight.
        body = shard.weights.astype(session.config.dtype).view(np.uint8)
        for release in released:
            session.asked.pop(release.worker, None)
            session.sent += body.size * (release.worker != self._rank)
            if release.final:
                counts = [shard.updates, shard.applied, shard.refused]
                times = [round(1e6 * session.working), round(1e6 * (now - session.opened))]
                yield release.worker, [MessageType.FINAL, number, shard.version, *counts, *times], body
            else:
                held = round(1e6 * (now - session.pushed.pop(release.worker)))
                header = [MessageType.WEIGHTS, number, shard.version, release.staleness, int(release.accepted), held]
                yield release.worker, header, body


def _weights(config: SessionConfig, body: np.ndarray | None) -> np.ndarray:
    expected = config.elements * np.dtype(config.dtype).itemsize
    if body is None or body.size != expected:
        raise ValueError(f"weights: expected {expected} bytes, got {0 if body is None else body.size}.")
    return body.view(config.dtype)


def serve(mailbox: Mailbox, handler: RequestHandler, stop: threading.Event | None = None) -> None:
    """Answer messages until all workers have disconnected, or died.

    Args:
        mailbox: mailbox of the server.
        handler: source of the answers.
        stop: event that ends the loop early.
    """
    polling, next_notices, limit = Polling(), 0.0, time_limit()
    while (handler.present or not mailbox.all_sent()) and not (stop is not None and stop.is_set()):
        message = mailbox.fetch()
        if message is None:
            if not handler.present and polling.idle > limit:
                return  # the workers have left, and will not receive the messages that are still in flight
            polling.sleep(mailbox.receiving)
            messages = []
        else:
            polling.found()
            messages = handler.handle(message)
        for worker in sorted(handler.present & mailbox.gone):
            messages = [*messages, *handler.leave(worker)]
        if time.monotonic() > next_notices:
            messages = [*messages, *handler.wait_notices()]
            next_notices = time.monotonic() + _WAIT_NOTICE_EVERY
        for to, header, body in messages:
            mailbox.send(to, WORKER_BOX, header, body)


def serve_in_thread(mailbox: Mailbox, handler: RequestHandler, stop: threading.Event) -> None:
    """Run `serve` as the target of a thread; an error ends the job."""
    try:
        serve(mailbox, handler, stop)
    except BaseException as error:
        # hvdx' exception hook ends the job: otherwise the other ranks would wait for this server.
        sys.excepthook(type(error), error, error.__traceback__)
        raise
