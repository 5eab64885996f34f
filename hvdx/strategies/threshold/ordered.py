"""Asynchronous exchange of threshold messages: each rank applies the messages of all ranks when they have come."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hvdx.comm import Comm, waiting
from hvdx.comm.memory import aligned
from hvdx.comm.waiting import LIMIT_VARIABLE, Backoff
from hvdx.costs.link import probe
from hvdx.errors import ExchangeError, UpdateError, WireError
from hvdx.strategies.contract import TensorSpec, refuse_several, views
from hvdx.strategies.host_exchange import MAX_SKIPPED_STEPS, HostExchange, StepInput
from hvdx.strategies.step import RESIDUAL_EVERY, count_entries, saved_step
from hvdx.strategies.telemetry import StaleTelemetry
from hvdx.strategies.threshold.encoder import ThresholdEncoder
from hvdx.strategies.threshold.gradient_noise import words_of
from hvdx.strategies.threshold.options import Options
from hvdx.strategies.threshold.replica import SEQUENCER, Replica
from hvdx.strategies.threshold.session_mailbox import HEADER_BYTES, Payload, Session, session_mailbox_of
from hvdx.strategies.threshold.states import whole_residual

# Bytes that may be in flight in any case.
_LEAST_ROOM = 1 << 20
# Words of a payload: bytes of the sample in front of the message, bits of the factor (float64).
_SAMPLE, _FACTOR = range(2)


class OrderedExchange(HostExchange):
    """Exchange of one optimiser under `Threshold(max_staleness="inf")`. Making it is collective.

    The *mirror* holds the weights to which this rank has applied the messages of all ranks, in their order. A step
    returns the mirror and, on top of it, this rank's own messages that have no place in the order yet.

    Args:
        options: options, the same on all ranks.
        comm: the ranks.
        specs: the variables, of the same shapes on all ranks.
    """

    telemetry: StaleTelemetry

    def __init__(self, options: Options, comm: Comm, specs: Sequence[TensorSpec]):
        super().__init__(specs, StaleTelemetry())
        self._comm = comm
        self.encoder = ThresholdEncoder(options, comm, specs)
        channel = comm.channel("the updates")
        channel.exchange([])  # all ranks have compiled
        if options.target_density == "auto":
            self.network = probe(channel)
            self.encoder.follow(self.network, comm.size - 1, self._n)
        channel.close()
        self._step, self._computing = 0, 0.0
        # The update of a step, also as arrays.
        self._update = aligned(self._n)
        self._update_views = views(self._update, specs)
        self._dtype = np.dtype(np.float64 if any(s.itemsize > 4 for s in specs) else np.float32)
        self._mirror = np.zeros(self._n, self._dtype)
        # Weights that the last step returned: the mirror, or a copy with own messages on top.
        self._returned = self._mirror
        self._ahead: np.ndarray | None = None
        # Own messages without a place, each with its number and the count of applied updates that its rank had seen.
        self._own: deque[tuple[Payload, int, int]] = deque()
        self._updates = self._base = 0
        self._samples: dict[int, np.ndarray] = {}
        self._mailbox = session_mailbox_of(comm)
        # Present session, and the next one, whose packets may arrive before this rank begins it.
        self._session: Session | None = None
        self._next: Session | None = None
        self.renew()

    # -- begin and end of a session -----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True between `begin` and `flush`."""
        return self._session is not None

    def renew(self) -> None:
        self.close()
        self._register(self._mailbox.series.agree(self._comm))
        # No rank may send a packet before all ranks accept it.
        self._comm.all_gather_object(None, "opening an exchange")
        # Whether the mirror is the same on all ranks, and holds the weights of the last flush.
        self._shared = False

    def _register(self, number: int) -> None:
        self._next = self._registered(number)

    def _registered(self, number: int) -> Session:
        """Return a session, whose packets are accepted from now on."""
        # In flight may be as many bytes as the weights have in float32.
        replica = Replica(self._comm.rank, self._comm.size, room=max(4 * self._n, _LEAST_ROOM))
        session = Session(number, replica, self._comm.world_ranks)
        self._mailbox.register(session)
        return session

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        """Begin a session with the weights of rank 0; the other ranks wait until rank 0 has begun.

        Args:
            weights: arrays of the shapes of the specs; those of rank 0 are used.

        Raises:
            ExchangeError: if rank 0 did not begin within the time limit.
        """
        assert self._next is not None  # `renew` comes after `close`
        self._end()
        self._session = self._next
        self._register(self._session.number + 1)
        self._updates = self._base = 0
        if self._comm.survives:
            self._begin_together(weights)
        else:
            self._begin_with(weights, self._session)
        self._shared = False
        # The first update is the change of this rank's own weights, which may differ from those of rank 0.
        self._returned = self._buffer()
        _fill(self._returned, weights, self.specs)

    def _begin_with(self, weights: Sequence[np.ndarray], session: Session) -> None:
        """Begin a session with the weights of rank 0, which need not wait for the others."""
        replica = session.replica
        self._mailbox.start(session)
        if self._comm.rank == SEQUENCER:
            known = self._shared and all(map(np.array_equal, views(self._mirror, self.specs), weights))
            _fill(self._mirror, weights, self.specs)
            body = None if known else self._mirror.view(np.uint8).copy()
            self._mailbox.send(session, replica.begin(body))
        else:
            self._wait(lambda: [] if replica.begun else [SEQUENCER], "the beginning of a session")

    def flush(self) -> list[np.ndarray] | None:
        """Wait until all ranks have flushed and all messages are applied; return the weights. Collective.

        The weights are the same on all ranks, bit for bit. The flush ends the session: `begin` must be called before
        the next step.
        """
        if self._session is None:
            return None
        begin, is_over = time.perf_counter(), False
        while not is_over:
            self._wait(self._awaited_to_end, "a flush")
            with waiting.recorded("a flush"):
                sent = self._mailbox.all_sent(self._comm.patience)
            if not sent:
                raise ExchangeError(self._report("a flush", self._comm.patience, []))
            # A rank that died may have kept others from their end.
            is_over = not self._comm.survives or self._meet(finished=True)
        self._count_bytes()
        self._end()
        self._shared = True
        self.telemetry.ending += time.perf_counter() - begin
        self.restart_timer()
        return [w.copy() for w in views(self._mirror, self.specs)]

    def _awaited_to_end(self) -> list[int]:
        """Return the ranks that this one waits for, after it has told all that it sends no more."""
        session = self._open
        self._mailbox.send(session, session.replica.flush())
        return session.replica.awaited_to_end()

    @property
    def _open(self) -> Session:
        assert self._session is not None  # the caller asks `is_open`
        return self._session

    def _end(self) -> None:
        if self._session is not None:
            self._mailbox.drop(self._session)
            self._session = None
        self._own.clear()

    def close(self) -> None:
        """End the session, and accept no packets of later ones until `renew`."""
        self._end()
        if self._next is not None:
            self._mailbox.drop(self._next)
            self._next = None

    # -- a step -------------------------------------------------------------------------------------------------------

    def combine(self, step_input: StepInput) -> list[np.ndarray]:
        """Send the update of a step, and return weights with the messages that have come. Not collective.

        Args:
            step_input: this rank's weights after its own step. If they are not finite, this rank skips the step.

        Returns:
            The weights for the next step: arrays of the shapes of the specs, which the next step overwrites.

        Raises:
            ExchangeError: if a rank that this one waits for sent nothing within the time limit.
            WireError: if a message of a rank is damaged.
            HvdxError: after `MAX_SKIPPED_STEPS` skipped steps in a row.
        """
        counts, self._cost = self.telemetry, 0.0
        if step_input.computing is not None:
            self._computing = step_input.computing
        begin = self._now()
        payload = self._encode_update(step_input)
        self.add_cost("encoding", self._now() - begin)
        size = 0 if payload is None else payload.body.size
        # Messages that have not left after a whole step show that the network, not a receiver, is the limit.
        backlog = self._computing if self._mailbox.pending_sends() else 0.0
        counts.waiting += self._wait(lambda: self._open.replica.awaited_to_send(size), "messages to be applied")
        session = self._open  # a new one after a death
        if payload is not None:
            self._own.append((payload, session.replica.sent, self._base))
        with self._mailbox.lock:
            self._mailbox.send(session, session.replica.send(payload, size))
            self._mailbox.send(session, session.replica.announce())
        if payload is not None:
            counts.messages += payload.body.size
        self._mailbox.poll()
        self._apply()
        begin = self._now()
        self._look_ahead()
        self.add_cost("decoding", self._now() - begin)
        counts.steps += 1
        self._step += 1
        self._count_bytes()
        if payload is not None:
            self._skips = 0
            if counts.steps % RESIDUAL_EVERY == 1 and counts.tau:
                counts.residual = self.encoder.residual_rms()
            self.encoder.observe_cost(self._computing, [self._cost + max(self._transfer(size), backlog)])
        return views(self._returned, self.specs)

    def _encode_update(self, step_input: StepInput) -> Payload | None:
        """Return the message of a step; None if this rank skips the step, which is reported."""
        weights = views(self._returned, self.specs)
        for out, now, before in zip(self._update_views, step_input.tensors, weights, strict=True):
            np.subtract(now, before, out=out, casting="same_kind")
        if not step_input.finite:
            self._skip(f"NaN or infinity in the gradient{f' of {step_input.blamed}' if step_input.blamed else ''}")
            return None
        try:
            encoded = self.encoder.encode(step_input._replace(tensors=self._update_views), self._step)
        except UpdateError as error:
            self._skip(error.within(self.specs[error.variable].name))
            return None
        count_entries(self.telemetry, encoded, self._n)
        size = self._comm.size
        samples = step_input.sample if size > 1 else None
        words = words_of(np.concatenate([np.ravel(s) for s in samples])) if samples else []
        sample = np.array(words, np.int64).view(np.uint8)
        factor = np.float64(1.0 / size * self.encoder.correction(size))
        # A copy: the codec may use the memory of the message again, before the message has left.
        return Payload([sample.size, int(factor.view(np.int64))], np.concatenate([sample, encoded.message]))

    def _skip(self, reason: str) -> None:
        rank = self._comm.rank
        self._skipped(
            True,
            lambda again: f"step {self._step + 1} of rank {rank}: {reason}; this rank skipped the step{again}.",
            lambda: f"{MAX_SKIPPED_STEPS} steps in a row were skipped on rank {rank}: {reason}. The training has "
            "diverged: lower the learning rate, clip gradients, or check the data of that rank.",
        )

    def _wait(self, awaited: Callable[[], list[int]], what: str) -> float:
        """Apply messages until no rank is awaited; return the seconds of waiting."""
        session, backoff, limit, spent = self._open, Backoff(), self._comm.patience, 0.0
        begin = since = time.monotonic()
        seen, waits = session.packets, False
        try:
            while True:
                self._mailbox.poll()
                applying = time.monotonic()
                self._apply()
                spent += time.monotonic() - applying
                if session.members != list(self._comm.world_ranks) or not self._mailbox.is_whole(session):
                    self._meet(finished=False)
                    session = self._open
                with self._mailbox.lock:
                    ranks = awaited()
                    if not ranks:
                        break
                    self._mailbox.send(session, session.replica.tell())
                if not waits:
                    waits = True
                    waiting.enter(what, for_all=False)
                if session.packets != seen:
                    seen, since = session.packets, time.monotonic()
                    backoff.renew()
                elif time.monotonic() - since > limit:
                    raise ExchangeError(self._report(what, time.monotonic() - since, ranks))
                backoff.sleep()
        finally:
            if waits:
                waiting.leave()
        return max(time.monotonic() - begin - spent, 0.0) if waits else 0.0

    def _report(self, what: str, seconds: float, ranks: Sequence[int]) -> str:
        members, me = self._open.members, self._open.replica.rank
        numbers = [str(members[r]) for r in ranks]
        named = f" for rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else " for the network"
        return (
            f"{what}: rank {members[me]} has been waiting for {seconds:.0f} s{named}. Check the last "
            f"output there. {LIMIT_VARIABLE}=seconds sets the time limit."
        )

    # -- the messages of all ranks ------------------------------------------------------------------------------------

    def _apply(self) -> None:
        """Apply the messages whose turn has come."""
        with self._mailbox.lock:
            replica = self._open.replica
            taken = list(iter(replica.take, None))
        weights = replica.take_weights()
        if weights is not None:
            self._mirror[:] = weights.view(self._dtype)
        if taken:
            begin = self._now()
            self._apply_all(taken)
            self.add_cost("decoding", self._now() - begin)

    def _apply_all(self, taken: Sequence[tuple[int, Payload | None]]) -> None:
        there = [(sender, payload) for sender, payload in taken if payload is not None]
        # One call of the decoder for messages with the same factor; it adds one after the other.
        for _, some in itertools.groupby(there, lambda one: one[1].words[_FACTOR]):
            self._add(list(some), self._mirror)
        for sender, payload in there:
            self._updates += 1
            size = payload.words[_SAMPLE]
            if size:
                self._samples[sender] = payload.body[:size].view(np.float16)
            if sender == self._open.replica.rank:
                *_, base = self._own.popleft()
                self.telemetry.staleness.add(self._updates - base)
                if len(self._samples) == self._open.replica.size:
                    self.encoder.noise.observe(np.stack([self._samples[r] for r in range(self._open.replica.size)]))

    def _add(self, messages: Sequence[tuple[int, Payload]], out: np.ndarray) -> None:
        """Add messages of the same factor, each with its sender, to an array, one after the other."""
        codec, scale = self.encoder.codec, float(np.int64(messages[0][1].words[_FACTOR]).view(np.float64))
        double = out.dtype != np.float32
        for some in [[one] for one in messages] if double else [messages]:
            bodies = [payload.body[payload.words[_SAMPLE] :] for _, payload in some]
            try:
                if double:
                    codec.decode_sum(bodies, [self._update], scale)
                    np.add(out, self._update, out=out)
                else:
                    codec.decode(bodies, [out], scale)
            except WireError as error:
                raise error.of(self._open.members[some[error.rank or 0][0]], "update") from None

    def _look_ahead(self) -> None:
        """Set the weights that the step returns."""
        self._base = self._updates + len(self._own)
        if not self._own:
            self._returned = self._mirror
            return
        self._returned = self._buffer()
        np.copyto(self._returned, self._mirror)
        for payload, *_ in self._own:
            self._add([(self._open.replica.rank, payload)], self._returned)

    def _buffer(self) -> np.ndarray:
        if self._ahead is None:
            self._ahead = np.empty_like(self._mirror)
        return self._ahead

    # -- ranks that die -----------------------------------------------------------------------------------------------

    def _begin_together(self, weights: Sequence[np.ndarray]) -> None:
        """Begin a session with the weights of rank 0, while ranks may die. Collective."""
        refuse_several(self._mailbox.has_others(self._open), "threshold:max_staleness=inf")
        self._session = self._registered(self._open.number)  # of the ranks that live now
        _fill(self._mirror, [np.asarray(w) for w in self._comm.broadcast(weights, 0, "the weights")], self.specs)
        self._mailbox.start(self._session)

    def _meet(self, finished: bool) -> bool:
        """Return whether all ranks have finished the session; otherwise begin a new one, of those who live. Collective.

        All ranks apply the messages in one order, so the weights of the rank that has applied the most contain those of
        every other one. All go on with these. A message that they do not contain returns to the residual of its sender.
        """
        comm, session = self._comm, self._open
        while True:
            mine = finished, dict(zip(session.members, session.replica.applied, strict=True))
            states = comm.all_gather_object(mine, "the messages of those who live")
            if all(done for done, _ in states):
                return True
            counts = [sum(applied.values()) for _, applied in states]
            newest, known = counts.index(max(counts)), comm.recoveries
            (weights,) = comm.broadcast([self._mirror], newest, "the weights of those who live")
            if comm.recoveries == known:
                break  # its sender has not died meanwhile
        self._mirror[:] = np.asarray(weights)
        self._take_back(states[newest][1][comm.world_ranks[comm.rank]])
        self._mailbox.drop(session)
        # Nobody sends before all accept it.
        self._session = self._registered(session.number + 1)
        self._register(session.number + 2)
        comm.all_gather_object(None, "opening an exchange")
        self._mailbox.start(self._session)
        return False

    def _take_back(self, applied: int) -> None:
        """Return own messages to the residual, except those that the weights contain."""
        bodies = [payload.body[payload.words[_SAMPLE] :] for payload, number, _ in self._own if number >= applied]
        if bodies:
            flat = np.zeros(self._n, np.float32)
            self.encoder.codec.decode(bodies, [flat], 1.0)
            self.encoder.add_to_residual(views(flat, self.specs))
        self._own.clear()
        self._samples.clear()

    # -- counters and state -------------------------------------------------------------------------------------------

    def _transfer(self, size: int) -> float:
        """Return the seconds in which a message leaves to all other ranks, by the measurement at the start."""
        return (self._comm.size - 1) * (size + HEADER_BYTES) / self.network.bandwidth if self.network else 0.0

    def _count_bytes(self) -> None:
        with self._mailbox.lock:
            sent, received = self._open.take_bytes()
        self.telemetry.sent += sent
        self.telemetry.received += received

    @property
    def residuals(self) -> list[np.ndarray]:
        return views(self.encoder.read_residual(), self.specs)

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        self.encoder.add_to_residual(tensors)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"step": np.array(self._step)} | self.encoder.arrays()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        step = saved_step(state)
        self.encoder.restore(whole_residual(state, self._comm.rank))
        self._step = step
        self._samples.clear()


def _fill(flat: np.ndarray, arrays: Sequence[np.ndarray], specs: Sequence[TensorSpec]) -> None:
    """Copy arrays to a flat array."""
    for view, array in zip(views(flat, specs), arrays, strict=True):
        view[...] = array
