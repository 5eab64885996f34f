"""Answers of a server to each message."""

# Tests: hvdx/strategies/serving/messages.py

import dataclasses
import json
import os
import pickle

import numpy as np
import pytest

from hvdx.strategies.serving.messages import MessageType, SessionConfig
from hvdx.strategies.serving.server import RequestHandler
from tests.strategies.serving.messages import message, opening


class Talk:
    """Handler, its clock, and messages to it; answers are (worker, kind, rest of the header, body)."""

    def __init__(self, workers=2, rank=-1):
        self.now = 100.0
        self.handler = RequestHandler(workers, rank, threads=1, clock=lambda: self.now)

    def __call__(self, sender, kind, *words, body=None, session=0):
        answers = self.handler.handle(message(sender, [kind, session, *words], body))
        return [(to, MessageType(header[0]), tuple(header[2:]), data) for to, header, data in answers]

    def open(self, config, weights=None, session=0):
        weights = np.zeros(config.elements, config.dtype) if weights is None else weights
        for header, body in opening(session, config, weights):
            answers = self(0, header[0], body=body, session=session)
        return answers

    def push(self, sender, values, version=0, session=0, dtype=np.float32):
        return self(sender, MessageType.PUSH, version, 1, body=np.array(values, dtype), session=session)

    def weights(self, session=0):
        """Return the weights, from the answer to a PUSH without an update."""
        ((_, kind, _, body),) = self(0, MessageType.PUSH, 0, 0, session=session)
        assert kind == MessageType.WEIGHTS
        return body.view(np.float32).tolist()


def is_error(answers, *parts, damaged=0):
    ((_, kind, words, body),) = answers
    assert kind == MessageType.ERROR
    assert words[0] == damaged
    for part in parts:
        assert part in body.tobytes().decode()
    return True


def test_a_session_opens_with_the_weights_and_answers_a_push_with_weights():
    talk = Talk()
    ((to, kind, _, body),) = talk.open(SessionConfig(2, 3), np.array([1, 2, 3], np.float32))
    assert (to, kind, body) == (0, MessageType.READY, None)
    talk.now += 1
    ((to, kind, words, body),) = talk.push(1, [10, 20, 30])
    assert (to, kind, words) == (1, MessageType.WEIGHTS, (1, 1, 1, 0))
    assert body.dtype == np.uint8
    assert body.view(np.float32).tolist() == [11, 22, 33]


@pytest.mark.parametrize(
    "config",
    [
        SessionConfig(2, 3),
        SessionConfig(3, 7, "float64", "threshold", 2, 1 / 3, 0.1, 4, (1, 2, 5)),
    ],
)
def test_a_configuration_is_the_same_after_its_message(config):
    assert SessionConfig.from_json(config.to_json()) == config


def test_a_message_that_is_no_configuration_is_refused_and_nothing_in_it_runs(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    good = dataclasses.asdict(SessionConfig(2, 3))
    for wrong in ({"workers": "2"}, {"elements": True}, {"ranks": [0.5]}, {"dtype": None}, {"more": 1}):
        is_error(
            Talk()(0, MessageType.OPEN, body=np.frombuffer(json.dumps(good | wrong).encode(), np.uint8)),
            "OPEN",
            damaged=1,
        )
    for body in (pickle.dumps(Hostile()), b"", b"[1]", b"\xff"):
        is_error(
            Talk()(0, MessageType.OPEN, body=np.frombuffer(body, np.uint8)), "expected the configuration", damaged=1
        )
    assert not (tmp_path / "ran").exists()


def test_updates_below_the_last_bit_of_a_weight_are_not_lost():
    workers, rounds, start = 64, 200, np.array([1.5, -0.3, 1e-3, 700.0])
    talk = Talk(workers)
    talk.open(SessionConfig(workers, start.size, share=1 / workers), start.astype(np.float32))
    weights = start.astype(np.float32)
    for _ in range(rounds):
        for worker in range(workers):
            ((*_, body),) = talk.push(worker, np.float32(1e-6) * weights)
            weights = body.view(np.float32)
    alone = start * (1 + 1e-6) ** rounds
    np.testing.assert_allclose(weights - start, alone - start, rtol=0.01)


@pytest.mark.parametrize("rule", [{}, {"aggregate": 2}], ids=str)
def test_weights_are_rounded_once(rule):
    talk = Talk()
    talk.open(SessionConfig(2, 1, share=0.5, **rule), np.array([2.0**24], np.float32))
    for _ in range(2):
        talk.push(0, [1.0])
        talk.push(1, [1.0])
    assert talk.weights() == [2.0**24 + 2]


def test_a_session_is_ready_only_when_its_weights_are_loaded():
    talk = Talk()
    (header, body), _ = opening(0, SessionConfig(2, 3), np.zeros(3, np.float32))
    assert talk(0, header[0], body=body) == []
    assert is_error(talk.push(1, [1, 2, 3]), "session 0 is not open", "different fits")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_later_updates_do_not_change_an_answer(dtype):
    talk = Talk()
    talk.open(SessionConfig(2, 1, dtype))
    ((*_, first),) = talk.push(0, [1], dtype=dtype)
    talk.push(1, [1], dtype=dtype)
    assert first.view(dtype).tolist() == [1]


def test_answers_hold_the_time_that_a_worker_was_held_back():
    talk = Talk()
    talk.open(SessionConfig(2, 1, max_staleness=0))
    assert talk.push(0, [1]) == []
    talk.now += 0.25
    answers = talk.push(1, [2])
    assert [(to, words[-1]) for to, _, words, _ in answers] == [(0, 250_000), (1, 0)]
    assert all(body.view(np.float32).tolist() == [3] for *_, body in answers)


def test_final_message_counts_updates_and_time():
    talk = Talk()
    talk.open(SessionConfig(2, 1))
    talk.push(0, [1])
    talk(1, MessageType.PUSH, 0, 0)
    talk.now += 2
    assert talk(0, MessageType.FLUSH) == []
    answers = talk(1, MessageType.FLUSH)
    assert [(to, kind) for to, kind, *_ in answers] == [(0, MessageType.FINAL), (1, MessageType.FINAL)]
    for *_, words, body in answers:
        assert words == (1, 1, 1, 1, 0, 2_000_000)
        assert body.view(np.float32).tolist() == [1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_with_nan_is_refused_counted_and_not_applied(value):
    talk = Talk()
    talk.open(SessionConfig(2, 2), np.array([1, 2], np.float32))
    ((_, kind, words, body),) = talk.push(0, [value, 5])
    assert (kind, words[:3]) == (MessageType.WEIGHTS, (0, 1, 0))
    assert body.view(np.float32).tolist() == [1, 2]
    talk(0, MessageType.FLUSH)
    assert talk(1, MessageType.FLUSH)[0][2][:4] == (0, 0, 0, 1)


def test_the_body_of_an_update_that_is_not_finite_is_not_read():
    talk = Talk()
    talk.open(SessionConfig(2, 2))
    ((_, _, words, _),) = talk(0, MessageType.PUSH, 0, 0, body=np.ones(2, np.float32))
    assert words[2] == 0
    assert talk.weights() == [0, 0]


def test_messages_to_a_closed_session_are_answered_with_an_error():
    talk = Talk()
    assert is_error(talk.push(1, [1]), "session 0 is not open")
    assert is_error(talk(1, MessageType.FLUSH), "session 0 is not open")
    assert is_error(talk(0, MessageType.LOAD, body=np.zeros(1)), "session 0 is not open")
    talk.open(SessionConfig(2, 1))
    assert is_error(talk.push(1, [1], session=1), "session 1 is not open")
    assert talk(0, MessageType.CLOSE) == []
    assert is_error(talk.push(1, [1]), "session 0 is not open")
    assert talk(0, MessageType.CLOSE) == []


def test_a_session_may_be_restarted():
    talk = Talk()
    talk.open(SessionConfig(2, 1), np.array([7], np.float32))
    talk.push(0, [1])
    talk.open(SessionConfig(2, 2), np.array([3, 4], np.float32))
    assert talk.weights() == [3, 4]
    talk(0, MessageType.CLOSE)
    talk.open(SessionConfig(2, 1), np.array([5], np.float32))
    assert talk.weights() == [5]


def test_sessions_are_independent():
    talk = Talk()
    talk.open(SessionConfig(2, 1, max_staleness=0), session=0)
    talk.open(SessionConfig(2, 2), session=4)
    assert talk.push(0, [1]) == []
    talk.push(0, [5, 6], session=4)
    talk(0, MessageType.CLOSE, session=4)
    assert [to for to, *_ in talk.push(1, [1])] == [0, 1]


def test_damaged_and_wrong_updates_are_answered_and_not_applied():
    talk = Talk()
    talk.open(SessionConfig(2, 2))
    assert is_error(talk.push(1, [1, 2, 3]), "expected 8 bytes, got 12", damaged=1)
    assert talk.weights() == [0, 0]
    # The update did not count as a step: that worker may send it again.
    assert talk.push(1, [1, 2])[0][1] == MessageType.WEIGHTS
    talk.open(SessionConfig(2, 2, codec="fp16"))
    assert is_error(talk.push(1, [1, 2]), "not an hvdx message", damaged=1)
    assert talk.weights() == [0, 0]


def test_weights_of_another_size_are_answered_with_an_error():
    talk = Talk()
    assert is_error(talk.open(SessionConfig(2, 3), np.zeros(2, np.float32)), "expected 12 bytes, got 8")
    (header, body), _ = opening(0, SessionConfig(2, 3), np.zeros(3, np.float32))
    talk(0, header[0], body=body)
    assert is_error(talk(0, MessageType.LOAD), "expected 12 bytes, got 0")


def test_updates_of_a_future_version_are_answered_with_an_error():
    talk = Talk()
    talk.open(SessionConfig(2, 1, staleness_exponent=1.0))
    assert is_error(talk.push(0, [1], version=1), "version 1,", "version 0.")
    assert is_error(talk.push(0, [1], version=-1), "version -1")
    assert talk.weights() == [0]


@pytest.mark.parametrize(
    "kind", [MessageType.READY, MessageType.WEIGHTS, MessageType.FINAL, MessageType.ERROR, 0, 8, 99, -1]
)
def test_messages_that_are_not_for_a_server_are_answered_with_an_error(kind):
    talk = Talk()
    talk.open(SessionConfig(2, 1))
    assert is_error(talk(1, kind))


def test_empty_parts_are_served():
    talk = Talk()
    talk.open(SessionConfig(2, 0))
    ((_, kind, _, body),) = talk.push(0, [])
    assert (kind, body.size) == (MessageType.WEIGHTS, 0)


def test_steps_need_no_session():
    talk = Talk()
    assert [talk(w, MessageType.STEP, 1, 2)[0] for w in (0, 1, 0)] == [
        (0, MessageType.GRANT, (1, 1, 0), None),
        (1, MessageType.GRANT, (1, 2, 0), None),
        (0, MessageType.GRANT, (0, 2, 0), None),
    ]


def test_a_disconnection_releases_others_in_every_session():
    talk = Talk(workers=3)
    for session in (0, 1):
        talk.open(SessionConfig(3, 1, max_staleness=0), session=session)
        assert talk.push(0, [1], session=session) == []
        assert talk.push(1, [1], session=session) == []
    talk.handler.handle(message(0, *opening(2, SessionConfig(3, 1), np.zeros(1))[0]))  # no weights yet
    assert talk.handler.present == {0, 1, 2}
    assert [(to, kind) for to, kind, *_ in talk(2, MessageType.DISCONNECT)] == [
        (0, MessageType.WEIGHTS),
        (1, MessageType.WEIGHTS),
    ] * 2
    assert talk.handler.present == {0, 1}
    talk(0, MessageType.DISCONNECT)
    talk(1, MessageType.DISCONNECT)
    assert talk.handler.present == set()


def test_a_disconnection_ends_a_flush_that_waited_for_that_worker():
    talk = Talk()
    talk.open(SessionConfig(2, 1))
    assert talk(0, MessageType.FLUSH) == []
    assert [(to, kind) for to, kind, *_ in talk(1, MessageType.DISCONNECT)] == [(0, MessageType.FINAL)]


def test_a_long_wait_is_answered_with_repeated_wait_notices(monkeypatch):
    monkeypatch.delenv("HVDX_TIMEOUT", raising=False)
    talk = Talk(workers=3)
    talk.open(SessionConfig(3, 1, max_staleness=0))
    talk.push(0, [1])
    talk.now += 4.9
    talk.push(2, [1])
    assert talk.handler.wait_notices() == []
    talk.now += 0.2
    ((to, header, body),) = talk.handler.wait_notices()
    assert (to, header) == (0, [MessageType.WAIT_NOTICE, 0])
    assert json.loads(body.tobytes()) == [1]
    assert talk.handler.wait_notices() == []
    talk.now += 5.1
    assert [to for to, *_ in talk.handler.wait_notices()] == [0, 2]
    talk.push(1, [1])
    talk.now += 100
    assert talk.handler.wait_notices() == []
    talk(1, MessageType.FLUSH)
    talk.now += 5.1
    ((to, _, body),) = talk.handler.wait_notices()
    assert (to, json.loads(body.tobytes())) == (1, [0, 2])


def test_wait_notices_come_before_the_time_limit(monkeypatch):
    monkeypatch.setenv("HVDX_TIMEOUT", "2")
    talk = Talk()
    talk.open(SessionConfig(2, 1, max_staleness=0))
    talk.push(0, [1])
    talk.now += 0.6
    assert [to for to, *_ in talk.handler.wait_notices()] == [0]


def test_an_error_ends_the_wait_notices():
    talk = Talk()
    talk.open(SessionConfig(2, 1, max_staleness=0))
    talk.push(0, [1, 2])
    talk.now += 100
    assert talk.handler.wait_notices() == []


def test_traffic_excludes_messages_of_a_rank_to_itself():
    talk = Talk(rank=0)
    talk.open(SessionConfig(2, 3))
    talk.push(0, [1, 2, 3])
    assert talk.handler.traffic(0) == (0, 0)
    talk.push(1, [1, 2, 3])
    talk(1, MessageType.PUSH, 0, 0)
    assert talk.handler.traffic(0) == (24, 12)
    assert talk.handler.traffic(9) == (0, 0)


def test_traffic_is_kept_after_the_end_of_a_session():
    """Worker 0 closes a session for all, perhaps before another worker has asked its own server."""
    talk = Talk(rank=1)
    talk.open(SessionConfig(2, 3))
    talk.push(0, [1, 2, 3])
    talk(0, MessageType.CLOSE)
    assert talk.handler.traffic(0) == (12, 12)
    talk.open(SessionConfig(2, 3))
    assert talk.handler.traffic(0) == (0, 0)


def test_a_later_session_does_not_wait_for_workers_that_left():
    talk = Talk(workers=3)
    talk(2, MessageType.DISCONNECT)
    talk.open(SessionConfig(3, 1, max_staleness=0))
    assert talk.push(0, [1]) == []
    assert [to for to, *_ in talk.push(1, [1])] == [0, 1]
    assert talk(0, MessageType.FLUSH) == []
    assert [to for to, *_ in talk(1, MessageType.FLUSH)] == [0, 1]
