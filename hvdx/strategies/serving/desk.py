"""What a server answers to each letter: all of a server but its waiting and sending."""

import json
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdx.comm import Letter
from hvdx.comm.waiting import time_limit
from hvdx.errors import HvdxError, WireError
from hvdx.strategies.serving.messages import Kind, Plan
from hvdx.strategies.serving.shard import Addend, Release, Shard
from hvdx.strategies.serving.turnstile import Turnstile
from hvdx.strategies.serving.updates import decoder

#: A letter that is to be sent: to which rank, its head and its body.
Answer = tuple[int, list[int], np.ndarray | None]

# Seconds that a worker waits before it hears for whom, and again; at most a part of the time that it waits at all.
_NEWS_SECONDS = 5.0
_NEWS_SHARE = 0.25


@dataclass
class _Session:
    """A list of variables at this server.

    Attributes:
        pushed: when workers pushed that have not been answered.
        asked: when workers sent what has not been answered, or when they last heard why.
        working: seconds spent on updates.
    """

    plan: Plan
    decode: Callable[[np.ndarray, int], Addend | None]
    shard: Shard | None = None
    opened: float = 0.0
    working: float = 0.0
    sent: int = 0
    received: int = 0
    pushed: dict[int, float] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)


class Desk:
    """Answers letters.

    Args:
        workers: how many there are.
        rank: of the server, if it is one of the workers as well: what they say to themselves is no traffic.
        threads: of the codecs' kernels.
        clock: seconds, from anywhere.

    Attributes:
        present: workers that have not said good-bye.
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
        self._news_after = min(_NEWS_SECONDS, _NEWS_SHARE * time_limit())
        self._sessions: dict[int, _Session] = {}
        # Of sessions that are over.
        self._traffic: dict[int, tuple[int, int]] = {}
        self._turnstile = Turnstile()
        self._last = clock()

    @property
    def idle(self) -> float:
        """Seconds since a letter came."""
        return self._clock() - self._last

    def handle(self, letter: Letter) -> list[Answer]:
        """What to send, now that this letter has come.

        Args:
            letter: from a worker.

        Returns:
            Letters to workers; an ERROR to the sender where its letter was not accepted.
        """
        kind, number, *_ = letter.head
        self._last = self._clock()
        if kind == Kind.TICKET:
            round_, tickets, stop = letter.head[2:5]
            granted, given, stopped = self._turnstile.ask(round_, tickets, bool(stop))
            return [(letter.sender, [Kind.ANSWER, number, int(granted), given, int(stopped)], None)]
        if kind == Kind.BYE:
            return self._bye(letter.sender)
        try:
            return self._in_session(Kind(kind), number, letter)
        except (HvdxError, ValueError) as error:
            text = np.frombuffer(str(error).encode(), np.uint8)
            return [(letter.sender, [Kind.ERROR, number, int(isinstance(error, WireError))], text)]

    def news(self) -> list[Answer]:
        """Letters to workers that have been waiting, about those for whom they are."""
        now = self._clock()
        letters: list[Answer] = []
        for number, session in self._sessions.items():
            for worker, since in session.asked.items():
                awaited = session.shard.awaited_by(worker) if session.shard is not None else []
                if awaited and now - since > self._news_after:
                    session.asked[worker] = now
                    letters.append((worker, [Kind.NEWS, number], np.frombuffer(json.dumps(awaited).encode(), np.uint8)))
        return letters

    def traffic(self, number: int) -> tuple[int, int]:
        """Bytes that a session's letters brought to, and took from, other ranks.

        Args:
            number: the session; one that is over is told of once.
        """
        session = self._sessions.get(number)
        return (session.sent, session.received) if session else self._traffic.pop(number, (0, 0))

    def _bye(self, worker: int) -> list[Answer]:
        self.present.discard(worker)
        letters: list[Answer] = []
        for number, session in self._sessions.items():
            if session.shard is not None:
                letters += self._released(number, session, session.shard.leave(worker))
        return letters

    def _in_session(self, kind: Kind, number: int, letter: Letter) -> list[Answer]:
        if kind == Kind.OPEN:
            assert letter.body is not None
            # From a rank of this very job, which runs the same user's code.
            plan = pickle.loads(letter.body.tobytes())
            self._sessions[number] = _Session(plan, decoder(plan, self._threads), opened=self._clock())
            return []
        if kind == Kind.CLOSE:
            if number in self._sessions and self._rank >= 0:
                # This rank's worker asks for it later, in another thread.
                self._traffic[number] = self.traffic(number)
            self._sessions.pop(number, None)
            return []
        session = self._sessions.get(number)
        if session is None or (session.shard is None and kind != Kind.LOAD):
            raise ValueError(f"session {number} is not open at this server: the ranks are in different fits.")
        if kind == Kind.LOAD:
            session.shard = Shard(session.plan, _weights(session.plan, letter.body))
            for gone in set(range(session.plan.workers)) - self.present:
                session.shard.leave(gone)
            return [(letter.sender, [Kind.READY, number], None)]
        assert session.shard is not None
        session.asked[letter.sender] = now = self._clock()
        if kind == Kind.PUSH:
            version, fine, *_ = letter.head[2:]
            newest = session.shard.version
            if not 0 <= version <= newest:
                raise ValueError(f"the update is of version {version}, and the weights are of version {newest}.")
            update = session.decode(letter.body, letter.sender) if fine and letter.body is not None else None
            if letter.body is not None and letter.sender != self._rank:
                session.received += letter.body.size
            session.pushed[letter.sender] = now
            released = session.shard.push(letter.sender, version, update)
        elif kind == Kind.FLUSH:
            released = session.shard.flush(letter.sender)
        else:
            raise ValueError(f"{kind.name} is no letter to a server.")
        session.working += self._clock() - now
        return self._released(number, session, released)

    def _released(self, number: int, session: _Session, released: list[Release]) -> list[Answer]:
        return list(self._letters(number, session, released)) if released else []

    def _letters(self, number: int, session: _Session, released: list[Release]) -> Iterator[Answer]:
        shard, now = session.shard, self._clock()
        assert shard is not None
        # One copy for all who go on now: the next update changes the weights while these are on their way.
        body = shard.weights.astype(session.plan.dtype).view(np.uint8)
        for release in released:
            session.asked.pop(release.worker, None)
            session.sent += body.size * (release.worker != self._rank)
            if release.final:
                counts = [shard.updates, shard.applied, shard.refused]
                times = [round(1e6 * session.working), round(1e6 * (now - session.opened))]
                yield release.worker, [Kind.FINAL, number, shard.version, *counts, *times], body
            else:
                held = round(1e6 * (now - session.pushed.pop(release.worker)))
                head = [Kind.WEIGHTS, number, shard.version, release.staleness, int(release.fine), held]
                yield release.worker, head, body


def _weights(plan: Plan, body: Any) -> np.ndarray:
    expected = plan.elements * np.dtype(plan.dtype).itemsize
    if body is None or body.size != expected:
        raise ValueError(f"weights: expected {expected} bytes, got {0 if body is None else body.size}.")
    return body.view(plan.dtype)
