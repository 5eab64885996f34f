"""Worker's side: messages to the servers, the thread of the worker's own server, and requests for the next step.

The next step of an epoch goes to the worker that requests it first.
"""

import atexit
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Protocol

import numpy as np

from hvdx.comm import Comm, Mailbox, Message, waiting
from hvdx.comm.launcher import kernel_threads
from hvdx.comm.waiting import LIMIT_VARIABLE, Backoff
from hvdx.errors import ExchangeError, HvdxError, WireError
from hvdx.log import Log
from hvdx.strategies.serving.messages import SERVER_BOX, WORKER_BOX, MessageType
from hvdx.strategies.serving.server import RequestHandler, serve_in_thread
from hvdx.strategies.sessions import PerComm, Polling, Series

_log = Log(__name__)

#: Message to a server: rank of the server, header and body.
Call = tuple[int, list[int], np.ndarray | None]
#: Function of the ranks that have died, and of the answers so far, by session. It is called when more have died, and at
#: first if any have; it returns the messages that replace those to the dead. It may raise an error.
Replace = Callable[[Set[int], Mapping[int, Message]], Sequence[Call]]

# Largest number of sends in flight, headers and bodies. If it were 1, each send would wait for the previous handshake.
_WINDOW = 3
# Seconds of waiting after which a worker prints the workers that it waits for.
_WARN_SECONDS = 60.0
# Seconds after which a rank whose training is over prints that it still serves the others.
_QUIET_SECONDS = 10.0
# Seconds that a rank waits at its end for answers to calls that an exception interrupted. They may never come, because
# a server that has handled the disconnection sends none.
_LAST_ANSWERS_SECONDS = 1.0


class Receiver(Protocol):
    """Owner of the arrays that receive the bodies of a session's messages."""

    def buffer_for(self, session: int, kind: MessageType, size: int) -> np.ndarray | None:
        """Return the array for a body of `size` bytes; None leaves it to the mailbox."""


class ServerClient:
    """Worker's messages to servers, and the worker's own server if it has one.

    The first client of a communicator opens mailboxes, so all workers must create it together.

    Attributes:
        exchanges: exchange of each session, by session number; it provides the arrays for received bodies.
        series: numbers of sessions.
        round: number of the last round; a round is an epoch whose steps the first server hands out.
    """

    def __init__(self, comm: Comm):
        self._comm, self._rank = comm, comm.world_ranks[comm.rank]
        self.exchanges: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()
        self._box = comm.mailbox(WORKER_BOX, self._buffer_for)
        self.round, self.series = 0, Series()
        self._servers: set[int] = set()
        # Sessions that another worker has opened, and this worker has not begun.
        self._ready: set[int] = set()
        # Sessions with an unanswered message.
        self._unanswered: set[int] = set()
        # Depth of calls, since `Replace` may call, too; and messages to the outer call that came during the inner one.
        self._depth, self._aside = 0, deque[Message]()
        self._handler: RequestHandler | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._closed = False

    def agree_on_round(self) -> None:
        """Continue with the last round of any worker: an exception may have ended a fit before some began an epoch."""
        self.round = max(self._comm.all_gather_object(self.round, "the round"))

    def begin_round(self) -> None:
        """Begin the next round."""
        self.round += 1

    def open_server(self) -> None:
        """Start this worker's server in a thread, if it is not running."""
        if self._thread is None:
            threads = kernel_threads(self._comm.local_size)
            living = self._comm.world_ranks
            self._handler = RequestHandler(max(living) + 1, self._rank, threads)
            for dead in set(range(max(living))) - set(living):
                self._handler.leave(dead)
            arguments = (self._comm.mailbox(SERVER_BOX), self._handler, self._stop)
            self._thread = threading.Thread(target=serve_in_thread, args=arguments, name="hvdx server", daemon=True)
            self._thread.start()

    def register_servers(self, servers: Iterable[int]) -> None:
        """Add servers to disconnect from at the end, even if no message is sent to them."""
        self._servers |= set(servers)

    def send(self, to: int, header: Sequence[int], body: np.ndarray | None = None) -> None:
        """Send a message to a server. Its body must not change until the server has answered."""
        self._servers.add(to)
        self._box.send(to, SERVER_BOX, header, body)

    @property
    def gone(self) -> Set[int]:
        """Ranks that have died."""
        return self._box.gone

    def call(self, messages: Sequence[Call], kind: MessageType, replace: Replace | None = None) -> dict[int, Message]:
        """Send messages, each of a different session, and wait for all answers.

        A few messages leave at a time, so that the first answers arrive while other messages are in flight.

        Args:
            messages: server, header and body of each message; a body must not change until its message is answered.
            kind: type of the answers.
            replace: see `Replace`; None if no rank dies alone.

        Returns:
            The answers by session; none of sessions at ranks that have died, unless they came before.

        Raises:
            ExchangeError: if nothing moved within the time limit; it names the workers that the servers wait for, if
                known.
            WireError, HvdxError: if a server refused a message.
        """
        servers = {header[1]: to for to, header, _ in messages}
        return self._wait_for_answers(deque(messages), servers, kind, {}, replace)

    def pass_on_ready(self, session: int, workers: Iterable[int]) -> None:
        """Tell the other workers of a session that it is open."""
        for worker in workers:
            self._box.send(worker, WORKER_BOX, [MessageType.READY, session])

    def await_ready(self, session: int, first: int) -> None:
        """Wait for the message that a session is open. The message may have arrived earlier.

        Args:
            session: number of the session.
            first: rank of its first worker, which sends the message.

        Raises:
            ExchangeError: if it did not come within the time limit.
        """
        if session not in self._ready:
            self._wait_for_answers(deque(), {session: first}, MessageType.READY, {first: [first]})
        self._ready.discard(session)

    def _wait_for_answers(
        self,
        to_send: deque[Call],
        servers: dict[int, int],
        kind: MessageType,
        awaited: dict[int, list[int]],
        replace: Replace | None = None,
    ) -> dict[int, Message]:
        """Send messages and return their answers; register the wait for reports of a stall."""
        self._depth += 1
        try:
            with waiting.recorded("an exchange with the servers", for_all=False):
                return self._receive_answers(to_send, servers, kind, awaited, replace)
        finally:
            self._depth -= 1

    def _receive_answers(
        self,
        to_send: deque[Call],
        servers: dict[int, int],
        kind: MessageType,
        awaited: dict[int, list[int]],
        replace: Replace | None,
    ) -> dict[int, Message]:
        """Send messages and return their answers by session.

        Args:
            to_send: messages.
            servers: rank that answers, by session.
            kind: type of the answers.
            awaited: workers that each server waits for, if known.
            replace: see `call`.
        """
        answers: dict[int, Message] = {}
        idle, limit, polling, warned = _IdleTimer(self._box), self._comm.patience, Polling(), False
        gone: Set[int] = frozenset()
        while servers.keys() - answers.keys():
            if replace is not None and self._box.gone != gone:
                gone = self._box.gone
                calls = replace(gone, answers)
                for session in [session for session, to in servers.items() if to in gone and session not in answers]:
                    del servers[session]
                    self._unanswered.discard(session)
                servers |= {header[1]: to for to, header, _ in calls}
                to_send = deque([*(call for call in to_send if call[0] not in gone), *calls])
                continue
            while to_send and self._box.pending_sends() < _WINDOW:
                self._unanswered.add(to_send[0][1][1])
                self.send(*to_send.popleft())
            message = self._aside.popleft() if self._aside and self._depth == 1 else self._box.fetch()
            if message is None:
                waited = idle.seconds(len(answers))
                if waited > limit:
                    silent = {server for session, server in servers.items() if session not in answers}
                    raise ExchangeError(self._report_wait(waited, sorted(silent), awaited))
                if waited > _WARN_SECONDS and awaited and not warned:
                    warned = True
                    _log.warning(self._report_wait(waited, [], awaited))
                polling.sleep(self._box.receiving, naps=False)
                continue
            polling.found()
            self._note_answer(message)
            if message.header[1] not in servers:
                if message.header[0] == MessageType.READY:
                    self._ready.add(message.header[1])
                elif self._depth > 1:
                    self._aside.append(message)
                continue  # an exception ended the session of any other message
            if message.header[0] == MessageType.ERROR:
                assert message.body is not None
                text, damaged = message.body.tobytes().decode(errors="replace"), message.header[2]
                refused = WireError(text, self._comm.rank, f"the server at rank {message.sender} refused a message")
                raise refused if damaged else HvdxError(str(refused))
            if message.header[0] == MessageType.WAIT_NOTICE:
                assert message.body is not None
                awaited[message.sender] = json.loads(message.body.tobytes())
            elif message.header[0] == kind:
                answers[message.header[1]] = message
        return answers

    def _note_answer(self, message: Message) -> None:
        if message.header[0] != MessageType.WAIT_NOTICE:
            self._unanswered.discard(message.header[1])

    def traffic(self, session: int) -> tuple[int, int]:
        """Return the bytes that this rank's own server sent to and received from other ranks in a session."""
        return self._handler.traffic(session) if self._handler is not None else (0, 0)

    def disconnect(self) -> None:
        """Tell all servers that this worker sends no more messages."""
        if not self._closed:
            self._closed = True
            others = self._comm.world_ranks if self._comm.survives else ()  # any of these may have become a server
            for server in self._servers | {*self._comm.server_numbers, *others}:
                self._box.send(server, SERVER_BOX, [MessageType.DISCONNECT])

    def close(self) -> None:
        """Disconnect, and serve until the other workers have disconnected or the launcher has ended."""
        self.disconnect()
        begin, limit, backoff = time.monotonic(), self._comm.patience, Backoff()
        reported, launcher = False, os.getppid()
        while True:
            # A server ends only when all its messages have been fetched.
            while (message := self._box.fetch()) is not None:
                self._note_answer(message)
            waited = time.monotonic() - begin
            if self._thread is not None and self._thread.is_alive():
                # Workers that still train need this server, and may send nothing for longer than the time limit.
                if os.getppid() != launcher:
                    break
            elif waited > limit or not (
                self._box.receiving or (self._unanswered and waited < min(limit, _LAST_ANSWERS_SECONDS))
            ):
                break
            if waited > _QUIET_SECONDS and not reported and self._handler is not None:
                reported = True
                others = sorted(self._handler.present)
                _log.info(f"rank {self._rank} has ended, and serves until ranks {others} have ended.")
            backoff.sleep()
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_QUIET_SECONDS)

    def _buffer_for(self, sender: int, header: tuple[int, ...], size: int) -> np.ndarray | None:
        exchange = self.exchanges.get(header[1])
        return exchange.buffer_for(header[1], MessageType(header[0]), size) if exchange is not None else None

    def _report_wait(self, waited: float, silent: Sequence[int], awaited: dict[int, list[int]]) -> str:
        text = f"rank {self._rank} has been waiting for {waited:.0f} s"
        named = sorted({worker for workers in awaited.values() for worker in workers})
        if named:
            text += f"; the servers wait for worker{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
        lost = [s for s in silent if s not in awaited]
        if lost:
            text += f"; no answer from the server{'s' * (len(lost) > 1)} at rank {', '.join(map(str, lost))}"
        return f"{text}. Check their last output. {LIMIT_VARIABLE}=seconds sets the time limit."


class _IdleTimer:
    """Time without movement in a mailbox: no message has left or been accepted, and none has begun to arrive.

    Wait notices are not counted as movement, because they report that the servers wait as well.
    """

    def __init__(self, box: Mailbox):
        self._box, self._seen, self._since = box, (-1, -1), 0.0
        # Time at which a message began to arrive; None if no message is arriving.
        self._receiving_since: float | None = None

    def seconds(self, accepted: int) -> float:
        """Return the seconds without movement. Call it while no message is there."""
        now, seen = time.monotonic(), (accepted, self._box.pending_sends())
        if seen != self._seen:
            self._seen, self._since = seen, now
        if not self._box.receiving:
            self._receiving_since = None
        elif self._receiving_since is None:
            self._receiving_since = now
        return now - max(self._since, self._receiving_since or 0.0)


_clients: PerComm[ServerClient] = PerComm(ServerClient)
#: Function that returns the client of a worker; its first call with a communicator makes it, and is collective.
client_of = _clients.of


@atexit.register
def close_all() -> None:
    """Disconnect from all servers, before the world is left."""
    clients = _clients.take_all()
    for client in clients:
        client.disconnect()
    for client in clients:
        client.close()


class StepClient:
    """Client that requests the steps of an epoch from the first server. Creating it is collective.

    Workers that split layers take their steps together. So the first worker of each group requests them, each for all
    workers of its group. The counts are steps of workers, whether they form groups or not.

    Args:
        comm: the workers.
        server: number in mailboxes of the first server.
        steps: steps in an epoch, of all workers together; each worker takes its first step without a request.
        begun: steps of the first epoch that were taken before this fit. If fewer than `comm.size` are left, each worker
            takes one nevertheless.

    Attributes:
        taken: steps of this epoch that workers had taken or begun at this worker's last request.
        over: whether this worker's last request was refused, so that the epoch is over for it.
        stopped: whether a worker ended the epoch early.
    """

    def __init__(self, comm: Comm, server: int, steps: int, begun: int = 0):
        self._comm, self._group = comm, None if comm.mesh is None else comm.mesh.group
        self._together = 1 if self._group is None else self._group.size
        # From here on a group counts as one worker.
        self._workers, self._steps = comm.size // self._together, steps // self._together
        self.steps, self.taken, self.over, self.stopped = self._steps * self._together, 0, False, False
        self._before, self._begun = 0, begun // self._together
        self._client, self._server = client_of(comm), server
        self._client.register_servers([self._server])
        self._client.agree_on_round()
        # Any worker may take the place of a server that dies.
        if comm.survives or comm.world_ranks[comm.rank] == self._server:
            self._client.open_server()
        self._handed_out = 0

    def begin(self) -> None:
        """Begin an epoch, on all workers."""
        self._client.begin_round()
        # That of all ranks since their last exchange.
        self._workers = self._comm.size // self._together
        self._before, self._begun, self._handed_out = self._begun, 0, 0
        self.taken, self.over, self.stopped = self._before * self._together, False, False

    def request_step(self, stop: bool = False) -> bool:
        """Request another step; return whether this worker may take it. Collective in a group of workers.

        Args:
            stop: end the epoch for all workers.

        Raises:
            ExchangeError: if there was no answer within the time limit.
        """
        if self._group is None:
            granted, handed_out, stopped = self._ask(stop)
        else:
            stop = self._group.any_true(stop)
            mine = self._ask(stop) if self._group.rank == 0 else None
            answer = self._group.all_gather_object(mine, "the next step")[0]
            assert answer is not None  # that of rank 0, which asked
            granted, handed_out, stopped = answer
        self.taken = (self._before + self._workers + handed_out) * self._together
        self.over, self.stopped = not granted, stopped
        return granted

    def _ask(self, stop: bool) -> tuple[bool, int, bool]:
        """Return whether a step is granted, the number of steps handed out, and whether the epoch was stopped."""
        session = -1
        # The first step of each worker needs no request. If fewer steps than workers remain, none is left to request.
        left = max(self._steps - self._before - self._workers, 0)
        header = [MessageType.STEP, session, self._client.round, left, int(stop), self._handed_out]

        def ask_next(gone: Set[int], answers: Mapping[int, Message]) -> list[Call]:
            """Ask the next worker if the server has died."""
            if self._server not in gone:
                return []
            self._server = next(rank for rank in self._comm.world_ranks if rank not in gone)
            return [(self._server, header, None)]

        replace = ask_next if self._comm.survives else None
        answer = self._client.call([(self._server, header, None)], MessageType.GRANT, replace)[session]
        granted, self._handed_out, stopped = answer.header[2:5]
        return bool(granted), self._handed_out, bool(stopped)
