"""Waiting and closing of a worker's client, and the end of a server."""

# Tests: hvdx/strategies/serving/server.py

import os
import threading
import time
from collections import deque

import numpy as np
import pytest

from hvdx.comm import progress
from hvdx.comm.local import virtual_world
from hvdx.errors import ExchangeError
from hvdx.strategies.serving import client
from hvdx.strategies.serving.client import ServerClient
from hvdx.strategies.serving.messages import SERVER_BOX, WORKER_BOX, MessageType, SessionConfig
from hvdx.strategies.serving.server import RequestHandler, serve
from tests.strategies.serving.messages import message, opening


class Box:
    """Mailbox that delivers the messages of a test, and reports what the test sets."""

    gone = frozenset()

    def __init__(self, receiving=(), pending=()):
        self.messages, self.sent, self.is_receiving, self.is_pending = deque(), [], list(receiving), list(pending)

    def send(self, to, box, header, body=None):
        self.sent.append((to, list(header)))

    def fetch(self):
        return self.messages.popleft() if self.messages else None

    def pending_sends(self):
        return self.is_pending.pop(0) if len(self.is_pending) > 1 else (self.is_pending or [0])[0]

    def all_sent(self):
        return not self.pending_sends()

    @property
    def receiving(self):
        return self.is_receiving.pop(0) if len(self.is_receiving) > 1 else (self.is_receiving or [False])[0]


@pytest.fixture
def clock(monkeypatch):
    """Clock that advances by a second with each sleep of the client, and not otherwise."""
    now = [0.0]
    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(client.Backoff, "sleep", lambda self, most=0.0: now.__setitem__(0, now[0] + 1.0))
    monkeypatch.setenv("HVDX_TIMEOUT", "5")
    return now


def client_with(box, workers=2, servers=1):
    made = ServerClient(virtual_world(workers, servers)[0])
    made._box = box
    return made


def answer(session):
    return message(2, [MessageType.WEIGHTS, session])


def push(*sessions):
    return [(2, [MessageType.PUSH, session], None) for session in sessions]


# -- waiting ----------------------------------------------------------------------------------------------------------


class Slow(Box):
    """Mailbox that delivers a message every few calls."""

    def __init__(self, messages, every):
        super().__init__()
        self.waiting, self.every, self.asked = deque(messages), every, 0

    def fetch(self):
        self.asked += 1
        return self.waiting.popleft() if self.asked % self.every == 0 and self.waiting else None


def test_each_answer_restarts_the_time_limit(clock):
    answers = client_with(Slow([answer(i) for i in range(4)], every=5)).call(push(0, 1, 2, 3), MessageType.WEIGHTS)
    assert sorted(answers) == [0, 1, 2, 3]
    assert clock[0] > 10


def test_wait_notices_do_not_extend_the_time_limit(clock):
    notices = [message(2, [MessageType.WAIT_NOTICE, 0], np.frombuffer(b"[1]", np.uint8)) for _ in range(50)]
    with pytest.raises(ExchangeError, match=r"waiting for 6 s; the servers wait for worker 1\b"):
        client_with(Slow(notices, every=3)).call(push(0), MessageType.WEIGHTS)


def test_an_answer_that_begins_to_arrive_restarts_the_time_limit(clock):
    box = Box(receiving=[*[False] * 7, True])
    with pytest.raises(ExchangeError, match="no answer from the server at rank 2"):
        client_with(box).call(push(0), MessageType.WEIGHTS)
    # Each poll reads `receiving` twice.
    assert 8 <= clock[0] <= 10


def test_slow_sends_restart_the_time_limit(clock):
    box = Box(pending=[n for n in range(3, 0, -1) for _ in range(4)] + [0])
    with pytest.raises(ExchangeError):
        client_with(box).call(push(0), MessageType.WEIGHTS)
    assert clock[0] > 12


def test_a_silent_server_is_an_error_after_the_time_limit(clock):
    with pytest.raises(ExchangeError, match=r"waiting for 6 s; no answer from the server at rank 2\b"):
        client_with(Box()).call(push(0), MessageType.WEIGHTS)


def test_messages_to_a_server_that_dies_are_replaced(clock):
    """Rank 2 dies before it answers session 1. Its answer to session 0 has come, and that of rank 0 comes later."""
    box, seen = Box(), []
    box.messages.append(answer(0))

    def replace(gone, answers):
        seen.append((set(gone), sorted(answers)))
        box.messages += [answer(7), answer(5)]
        return [(0, [MessageType.PUSH, 7], None)]

    class Dying(deque):
        def popleft(self):
            box.gone = frozenset({2})
            return super().popleft()

    box.messages = Dying(box.messages)
    calls = [*push(0, 1), (1, [MessageType.PUSH, 5], None)]
    answers = client_with(box, workers=3).call(calls, MessageType.WEIGHTS, replace)
    assert sorted(answers) == [0, 5, 7]
    assert seen == [({2}, [0])]
    assert [header[1] for _, header in box.sent] == [0, 1, 5, 7]


def test_an_answer_during_an_inner_call_reaches_the_outer_one(clock):
    """Rank 2 dies. While this rank opens session 7 elsewhere, the answer to session 5 arrives."""
    box = Box()
    made = client_with(box, workers=3)

    def replace(gone, answers):
        box.messages += [answer(5), message(0, [MessageType.READY, 7])]
        assert list(made.call([(0, [MessageType.LOAD, 7], None)], MessageType.READY)) == [7]
        return []

    box.gone = frozenset({2})
    calls = [*push(0), (1, [MessageType.PUSH, 5], None)]
    assert list(made.call(calls, MessageType.WEIGHTS, replace)) == [5]


def test_the_watchdog_sees_a_wait(clock):
    seen = []

    class Watched(Box):
        def fetch(self):
            seen.append((progress.busy(), progress.here().collective))
            return super().fetch()

    with pytest.raises(ExchangeError):
        client_with(Watched()).call(push(0), MessageType.WEIGHTS)
    assert set(seen) == {(True, "an exchange with the servers")}
    assert progress.here().collective == ""


# -- the end of a worker ----------------------------------------------------------------------------------------------


def test_answers_that_an_exception_left_are_fetched_before_the_end(clock):
    """A server cannot end before its messages are received."""
    box = Box()
    made = client_with(box)
    with pytest.raises(ExchangeError):
        made.call(push(7), MessageType.WEIGHTS)
    box.messages.append(answer(7))
    begin = clock[0]
    made.close()
    assert not box.messages
    assert clock[0] == begin
    assert box.sent[-1] == (2, [MessageType.DISCONNECT])


@pytest.mark.parametrize("kind", [MessageType.WEIGHTS, MessageType.WAIT_NOTICE])
def test_close_waits_briefly_for_outstanding_answers(clock, kind, monkeypatch):
    class Late(Box):
        def send(self, to, box, header, body=None):
            super().send(to, box, header, body)
            if header == [MessageType.DISCONNECT]:
                monkeypatch.setattr(client.Backoff, "sleep", self.sleep)

        def sleep(self, _=0.0):
            clock[0] += 0.25
            self.messages.append(message(2, [kind, 7]))

    made = client_with(Late())
    with pytest.raises(ExchangeError):
        made.call(push(7), MessageType.WEIGHTS)
    begin = clock[0]
    made.close()
    assert clock[0] - begin == (0.25 if kind == MessageType.WEIGHTS else client._LAST_ANSWERS_SECONDS)


def test_close_waits_for_arriving_messages_up_to_the_time_limit(clock):
    made = client_with(Box(receiving=[True] * 4 + [False]))
    made.close()
    assert clock[0] == 4
    stuck = client_with(Box(receiving=[True]))
    stuck.close()
    assert 9 <= clock[0] <= 11


def test_a_worker_that_ends_early_serves_until_the_others_have_ended(monkeypatch, capfd):
    monkeypatch.setenv("HVDX_TIMEOUT", "0.2")
    monkeypatch.setattr(client, "_QUIET_SECONDS", 0.1)
    first, second = virtual_world(2)
    made = ServerClient(first)
    made.register_servers([0])
    made.open_server()
    ending = threading.Thread(target=made.close, daemon=True)
    ending.start()
    ending.join(1.0)
    assert ending.is_alive(), "rank 1 still trains, although it has sent nothing for longer than the limit"
    second.mailbox(WORKER_BOX).send(0, SERVER_BOX, [MessageType.DISCONNECT])
    ending.join(5.0)
    assert not ending.is_alive()
    assert "hvdx: rank 0 has ended, and serves until ranks [1] have ended.\n" in capfd.readouterr().err


def test_a_worker_that_serves_others_ends_with_its_launcher(monkeypatch):
    first, _ = virtual_world(2)
    made, parent = ServerClient(first), [os.getppid()]
    monkeypatch.setattr(client.os, "getppid", lambda: parent[0])
    made.open_server()
    ending = threading.Thread(target=made.close, daemon=True)
    ending.start()
    ending.join(0.3)
    assert ending.is_alive()
    parent[0] = 1
    ending.join(5.0)
    assert not ending.is_alive()
    assert not made._thread.is_alive()


# -- the end of a server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["0.2", "0.6"])
def test_a_server_with_unreceived_messages_ends_after_the_time_limit(limit, monkeypatch):
    monkeypatch.setenv("HVDX_TIMEOUT", limit)
    box = Box(pending=[1])
    box.messages.append(message(0, [MessageType.DISCONNECT]))
    begin = time.monotonic()
    serving = threading.Thread(target=serve, args=(box, RequestHandler(1, threads=1)), daemon=True)
    serving.start()
    serving.join(5.0)
    assert not serving.is_alive()
    assert time.monotonic() - begin >= float(limit)


def test_a_server_has_no_time_limit_while_workers_are_connected(monkeypatch):
    monkeypatch.setenv("HVDX_TIMEOUT", "0.1")
    box, handler = Box(), RequestHandler(1, threads=1)
    serving = threading.Thread(target=serve, args=(box, handler), daemon=True)
    serving.start()
    serving.join(0.5)
    assert serving.is_alive()
    box.messages.append(message(0, [MessageType.DISCONNECT]))
    serving.join(5.0)
    assert not serving.is_alive()


def test_a_server_waits_for_no_worker_that_has_died():
    """One of two workers has flushed when the other dies."""
    box, config = Box(), SessionConfig(2, 1, max_staleness=0)
    box.messages += [message(0, *parts) for parts in opening(1, config, np.zeros(1, np.float32))]
    box.messages.append(message(0, [MessageType.FLUSH, 1]))
    serving = threading.Thread(target=serve, args=(box, RequestHandler(2, threads=1)), daemon=True)
    serving.start()
    serving.join(0.3)
    assert [header[0] for _, header in box.sent] == [MessageType.READY]
    box.gone = frozenset({1})
    serving.join(0.3)
    assert [(to, header[0]) for to, header in box.sent[1:]] == [(0, MessageType.FINAL)]
    box.messages.append(message(0, [MessageType.DISCONNECT]))
    serving.join(5.0)
    assert not serving.is_alive()


def test_a_server_that_begins_after_a_death_does_not_wait_for_the_dead(monkeypatch):
    comm = virtual_world(3)[0]
    monkeypatch.setattr(type(comm), "world_ranks", [0, 2, 4])
    made = ServerClient(comm)
    made.open_server()
    assert made._handler.present == {0, 2, 4}
    made._stop.set()
    made._thread.join(5.0)
    assert not made._thread.is_alive()
