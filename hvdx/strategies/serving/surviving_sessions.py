"""Sessions with parameter servers that may die, while the workers that live go on."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeVar

import numpy as np

from hvdx.comm import Message
from hvdx.log import Log
from hvdx.strategies.base import refuse_several
from hvdx.strategies.serving.client import Call, Replace
from hvdx.strategies.serving.messages import MessageType
from hvdx.strategies.serving.worker_sessions import Shard, WorkerSessions, answered

_log = Log(__name__)

T = TypeVar("T")


class _ServerDiedError(Exception):
    """A server died while this worker opened a session there."""


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
