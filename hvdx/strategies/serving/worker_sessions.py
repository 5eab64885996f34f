"""Sessions of a worker with the parameter servers: each holds a shard of the flat weights at one server."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from hvdx.comm import Comm, Message
from hvdx.log import Log
from hvdx.strategies.contract import refuse_several
from hvdx.strategies.serving.client import Call, Replace, client_of
from hvdx.strategies.serving.messages import MessageType, SessionConfig, cut

_log = Log(__name__)

T = TypeVar("T")


class _ServerDiedError(Exception):
    """A server died while this worker opened a session there."""


#: Bytes of a header on the wire.
HEADER_BYTES = 88
# Smallest size in bytes of a shard, and largest number of shards of a server. Each shard is a session of its own: while
# one shard is pushed, the answer for the previous shard arrives, so that a link is busy in both directions.
_MIN_SHARD_BYTES, _MAX_SHARDS = 1 << 19, 4

#: Function of the bytes sent and received, without headers, in a message to another rank and its answer.
Count = Callable[[int, int], None]


class Options(Protocol):
    """Options of the sessions; see `hvdx.strategies.ParameterServer`."""

    codec: str

    def server_ranks(self, comm: Comm) -> list[int]:
        """Return the numbers in mailboxes of the ranks that serve."""

    def config(self, workers: int, elements: int, dtype: str, group: int, ranks: Sequence[int]) -> SessionConfig:
        """Return the configuration of a session."""


@dataclass
class Shard:
    """Shard of the flat weights, at one server.

    Attributes:
        server: rank of the server.
        begin, end: bounds of the shard in the flat weights.
        session: number of its session; -1 while it is closed.
        version: version of the weights that were pulled last.
    """

    server: int
    begin: int
    end: int
    session: int = -1
    version: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    def of(self, flat: np.ndarray) -> np.ndarray:
        """Return this shard of a flat array."""
        return flat[self.begin : self.end]

    def open(self, session: int) -> None:
        """Begin a session, with the first version of the weights."""
        self.session, self.version = session, 0

    def close(self) -> None:
        """End the session."""
        self.session = -1

    def move(self, server: int) -> None:
        """Let the next session be at another server."""
        self.server = server

    def receive(self, version: int) -> None:
        """Note the version of the weights that were pulled."""
        self.version = version


def shards_of_server(size: int) -> int:
    """Return the number of shards into which the weights at a server are divided.

    Args:
        size: bytes of the weights at the server.

    Example:
        >>> shards_of_server(1000), shards_of_server(10_000_000)
        (1, 4)
    """
    return max(1, min(_MAX_SHARDS, size // _MIN_SHARD_BYTES))


def _make_shards(servers: Sequence[int], elements: int, itemsize: int) -> list[Shard]:
    """Return shards of equal size, the same number for each server. Consecutive shards are at different servers."""
    times = shards_of_server(elements * itemsize // len(servers))
    return [Shard(servers[i % len(servers)], *bounds) for i, bounds in enumerate(cut(elements, times * len(servers)))]


class WorkerSessions:
    """Sessions of one list of variables of one worker, one for each shard. Collective.

    Args:
        strategy: options, the same on all workers.
        comm: the workers of the sessions, which may be a part of all workers.
        elements, dtype: number and type of the weights.
        count: see `Count`; it is called for each message to another rank.

    Attributes:
        shards: the shards, which are the same on all workers.
        weights: flat array of the weights that were pulled last.
        rank: rank of this worker in the world.
        next_session: first number of the next sessions.
    """

    def __init__(self, strategy: Options, comm: Comm, elements: int, dtype: np.dtype, count: Count):
        self._strategy, self._comm, self._count = strategy, comm, count
        # The client and the numbers of sessions are those of all workers.
        self._everyone = comm if comm.parent is None else comm.parent
        self._client = client_of(self._everyone)
        self.rank = self._everyone.world_ranks[self._everyone.rank]
        self.shards = _make_shards(strategy.server_ranks(comm), elements, dtype.itemsize)
        self.weights = np.zeros(elements, dtype)
        if self._serves():
            self._client.open_server()
        self._client.register_servers(shard.server for shard in self.shards)
        self.next_session = 0
        # Number of workers with which the sessions began.
        self._workers = comm.size
        self.renew()

    def _serves(self) -> bool:
        """Return whether this worker has a server."""
        return any(shard.server == self.rank for shard in self.shards)

    @property
    def is_open(self) -> bool:
        """True if the servers hold weights for these sessions."""
        return self.shards[0].session >= 0

    @property
    def _ranks(self) -> tuple[int, ...]:
        """Ranks of the workers of these sessions."""
        return tuple(self._comm.world_ranks)

    def renew(self) -> None:
        """Close the sessions, and agree on numbers for the next ones. Collective."""
        self.close()
        self.next_session = self._client.series.agree(self._everyone, self._ranks)

    def open(self) -> None:
        """Open a session for each shard; worker 0 loads its weights. Collective.

        Raises:
            ExchangeError: if worker 0 or a server did not answer within the time limit.
        """
        self._workers = self._comm.size
        first = self._number(self.shards)
        # No worker may push before all servers are ready.
        if self._comm.rank == 0:
            self._load(self.shards)
            self._client.pass_on_ready(first, self._ranks[1:])
        else:
            self._client.await_ready(first, self._ranks[0])

    def _number(self, shards: Sequence[Shard]) -> int:
        """Give shards new sessions; return the number of the first."""
        first = self.next_session
        self.next_session += len(shards)
        for session, shard in enumerate(shards, first):
            self._client.exchanges.pop(shard.session, None)
            shard.open(session)
            self._client.exchanges[session] = self
        return first

    def _load(self, shards: Sequence[Shard], replace: Replace | None = None) -> None:
        """Load this worker's weights into the servers of shards."""
        messages = []
        for shard in shards:
            group, weights = self._everyone.size // self._comm.size, shard.of(self.weights)
            config = self._strategy.config(self._workers, weights.size, weights.dtype.name, group, self._ranks)
            body = np.frombuffer(config.to_json(), np.uint8)
            self._client.send(shard.server, [MessageType.OPEN, shard.session], body)
            messages.append((shard.server, [MessageType.LOAD, shard.session], weights.view(np.uint8)))
            self.count(shard, body.size + weights.nbytes, 0)
        self._client.call(messages, MessageType.READY, replace)

    def close(self) -> None:
        """Close the sessions, so that the servers delete the weights."""
        if not self.is_open:
            return
        for shard in self.shards:
            if self._comm.rank == 0:
                self._client.send(shard.server, [MessageType.CLOSE, shard.session])
            self._client.exchanges.pop(shard.session, None)
            shard.close()

    def buffer_for(self, session: int, kind: MessageType, size: int) -> np.ndarray | None:
        """Return the array for the body of a server's message: weights are received in place."""
        for shard in self.shards:
            if shard.session == session and kind in (MessageType.WEIGHTS, MessageType.FINAL):
                target = shard.of(self.weights).view(np.uint8)
                return target if target.size == size else None
        return None

    def push(self, calls: Sequence[Call]) -> dict[int, Message]:
        """Send the updates of a step to the servers; return the answers by session.

        Args:
            calls: the messages.

        Raises:
            ExchangeError: if a server did not answer within the time limit.
            WireError: if a server could not decode the update.
        """
        return self._client.call(calls, MessageType.WEIGHTS)

    def receive(self, shard: Shard, answer: Message) -> None:
        """Take the weights of a shard from an answer; `buffer_for` has put them in their place."""
        shard.receive(answer.header[2])

    def flush(self) -> dict[int, Message]:
        """Tell all servers that this worker has flushed; return the answers by session. Collective."""
        return self._client.call(self.flush_calls(self.shards), MessageType.FINAL)

    def flush_calls(self, shards: Sequence[Shard]) -> list[Call]:
        """Return the messages that tell the servers of shards that this worker has flushed."""
        for shard in shards:
            self.count(shard, 0, shard.of(self.weights).nbytes)
        return [(shard.server, [MessageType.FLUSH, shard.session], None) for shard in shards]

    def count(self, shard: Shard, sent: int, received: int) -> None:
        """Count a message of a shard and its answer, unless this worker serves it.

        Args:
            shard: the shard.
            sent, received: bytes of both without their headers.
        """
        if shard.server != self.rank:
            self._count(sent + HEADER_BYTES, received + HEADER_BYTES)

    def count_served(self) -> None:
        """Count what this worker's own server exchanged with the other ranks in these sessions."""
        for shard in self.shards:
            self._count(*self._client.traffic(shard.session))


def answered(shards: Sequence[Shard], answers: Mapping[int, Message]) -> list[tuple[Shard, Message]]:
    """Return the shards whose sessions have an answer, with it. Others have moved to another server meanwhile."""
    return [(shard, answers[shard.session]) for shard in shards if shard.session in answers]


class SurvivingSessions(WorkerSessions):
    """Sessions whose shards move to another server, or to a worker, when their server dies; see `WorkerSessions`.

    Collective.
    """

    # Numbers of ranks that only serve, and of which all workers know that they have died.
    _dead: frozenset[int] = frozenset()

    def _serves(self) -> bool:
        return True  # any worker may take the place of a server that dies

    def open(self) -> None:
        self._workers = self._comm.size
        others = any(other is not self for other in self._client.exchanges.values())
        refuse_several(others, "parameter_server")
        self._open_together(self.shards)

    def _open_together(self, shards: Sequence[Shard]) -> None:
        """Open sessions at servers that live, with the weights of the first worker. Collective."""

        def stop(gone: Set[int], answers: Mapping[int, Message]) -> Sequence[Call]:
            if any(shard.server in gone for shard in shards):
                raise _ServerDiedError
            return []

        is_open = False
        while not is_open:
            world, alive = list(self._comm.world_ranks), self._alive()
            living = [shard.server for shard in self.shards if shard.server in alive] or world
            for number, shard in enumerate(shards):
                if shard.session >= 0 and self._comm.rank == 0:
                    self._client.send(shard.server, [MessageType.CLOSE, shard.session])
                if shard.server not in alive:
                    shard.move(living[number % len(living)])
            self._number(shards)
            mine = self._comm.rank == 0
            if mine:
                try:
                    self._load(shards, stop)
                except _ServerDiedError:
                    mine = False
            # No worker may push before all servers are ready. If the first worker has died, another one begins again.
            opened = self._gather(mine, "opening the servers")
            needed = {world[0], *(shard.server for shard in shards)}
            is_open = any(opened) and needed <= self._alive()

    def _alive(self) -> set[int]:
        """Return the numbers of the workers and servers that live, the same on all workers."""
        return {*self._comm.world_ranks, *self._comm.server_numbers} - self._dead

    def _gather(self, value: T, what: str) -> list[T]:
        """Return a value of each worker, after which all know of the servers that one of them has seen die."""
        answers = self._comm.all_gather_object((value, self._client.gone), what)
        self._dead = self._dead.union(*(gone for _, gone in answers)).intersection(self._comm.server_numbers)
        return [theirs for theirs, _ in answers]

    def _rescue(self) -> list[Shard]:
        """Move the shards of servers that have died to others; return these shards. Collective.

        They go on with the weights of the worker that pulled the newest version.
        """
        moved = set[int]()
        while True:
            versions = self._gather([shard.version for shard in self.shards], "the servers that live")
            world, alive = list(self._comm.world_ranks), self._alive()
            lost = [i for i, shard in enumerate(self.shards) if shard.server not in alive]
            if not lost:
                return [self.shards[i] for i in sorted(moved)]
            for i in lost:
                shard, newest = self.shards[i], max(theirs[i] for theirs in versions)
                source = world[[theirs[i] for theirs in versions].index(newest)]
                now = self._comm.world_ranks
                part = shard.of(self.weights)
                (values,) = self._comm.broadcast([part], now.index(source) if source in now else 0, "a shard")
                part[:] = np.asarray(values)
                if self._comm.rank == 0:
                    _log.warning(
                        f"the server at rank {shard.server} has died. Its {part.size / self.weights.size:.0%} of the "
                        f"weights go on as rank {source} pulled them after {newest} updates; later ones are lost."
                    )
            moved.update(lost)
            self._open_together([self.shards[i] for i in lost])

    def _replacing(self, again: Callable[[list[Shard]], list[Call]]) -> Replace:
        """Return the function that moves the shards of servers that die while this worker waits for answers.

        Args:
            again: function from these shards to messages for their new servers.
        """

        def replace(gone: Set[int], answers: Mapping[int, Message]) -> list[Call]:
            if not any(shard.server in gone for shard in self.shards):
                return []
            self._receive_all(answers)
            return again(self._rescue())

        return replace

    def push(self, calls: Sequence[Call]) -> dict[int, Message]:
        return self._client.call(calls, MessageType.WEIGHTS, self._replacing(lambda moved: []))

    def buffer_for(self, session: int, kind: MessageType, size: int) -> np.ndarray | None:
        return None  # the server may die before a whole body has come

    def receive(self, shard: Shard, answer: Message) -> None:
        super().receive(shard, answer)
        assert answer.body is not None
        shard.of(self.weights).view(np.uint8)[:] = answer.body

    def _receive_all(self, answers: Mapping[int, Message]) -> None:
        for shard, answer in answered(self.shards, answers):
            self.receive(shard, answer)

    def flush(self) -> dict[int, Message]:
        answers, calls = dict[int, Message](), self.flush_calls(self.shards)
        while calls:
            answers |= self._client.call(calls, MessageType.FINAL, self._replacing(self.flush_calls))
            self._receive_all(answers)
            # A server may have died after it answered some of the workers.
            calls = self.flush_calls(self._rescue())
        return answers
