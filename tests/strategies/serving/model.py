"""Model of two workers and two servers, in every order in which messages can arrive.

Workers are programs of a few operations, and servers are real handlers. Messages between two ranks keep their order. A
state has two kinds of successors: a worker takes its next operation, or the first message in flight between two ranks
arrives. A handler is identified by its attributes, and rebuilt from the messages that it has handled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hvdx.comm import Message
from hvdx.comm.interfaces import HEADER_WORDS
from hvdx.strategies.serving.messages import MessageType, SessionConfig
from hvdx.strategies.serving.server import RequestHandler
from tests.strategies.serving.messages import opening

WORKERS = SERVERS = 2
SESSION = 3
WORKER_RANKS = range(WORKERS)

#: Message as a hashable value: sender, header, body.
Note = tuple[int, tuple[int, ...], bytes | None]


class BrokenError(AssertionError):
    """Broken property, with the messages that led to it."""


@dataclass(frozen=True)
class Worker:
    """Worker between two operations.

    Attributes:
        todo: operations that are left: "push", "nan" (a refused push), "flush", "leave" (disconnect), "drop" (push and
            disconnect at once), or ("ask", round, steps).
        versions, weights: version and weights that each server sent last.
        waiting: servers that have not answered yet.
        kind: type of their answers.
        taken: number of steps that it has taken.
        finals: weights after each flush.
        gone: whether it has disconnected.
    """

    todo: tuple[Any, ...]
    versions: tuple[int, ...] = (0,) * SERVERS
    weights: tuple[bytes, ...] = ()
    waiting: frozenset[int] = frozenset()
    kind: int = 0
    taken: int = 0
    finals: tuple[tuple[bytes, ...], ...] = ()
    gone: bool = False


class _Numbers(dict[Any, int]):
    """Numbers of values, in order of first use."""

    def __init__(self) -> None:
        super().__init__()
        self.values_: list[Any] = []

    def of(self, value: Any) -> int:
        number = self.get(value)
        if number is None:
            number = self[value] = len(self.values_)
            self.values_.append(value)
        return number


#: State as numbers: of the workers, of the handlers, and of the messages in flight on each channel.
State = tuple[Any, ...]
_CHANNELS = WORKERS + SERVERS


@dataclass
class Model:
    """All states that are possible under a rule.

    Args:
        rule: options of `SessionConfig`.
        programs: one program for each worker.
        room: largest number of steps of one worker, for which an update has elements.
        seen: function that is called with (worker, its number of steps, weights of each server) after each step.
        end: function that is called with the workers of each last state.
    """

    rule: dict[str, Any]
    programs: tuple[tuple[Any, ...], ...]
    room: int = 3
    seen: Callable[[int, int, list[np.ndarray]], None] = lambda *_: None
    end: Callable[[list[Worker]], None] = lambda _: None
    _workers: _Numbers = field(default_factory=_Numbers)
    _notes: _Numbers = field(default_factory=_Numbers)
    _handlers: _Numbers = field(default_factory=_Numbers)
    # For each handler: the messages that lead to it, and the workers that are present.
    _pasts: list[tuple[Note, ...]] = field(default_factory=list)
    _present: list[set[int]] = field(default_factory=list)
    # Cache of transitions of a worker or a handler: its number after it, and (channel, message) for each message sent.
    _changes: dict[tuple[int, ...], tuple[int, list[tuple[int, int]]]] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        return WORKERS * self.room

    def explore(self) -> int:
        """Visit every state, and return their number. Raise `BrokenError` in a state with a broken property."""
        zeros = np.zeros(self.elements)
        config = SessionConfig(WORKERS, self.elements, "float64", **self.rule)
        handler = self._handler(tuple(_note(0, *message) for message in opening(SESSION, config, zeros)))
        workers = [self._workers.of(Worker(tuple(p), weights=(zeros.tobytes(),) * SERVERS)) for p in self.programs]
        start = (*workers, *[handler] * SERVERS, *[()] * (2 * WORKERS * SERVERS))
        came_from: dict[State, State | None] = {start: None}
        stack = [start]
        while stack:
            state = stack.pop()
            try:
                successors = self._successors(state)
                if not successors:
                    self._check_end(state)
            except AssertionError as error:
                raise BrokenError(f"{error}\n{self._way(came_from, state)}") from error
            for following in successors:
                if following not in came_from:
                    came_from[following] = state
                    stack.append(following)
        return len(came_from)

    def _way(self, came_from: dict[State, State | None], state: State | None) -> str:
        """Return a text of the messages in the order in which they arrived on the way to a state."""
        arrived = []
        while state is not None:
            before = came_from[state]
            for channel in range(WORKERS * SERVERS * 2):
                if before is not None and len(before[_CHANNELS + channel]) > len(state[_CHANNELS + channel]):
                    sender, header, _ = self._notes.values_[before[_CHANNELS + channel][0]]
                    server, worker = divmod(channel - WORKERS * SERVERS, WORKERS)
                    way = f"{sender} to server {channel % SERVERS}" if sender >= 0 else f"server {server} to {worker}"
                    arrived.append(f"{MessageType(header[0]).name} of {way}")
            state = before
        return f"{self.rule} {self.programs}: " + "; ".join(reversed(arrived))

    def _successors(self, state: State) -> list[State]:
        found = []
        for w in range(WORKERS):
            change = (w, state[w])
            if change not in self._changes:
                self._changes[change] = self._act(w, state[w])
            after, sent = self._changes[change]
            if after >= 0:
                found.append(_changed(state, w, after, sent))
        for c in range(_CHANNELS, len(state)):
            if state[c]:
                note = state[c][0]
                who = _receiver(c - _CHANNELS)
                change = (c - _CHANNELS, state[who], note)
                if change not in self._changes:
                    self._changes[change] = self._arrive(c - _CHANNELS, state[who], note)
                after, sent = self._changes[change]
                found.append(_changed(_with(state, c, state[c][1:]), who, after, sent))
        return found

    def _arrive(self, channel: int, receiver: int, note: int) -> tuple[int, list[tuple[int, int]]]:
        if channel < WORKERS * SERVERS:
            handler, answers = self._handle(receiver, self._notes.values_[note])
            first = WORKERS * SERVERS + channel % SERVERS * WORKERS
            return handler, [(first + to, self._notes.of(answer)) for to, answer in answers]
        server, w = divmod(channel - WORKERS * SERVERS, WORKERS)
        after = self._receive(w, self._workers.values_[receiver], server, self._notes.values_[note])
        return self._workers.of(after), []

    # -- workers ------------------------------------------------------------------------------------------------------

    def _act(self, w: int, number: int) -> tuple[int, list[tuple[int, int]]]:
        """Let a worker take its next operation; return its new state and its messages, or -1 if it cannot."""
        worker = self._workers.values_[number]
        if worker.waiting or not worker.todo:
            return -1, []
        after, messages = self._operate(w, worker)
        return self._workers.of(after), [(w * SERVERS + s, self._notes.of(note)) for s, note in messages]

    def _operate(self, w: int, worker: Worker) -> tuple[Worker, list[tuple[int, Note]]]:
        operation, *_ = worker.todo
        after, everywhere = replace(worker, todo=worker.todo[1:], kind=0), frozenset(range(SERVERS))
        if operation in ("push", "nan", "drop"):
            fine = operation != "nan"
            update = np.zeros(self.elements)
            update[w * self.room + worker.taken] = 1
            messages = [
                (s, _note(w, [MessageType.PUSH, SESSION, worker.versions[s], int(fine)], update if fine else None))
                for s in range(SERVERS)
            ]
            after = replace(after, taken=worker.taken + 1, waiting=everywhere, kind=MessageType.WEIGHTS)
            if operation == "drop":
                after = replace(after, waiting=frozenset(), gone=True)
                messages += [(s, _note(w, [MessageType.DISCONNECT])) for s in range(SERVERS)]
            return after, messages
        if operation == "flush":
            messages = [(s, _note(w, [MessageType.FLUSH, SESSION])) for s in range(SERVERS)]
            return replace(after, waiting=everywhere, kind=MessageType.FINAL), messages
        if operation == "leave":
            return replace(after, gone=True), [(s, _note(w, [MessageType.DISCONNECT])) for s in range(SERVERS)]
        _, round_, steps = operation
        # The operation stays in `todo`, because the next one depends on the answer.
        after = replace(worker, waiting=frozenset([0]), kind=MessageType.GRANT)
        return after, [(0, _note(w, [MessageType.STEP, SESSION, round_, steps]))]

    def _receive(self, w: int, worker: Worker, s: int, note: Note) -> Worker:
        _, (kind, _, *words), body = note
        if worker.gone:
            return worker
        assert s in worker.waiting, f"server {s} answered worker {w} twice"
        assert kind == worker.kind, (
            f"worker {w}: expected {MessageType(worker.kind).name}, got {MessageType(kind).name} {body!r}"
        )
        waiting = worker.waiting - {s}
        if kind == MessageType.GRANT:
            granted, handed_out = words[:2]
            assert handed_out <= worker.todo[0][2]
            return replace(worker, waiting=waiting, todo=("push", *worker.todo) if granted else worker.todo[1:])
        after = replace(
            worker,
            waiting=waiting,
            versions=_with(worker.versions, s, words[0]),
            weights=_with(worker.weights, s, body),
        )
        assert words[0] >= worker.versions[s], "a version decreased"
        assert (np.frombuffer(body) >= np.frombuffer(worker.weights[s])).all(), "an update was removed"
        if kind == MessageType.WEIGHTS and not waiting:
            self.seen(w, after.taken, [np.frombuffer(weights) for weights in after.weights])
        if kind == MessageType.FINAL and not waiting:
            after = replace(after, finals=(*after.finals, after.weights))
        return after

    def _check_end(self, state: State) -> None:
        workers = [self._workers.values_[number] for number in state[:WORKERS]]
        for w, worker in enumerate(workers):
            assert not worker.waiting, f"worker {w} waits for servers {set(worker.waiting)} forever"
            assert worker.gone
        assert not any(self._present[handler] for handler in state[WORKERS:_CHANNELS]), "a worker is still present"
        flushed = [worker.finals for worker in workers if worker.finals]
        fewest = min(len(finals) for finals in flushed)
        assert len({finals[:fewest] for finals in flushed}) == 1, "workers ended with different weights"
        self.end(workers)

    # -- servers ------------------------------------------------------------------------------------------------------

    def _handler(self, past: tuple[Note, ...]) -> int:
        handler, _ = _replay(past)
        number = self._handlers.of(_content(vars(handler), self.elements))
        if number == len(self._pasts):
            self._pasts.append(past)
            self._present.append(set(handler.present))
        return number

    def _handle(self, handler: int, note: Note) -> tuple[int, list[tuple[int, Note]]]:
        past = (*self._pasts[handler], note)
        _, answers = _replay(past)
        self._check_answers(past, answers)
        return self._handler(past), [(to, _note(-1, header, body)) for to, header, body in answers[-1]]

    def _check_answers(self, past: tuple[Note, ...], answers: list[Any]) -> None:
        """Compute from all messages which workers may continue, and compare with the answers."""
        steps, training, flushed = [0] * WORKERS, set(WORKER_RANKS), set()
        waiting: set[int] = set()
        version = pushes = 0
        for (sender, (kind, *words), body), released in zip(past, answers, strict=True):
            before = version
            if kind == MessageType.PUSH:
                pushes += 1
                steps[sender] += 1
                waiting.add(sender)
            if kind in (MessageType.FLUSH, MessageType.DISCONNECT):
                training.discard(sender)
            if kind == MessageType.FLUSH:
                flushed.add(sender)
            if kind == MessageType.DISCONNECT:
                flushed.discard(sender)
                waiting.discard(sender)
            slowest = min((steps[w] for w in training), default=max(steps))
            for to, header, weights in released:
                if header[0] == MessageType.WEIGHTS:
                    _, _, version, staleness, fine, _ = header
                    assert to in waiting, "an answer without a request"
                    waiting.discard(to)
                    assert staleness >= 1, "a staleness below 1"
                    ahead = steps[to] - slowest
                    assert self._bound is None or ahead <= self._bound, f"worker {to} is {ahead} steps ahead"
                    if to == sender and self._aggregate == 1 and self._bound is None:
                        assert staleness == before + 1 - words[1], "a wrong staleness"
                        if fine:
                            own = np.frombuffer(body).astype(bool)
                            assert (weights.view(np.float64)[own] == self._share * staleness**-self._exponent).all(), (
                                "a wrong scale"
                            )
                elif header[0] == MessageType.FINAL:
                    assert not training, "FINAL before all have flushed"
                    assert to in flushed
                    version, updates, applied, refused = header[2:6]
                    assert updates == applied, "an update was not applied"
                    assert updates + refused == pushes, "an update was not seen"
                else:
                    assert header[0] in (MessageType.READY, MessageType.GRANT), weights.tobytes().decode()
            if not training and (flushed or kind == MessageType.FLUSH):
                assert {to for to, header, _ in released if header[0] == MessageType.FINAL} == flushed, (
                    "not all workers received FINAL"
                )
                # All workers that flushed continue, and steps count from zero.
                training, flushed, steps = set(flushed), set(), [0] * WORKERS
            for w in waiting:
                assert self._bound is not None, f"worker {w} waits without a bound"
                assert steps[w] - slowest > self._bound, f"worker {w} waits although it is not ahead"

    @property
    def _bound(self) -> int | None:
        return self.rule.get("max_staleness")

    @property
    def _aggregate(self) -> int:
        return self.rule.get("aggregate", 1)

    @property
    def _share(self) -> float:
        return self.rule.get("share", 1.0)

    @property
    def _exponent(self) -> float:
        return self.rule.get("staleness_exponent", 0.0)


def _note(sender: int, header: Any, body: np.ndarray | None = None) -> Note:
    return sender, tuple(int(word) for word in header), None if body is None else body.tobytes()


def _replay(past: tuple[Note, ...]) -> tuple[RequestHandler, list[Any]]:
    """Return a handler that has handled these messages, and its answers to each."""
    handler = RequestHandler(WORKERS, threads=1, clock=lambda: 0.0)
    answers = []
    for sender, header, body in past:
        words = (*header, *[0] * (HEADER_WORDS - len(header)))
        fresh = None if body is None else np.frombuffer(body, np.uint8).copy()
        answers.append(handler.handle(Message(sender, words, fresh)))
    return handler, answers


def _content(value: Any, elements: int) -> Any:
    """Return all attributes of an object as a comparable value; a function that adds, as the array that it adds."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return tuple(sorted((repr(k), _content(v, elements)) for k, v in value.items()))
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    if isinstance(value, list | tuple):
        return tuple(_content(v, elements) for v in value)
    if callable(value):
        if value.__name__ != "add":
            return value.__qualname__
        added = np.zeros(elements)
        value(added, 1.0)
        return added.tobytes()
    return _content(vars(value), elements) if hasattr(value, "__dict__") else value


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _changed(state: State, who: int, after: int, sent: list[tuple[int, int]]) -> State:
    changed = list(state)
    changed[who] = after
    for channel, note in sent:
        changed[_CHANNELS + channel] = (*changed[_CHANNELS + channel], note)
    return tuple(changed)


def _receiver(channel: int) -> int:
    """Return the index in a state of a channel's receiver. Channels from workers to servers come first."""
    return WORKERS + channel % SERVERS if channel < WORKERS * SERVERS else channel % WORKERS
