"""Where a rank's messages come in and go out: its worker's box, and its server, in a thread or as all that it does."""

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from hvdx.comm import Comm, Mailbox, Message, progress
from hvdx.comm.launcher import kernel_threads
from hvdx.comm.waiting import LIMIT_VARIABLE, Backoff, time_limit
from hvdx.errors import ExchangeError, HvdxError, WireError
from hvdx.strategies.serving.messages import SERVER_BOX, WORKER_BOX, MessageType
from hvdx.strategies.serving.request_handler import RequestHandler

#: A message to a server: its rank, header and body.
Call = tuple[int, list[int], np.ndarray | None]

# Messages on their way out at once, headers and bodies: with one alone, each would wait for the next one's handshake.
_WINDOW = 3
# Between two looks for messages while a part of one is on its way, and while nothing is.
_BUSY_SLEEP, _IDLE_SLEEP = 1e-4, 1e-3
# After so long without a message a server looks for one this rarely: where it is a thread, each look interrupts what
# the worker does in Python, and tracing a model beside a server took many times as long.
_NAP_AFTER, _NAP = 0.5, 0.02
# Between two looks at who has been waiting for long.
_WAIT_NOTICE_EVERY = 1.0
# Seconds after which a worker says for whom it waits.
_WARN_SECONDS = 60.0
# How long a rank whose training is over serves the others before it says so.
_QUIET_SECONDS = 10.0
# How long a rank that leaves waits for answers that an exception kept it from waiting for; a server that knows by then
# that it leaves sends none.
_LAST_ANSWERS_SECONDS = 1.0


def serve(mailbox: Mailbox, handler: RequestHandler, stop: threading.Event | None = None) -> None:
    """Answer messages until all workers have said good-bye.

    Args:
        mailbox: the box of a server.
        handler: knows the answers.
        stop: ends it before.
    """
    backoff, next_notices, last, limit = Backoff(), 0.0, time.monotonic(), time_limit()
    while (handler.present or not mailbox.left()) and not (stop is not None and stop.is_set()):
        message = mailbox.fetch()
        if message is None:
            if not handler.present and time.monotonic() - last > limit:
                return  # those who left do not take what is still on its way to them
            if time.monotonic() - last > _NAP_AFTER and not mailbox.coming:
                time.sleep(_NAP)
            backoff.sleep(_BUSY_SLEEP if mailbox.coming else _IDLE_SLEEP)
            messages = []
        else:
            backoff.renew()
            last = time.monotonic()
            messages = handler.handle(message)
        if time.monotonic() > next_notices:
            messages = [*messages, *handler.wait_notices()]
            next_notices = time.monotonic() + _WAIT_NOTICE_EVERY
        for to, header, body in messages:
            mailbox.send(to, WORKER_BOX, header, body)


class Receiver(Protocol):
    """Has a place for the bodies of a session's messages."""

    def place(self, session: int, kind: MessageType, size: int) -> np.ndarray | None:
        """Give the place of a body of so many bytes; None leaves it to the mailbox."""


class ServerClient:
    """A worker's messages to servers, and its own server where it has one.

    Args:
        comm: the workers. Collective, the first time.

    Attributes:
        exchanges: by the number of their session: what they are sent goes where they want it.
        series: of numbers for sessions, one for each exchange; so many were given out.
        round: epochs whose steps were dealt out, alike on all workers.
    """

    def __init__(self, comm: Comm):
        self._comm = comm
        self.exchanges: weakref.WeakValueDictionary[int, Receiver] = weakref.WeakValueDictionary()
        self._box = comm.mailbox(WORKER_BOX, self._place)
        self.round = self.series = 0
        self._known: set[int] = set()
        # Sessions that worker 0 has begun, and this one has not.
        self._ready: set[int] = set()
        # Sessions in which a message was sent and no answer has come.
        self._unanswered: set[int] = set()
        self._handler: RequestHandler | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._closed = False

    def open_server(self) -> None:
        """Serve in a thread beside the training; once it does, nothing happens."""
        if self._thread is None:
            rank, threads = self._comm.rank, kernel_threads(self._comm.local_size)
            self._handler = RequestHandler(self._comm.size, rank, threads)
            arguments = (self._comm.mailbox(SERVER_BOX), self._handler, self._stop)
            self._thread = threading.Thread(target=_serve_or_die, args=arguments, name="hvdx server", daemon=True)
            self._thread.start()

    def register_servers(self, servers: Iterable[int]) -> None:
        """Take leave of these servers in the end, whether they were sent a message or not."""
        self._known |= set(servers)

    def send(self, to: int, header: Sequence[int], body: np.ndarray | None = None) -> None:
        """Send a message to a server; its body must not change until the server has answered."""
        self._known.add(to)
        self._box.send(to, SERVER_BOX, header, body)

    def call(self, messages: Sequence[Call], kind: MessageType) -> dict[int, Message]:
        """Send messages, each of another session, and wait until all are answered.

        They leave a few at a time, so that the first are answered while the others are on their way.

        Args:
            messages: to which server, header and body; the body must not change until it is answered.
            kind: of the answers.

        Returns:
            The answers by their session.

        Raises:
            ExchangeError: for as long as the time limit nothing moved; it names for whom they wait, where that is
                known.
            WireError, HvdxError: a server did not accept what it was sent.
        """
        return self._wait(deque(messages), {header[1]: to for to, header, _ in messages}, kind, {})

    def pass_on_ready(self, session: int) -> None:
        """Tell the other workers, on worker 0, that a session has begun."""
        for worker in range(1, self._comm.size):
            self._box.send(worker, WORKER_BOX, [MessageType.READY, session])

    def await_ready(self, session: int) -> None:
        """Wait until worker 0 says that a session has begun; it may have said so long ago.

        Raises:
            ExchangeError: it did not within the time limit.
        """
        if session not in self._ready:
            self._wait(deque(), {session: 0}, MessageType.READY, {0: [0]})
        self._ready.discard(session)

    def _wait(
        self, to_send: deque[Call], servers: dict[int, int], kind: MessageType, awaited: dict[int, list[int]]
    ) -> dict[int, Message]:
        """Await answers where the watchdog sees it."""
        progress.enter("an exchange with the servers", for_all=False)
        try:
            return self._await(to_send, servers, kind, awaited)
        finally:
            progress.leave()

    def _await(
        self, to_send: deque[Call], servers: dict[int, int], kind: MessageType, awaited: dict[int, list[int]]
    ) -> dict[int, Message]:
        """See `call`.

        Args:
            to_send: messages.
            servers: who answers, by session.
            kind: of the answers.
            awaited: workers for whom a server waits, as far as that is known.
        """
        answers: dict[int, Message] = {}
        stillness, limit, backoff, warned = _Stillness(self._box), time_limit(), Backoff(), False
        while len(answers) < len(servers):
            while to_send and self._box.leaving() < _WINDOW:
                self._unanswered.add(to_send[0][1][1])
                self.send(*to_send.popleft())
            message = self._box.fetch()
            if message is None:
                waited = stillness.seconds(len(answers))
                if waited > limit:
                    silent = {server for session, server in servers.items() if session not in answers}
                    raise ExchangeError(self._overdue(waited, sorted(silent), awaited))
                if waited > _WARN_SECONDS and awaited and not warned:
                    warned = True
                    print(f"hvdx: {self._overdue(waited, [], awaited)}", file=sys.stderr, flush=True)
                backoff.sleep(_BUSY_SLEEP if self._box.coming else _IDLE_SLEEP)
                continue
            backoff.renew()
            self._note_answer(message)
            if message.header[1] not in servers:
                if message.header[0] == MessageType.READY:
                    self._ready.add(message.header[1])
                continue  # of a session that an exception ended
            if message.header[0] == MessageType.ERROR:
                assert message.body is not None
                text, damaged = message.body.tobytes().decode(errors="replace"), message.header[2]
                where = f"the server at rank {message.sender} did not accept what rank {self._comm.rank} sent"
                raise (WireError if damaged else HvdxError)(f"{where}: {text}")
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
        """Bytes that this rank's own server sent to other ranks, and received from them, in a session."""
        return self._handler.traffic(session) if self._handler is not None else (0, 0)

    def disconnect(self) -> None:
        """Nobody needs to wait for this worker any more."""
        if not self._closed:
            self._closed = True
            everywhere = range(self._comm.size, self._comm.size + self._comm.servers)
            for server in self._known | set(everywhere):
                self._box.send(server, SERVER_BOX, [MessageType.DISCONNECT])

    def close(self) -> None:
        """Say good-bye, and serve until the other workers have done so, or the launcher has ended."""
        self.disconnect()
        begin, limit, backoff, told, launcher = time.monotonic(), time_limit(), Backoff(), False, os.getppid()
        while True:
            # What nobody takes would keep its server from ending.
            while (message := self._box.fetch()) is not None:
                self._note_answer(message)
            waited = time.monotonic() - begin
            if self._thread is not None and self._thread.is_alive():
                # As long as others train they need what is served here, and may say nothing for longer than any limit.
                if os.getppid() != launcher:
                    break
            elif waited > limit or not (
                self._box.coming or (self._unanswered and waited < min(limit, _LAST_ANSWERS_SECONDS))
            ):
                break
            if waited > _QUIET_SECONDS and not told and self._handler is not None:
                told = True
                others = sorted(self._handler.present)
                print(
                    f"hvdx: rank {self._comm.rank} has ended, and serves until ranks {others} have.",
                    file=sys.stderr,
                    flush=True,
                )
            backoff.sleep()
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_QUIET_SECONDS)

    def _place(self, sender: int, header: tuple[int, ...], size: int) -> np.ndarray | None:
        exchange = self.exchanges.get(header[1])
        return exchange.place(header[1], MessageType(header[0]), size) if exchange is not None else None

    def _overdue(self, waited: float, silent: Sequence[int], awaited: dict[int, list[int]]) -> str:
        text = f"rank {self._comm.rank} has been waiting for {waited:.0f} s"
        named = sorted({worker for workers in awaited.values() for worker in workers})
        if named:
            text += f"; the servers wait for worker{'s' * (len(named) > 1)} {', '.join(map(str, named))}"
        lost = [s for s in silent if s not in awaited]
        if lost:
            text += f"; no word from the server{'s' * (len(lost) > 1)} at rank {', '.join(map(str, lost))}"
        return f"{text}. Look for what they printed last. {LIMIT_VARIABLE}=seconds changes how long ranks wait."


class _Stillness:
    """How long nothing has moved in a box: no message has left, or come to be accepted, and none has begun to come.

    News are no movement: they say that the servers wait as well.
    """

    def __init__(self, box: Mailbox):
        self._box, self._seen, self._since = box, (-1, -1), 0.0
        # Since when a part of a message is here.
        self._coming: float | None = None

    def seconds(self, accepted: int) -> float:
        """Asked while no message is there, now that so many were accepted."""
        now, seen = time.monotonic(), (accepted, self._box.leaving())
        if seen != self._seen:
            self._seen, self._since = seen, now
        if not self._box.coming:
            self._coming = None
        elif self._coming is None:
            self._coming = now
        return now - max(self._since, self._coming or 0.0)


def _serve_or_die(mailbox: Mailbox, handler: RequestHandler, stop: threading.Event) -> None:
    try:
        serve(mailbox, handler, stop)
    except BaseException as error:
        # Ends the job, where ranks are processes: the others would wait for ever.
        sys.excepthook(type(error), error, error.__traceback__)
        raise


_clients: "weakref.WeakKeyDictionary[Comm, ServerClient]" = weakref.WeakKeyDictionary()


def client_of(comm: Comm) -> ServerClient:
    """The client of a worker, opened when it is first asked for. Collective.

    Args:
        comm: the workers.
    """
    if comm not in _clients:
        _clients[comm] = ServerClient(comm)
    return _clients[comm]


@atexit.register
def close_all() -> None:
    """Take leave of all servers, before the world is left."""
    clients = list(_clients.values())
    for client in clients:
        client.disconnect()
    for client in clients:
        client.close()
    _clients.clear()
