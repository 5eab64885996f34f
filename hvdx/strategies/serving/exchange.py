"""Exchange of a worker with the parameter servers: push the update of a step, and pull the current weights."""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvdx.comm import Comm, Message
from hvdx.comm.launcher import kernel_threads
from hvdx.errors import ConfigError, UpdateError
from hvdx.log import Log
from hvdx.strategies.base import TensorSpec, views
from hvdx.strategies.compiling import prepare_together
from hvdx.strategies.host import MAX_SKIPPED_STEPS, HostExchange, StepInput, find
from hvdx.strategies.serving.client import Call, Replace, client_of
from hvdx.strategies.serving.messages import MessageType, SessionConfig, cut
from hvdx.strategies.serving.updates import is_finite, joined_residual, make_codec
from hvdx.strategies.telemetry import ServerTelemetry

_log = Log(__name__)

#: Bytes of a header on the wire.
HEADER_BYTES = 88
# Smallest size in bytes of a shard, and largest number of shards of a server. Each shard is a session of its own: while
# one shard is pushed, the answer for the previous shard arrives, so that a link is busy in both directions.
_MIN_SHARD_BYTES, _MAX_SHARDS = 1 << 19, 4


class _ServerDiedError(Exception):
    """A server died while this worker opened a session there."""


class Options(Protocol):
    """Options that the exchange reads; see `hvdx.strategies.ParameterServer`."""

    codec: str

    def server_ranks(self, comm: Comm) -> list[int]:
        """Return the ranks that serve."""

    def config(self, workers: int, elements: int, dtype: str, group: int, ranks: Sequence[int]) -> SessionConfig:
        """Return the configuration of a session."""


@dataclass
class _Shard:
    """Shard of the flat weights, at one server.

    Attributes:
        server: rank of the server.
        begin, end: bounds of the shard in the flat weights.
        session: number of its session; -1 while it is closed.
        version: version of the weights that were pulled last.
        state: state of the codec.
    """

    server: int
    begin: int
    end: int
    session: int = -1
    version: int = 0
    state: Any = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    def of(self, flat: np.ndarray) -> np.ndarray:
        """Return this shard of a flat array."""
        return flat[self.begin : self.end]


def shards_of_server(size: int) -> int:
    """Return the number of shards into which the weights at a server are divided.

    Args:
        size: bytes of the weights at the server.

    Example:
        >>> shards_of_server(1000), shards_of_server(10_000_000)
        (1, 4)
    """
    return max(1, min(_MAX_SHARDS, size // _MIN_SHARD_BYTES))


def _make_shards(servers: Sequence[int], elements: int, itemsize: int) -> list[_Shard]:
    """Return shards of equal size, the same number for each server. Consecutive shards are at different servers."""
    times = shards_of_server(elements * itemsize // len(servers))
    return [_Shard(servers[i % len(servers)], *bounds) for i, bounds in enumerate(cut(elements, times * len(servers)))]


class ServerExchange(HostExchange):
    """Exchange of one list of variables of one worker under `ParameterServer`. Collective.

    Args:
        strategy: options, the same on all workers.
        comm: the workers; for parts of split layers, those that hold the same parts. All workers of the job then make
            exchanges together.
        specs: the variables, of the same shapes on all workers.

    Raises:
        ConfigError: if there are more servers, or more updates to aggregate, than workers.
    """

    _counters: ServerTelemetry

    def __init__(self, strategy: Options, comm: Comm, specs: Sequence[TensorSpec]):
        super().__init__(specs, ServerTelemetry())
        self._strategy, self._comm = strategy, comm
        # The client and the numbers of sessions are those of all workers, of which `comm` may be a part.
        self._everyone = comm if comm.parent is None else comm.parent
        self._dtype = np.dtype(np.float64 if any(s.itemsize > 4 for s in specs) else np.float32)
        self._codec = make_codec(strategy.codec, kernel_threads(comm.local_size))
        if self._codec is not None:
            prepare_together(self._codec, comm, "ParameterServer")
        world = self._everyone.world_ranks
        # Server ranks have numbers after those of the workers.
        servers = [world[rank] if rank < len(world) else rank for rank in strategy.server_ranks(comm)]
        self._shards = _make_shards(servers, self._n, self._dtype.itemsize)
        for shard in self._shards:
            shard.state = self._codec.init([shard.elements]) if self._codec else None
        # The weights that were pulled last, and the change that this worker has made since.
        self._weights, self._update = np.zeros(self._n, self._dtype), np.zeros(self._n, self._dtype)
        self._weight_views, self._update_views = views(self._weights, specs), views(self._update, specs)
        # The update in float32, the dtype of codecs.
        self._single = self._update if self._dtype == np.float32 else np.zeros(self._n, np.float32)
        self._client = client_of(self._everyone)
        self._rank = self._everyone.world_ranks[self._everyone.rank]
        # Any worker may take the place of a server that dies.
        if comm.survives or any(shard.server == self._rank for shard in self._shards):
            self._client.open_server()
        self._client.register_servers(shard.server for shard in self._shards)
        self._next_session = 0
        self.renew()
        self._reason = ""

    @property
    def telemetry(self) -> ServerTelemetry:
        """Counters of the exchange."""
        return self._counters

    # -- begin and end of a session -----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if the servers hold weights for this exchange."""
        return self._shards[0].session >= 0

    @property
    def _ranks(self) -> tuple[int, ...]:
        """Ranks of the workers of this exchange."""
        return tuple(self._comm.world_ranks)

    def renew(self) -> None:
        self.close()
        self._next_session = self._client.series.agree(self._everyone, self._ranks)

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        """Load worker 0's weights into the servers; the other workers wait until the servers have them.

        Args:
            weights: arrays of the shapes of the specs; those of worker 0 are used.

        Raises:
            ExchangeError: if worker 0 or a server did not answer within the time limit.
        """
        self.close()  # an exception may have left a session open
        self._workers = self._comm.size
        for view, weight in zip(self._weight_views, weights, strict=True):
            view[...] = weight
        if self._comm.survives:
            self._begin_together()
            return
        first = self._number(self._shards)
        # No worker may push before all servers are ready.
        if self._comm.rank == 0:
            self._open_sessions(self._shards)
            self._client.pass_on_ready(first, self._ranks[1:])
        else:
            self._client.await_ready(first, self._ranks[0])

    def _number(self, shards: "Sequence[_Shard]") -> int:
        """Give shards new sessions; return the number of the first."""
        first = self._next_session
        self._next_session += len(shards)
        for session, shard in enumerate(shards, first):
            self._client.exchanges.pop(shard.session, None)
            shard.session, shard.version = session, 0
            self._client.exchanges[session] = self
        return first

    def _open_sessions(self, shards: "Sequence[_Shard]", replace: Replace | None = None) -> None:
        messages = []
        for shard in shards:
            group, ranks = self._everyone.size // self._comm.size, self._ranks
            config = self._strategy.config(self._workers, shard.elements, self._dtype.name, group, ranks)
            body = np.frombuffer(config.to_json(), np.uint8)
            self._client.send(shard.server, [MessageType.OPEN, shard.session], body)
            messages.append((shard.server, [MessageType.LOAD, shard.session], shard.of(self._weights).view(np.uint8)))
            self._count_bytes(shard, sent=body.size + shard.elements * self._dtype.itemsize, received=0)
        self._client.call(messages, MessageType.READY, replace)

    def close(self) -> None:
        """Close the session, so that the servers delete the weights."""
        if not self.is_open:
            return
        for shard in self._shards:
            if self._comm.rank == 0:
                self._client.send(shard.server, [MessageType.CLOSE, shard.session])
            self._client.exchanges.pop(shard.session, None)
            shard.session = -1

    def buffer_for(self, session: int, kind: MessageType, size: int) -> np.ndarray | None:
        """Return the array for the body of a server's message: weights are received in place."""
        if self._comm.survives:
            return None  # the server may die before all of them have come
        for shard in self._shards:
            if shard.session == session and kind in (MessageType.WEIGHTS, MessageType.FINAL):
                target = shard.of(self._weights).view(np.uint8)
                return target if target.size == size else None
        return None

    # -- a step -------------------------------------------------------------------------------------------------------

    def combine(self, step_input: StepInput) -> list[np.ndarray]:
        """Push the update of a step, and pull the servers' weights. Not collective.

        Args:
            step_input: this worker's weights after its own step. If they are not finite, the update is not sent.

        Returns:
            The servers' weights: new arrays of the shapes of the specs.

        Raises:
            ExchangeError: if a server did not answer within the time limit.
            WireError: if a server could not decode the update.
            HvdxError: after `MAX_SKIPPED_STEPS` refused updates in a row.
        """
        calls = self.push(step_input)
        begin = time.perf_counter()
        answers = self._client.call(calls, MessageType.WEIGHTS, self._replacing(lambda moved: []))
        return self.pull(answers, time.perf_counter() - begin)

    def push(self, step_input: StepInput) -> list[Call]:
        """Return the messages that push the update of a step; see `combine`."""
        begin = time.perf_counter()
        for update, now, pulled in zip(self._update_views, step_input.tensors, self._weight_views, strict=True):
            np.subtract(now, pulled, out=update)
        valid = step_input.finite and is_finite(self._update)
        if not valid:
            self._reason = f"it held NaN or infinity{self._locate_nonfinite(step_input)}"
        bodies = self._encode() if valid else None
        messages: list[Call] = []
        for i, shard in enumerate(self._shards):
            body = None if bodies is None else bodies[i]
            messages.append(
                (shard.server, [MessageType.PUSH, shard.session, shard.version, int(body is not None)], body)
            )
            self._count_bytes(shard, 0 if body is None else body.size)
        self.telemetry.encoding += time.perf_counter() - begin
        return messages

    def pull(self, answers: Mapping[int, Message], seconds: float) -> list[np.ndarray]:
        """Return the servers' weights; see `combine`.

        Args:
            answers: answers to the messages of `push`, by session.
            seconds: seconds from these messages to the answers.
        """
        begin, counts = time.perf_counter(), self.telemetry
        held, all_accepted = 0.0, True
        for shard in self._shards:
            if self._comm.survives and shard.session not in answers:
                continue  # its server has died, and another one has its weights
            self._receive(shard, answers[shard.session])
            _, _, _, staleness, accepted, waited, *_ = answers[shard.session].header
            all_accepted = all_accepted and bool(accepted)
            held = max(held, waited / 1e6)
            if accepted:
                counts.staleness.add(staleness)
        counts.steps += 1
        self._count_outcome(all_accepted)
        result = [w.copy() for w in self._weight_views]
        counts.waiting += min(held, seconds)
        counts.exchanging += max(seconds - held, 0.0)
        counts.decoding += time.perf_counter() - begin
        return result

    def _receive(self, shard: "_Shard", answer: Message) -> None:
        shard.version = answer.header[2]
        if self._comm.survives:
            assert answer.body is not None
            shard.of(self._weights).view(np.uint8)[:] = answer.body

    def _encode(self) -> list[np.ndarray] | None:
        """Return the encoded update for each shard; None if the codec refuses the update."""
        if self._codec is None:
            self.telemetry.messages += self._update.nbytes
            return [shard.of(self._update).view(np.uint8) for shard in self._shards]
        if self._single is not self._update:
            self._single[:] = self._update
        bodies: list[np.ndarray] = []
        for shard in self._shards:
            try:
                body, shard.state = self._codec.encode([shard.of(self._single)], shard.state)
            except UpdateError as error:
                # The whole update is dropped, so the residuals of the shards before this one are restored.
                for encoded, message in zip(self._shards, bodies, strict=False):
                    if hasattr(encoded.state, "residual"):
                        residual = encoded.state.residual
                        self._codec.decode([message], [residual])
                        np.subtract(residual, encoded.of(self._single), out=residual)
                variable, element = find(self.specs, shard.begin + error.element)
                self._reason = UpdateError(error.problem, variable, element).within(self.specs[variable].name)
                return None
            bodies.append(body)
        self.telemetry.messages += sum(body.size for body in bodies)
        return bodies

    def _locate_nonfinite(self, step_input: StepInput) -> str:
        """Return a text that names the variable with NaN or infinity, if known."""
        if not step_input.finite:
            return f" in the gradient of {step_input.blamed}" if step_input.blamed else ""
        bad = np.flatnonzero(~np.isfinite(self._update))
        return f" in the update of {self.specs[find(self.specs, int(bad[0]))[0]].name}" if bad.size else ""

    def _count_outcome(self, accepted: bool) -> None:
        """Count a refused update; after an accepted one, restart the count of refusals in a row."""
        if accepted:
            self._skips = 0
            return
        rank = self._rank
        self._skipped(
            True,
            lambda again: f"step {self.telemetry.steps} of rank {rank}: its update was refused{again}: {self._reason}.",
            lambda: f"{MAX_SKIPPED_STEPS} updates in a row of rank {rank} were refused; the last: {self._reason}. If "
            "the training has diverged, lower the learning rate, clip gradients, or check the data of that rank.",
        )

    def _count_bytes(self, shard: "_Shard", sent: int, received: int | None = None) -> None:
        """Count a message to a server and its answer, which holds the shard's weights unless `received` is given."""
        if shard.server != self._rank:
            self.telemetry.sent += sent + HEADER_BYTES
            self.telemetry.received += HEADER_BYTES
            self.telemetry.received += shard.elements * self._dtype.itemsize if received is None else received

    def flush(self) -> list[np.ndarray] | None:
        """Wait until all workers have flushed; return the final weights, the same on all workers. Collective.

        The final weights include every update of every worker. The flush ends the session: `begin` must be called
        before the next step.
        """
        if not self.is_open:
            return None
        begin = time.perf_counter()
        if self._comm.survives:
            answers = self._flush_together()
        else:
            answers = self._client.call(self.finish(), MessageType.FINAL)
        return self.final(answers, time.perf_counter() - begin)

    def finish(self, shards: "Sequence[_Shard] | None" = None) -> list[Call]:
        """Return the messages that tell the servers that this worker has flushed.

        Args:
            shards: some of the shards; None for all.
        """
        shards = self._shards if shards is None else shards
        for shard in shards:
            self._count_bytes(shard, 0)
        return [(shard.server, [MessageType.FLUSH, shard.session], None) for shard in shards]

    def final(self, answers: Mapping[int, Message], seconds: float) -> list[np.ndarray]:
        """Return the final weights, and close the session; see `flush`.

        Args:
            answers: answers to the messages of `finish`, by session.
            seconds: seconds from these messages to the answers.
        """
        self.telemetry.ending += seconds
        self.restart_timer()
        servers = tuple(
            (shard.server, *answers[shard.session].header[2:6], *(t / 1e6 for t in answers[shard.session].header[6:8]))
            for shard in self._shards
        )
        if any(updates or refused for _, _, updates, _, refused, *_ in servers):
            self.telemetry.servers = servers
            # Each update was pushed to every shard, so the largest count is the number of refused updates.
            self.telemetry.refused += int(max(refused for _, _, _, _, refused, *_ in servers))
        for shard in self._shards:
            # Add the traffic of this rank's own server with the other ranks.
            sent, received = self._client.traffic(shard.session)
            self.telemetry.sent += sent
            self.telemetry.received += received
        self.close()
        return [w.copy() for w in self._weight_views]

    # -- servers that die ---------------------------------------------------------------------------------------------

    def _begin_together(self) -> None:
        """Open the sessions, while servers or workers may die. Collective."""
        if any(other is not self for other in self._client.exchanges.values()):
            raise ConfigError.on_all_ranks(
                "HVDX_SURVIVE=1: parameter_server: expected one optimiser with one list of variables, got several. Do: "
                "hvdx run --max-restarts N in place of --survive."
            )
        self._open_together(self._shards)

    def _open_together(self, shards: "Sequence[_Shard]") -> None:
        """Open sessions at servers that live, with the weights of the first worker. Collective."""

        def stop(gone: Set[int], answers: Mapping[int, Message]) -> Sequence[Call]:
            if any(shard.server in gone for shard in shards):
                raise _ServerDiedError
            return []

        is_open = False
        while not is_open:
            world = list(self._comm.world_ranks)
            living = [shard.server for shard in self._shards if shard.server in world] or world
            for number, shard in enumerate(shards):
                if shard.session >= 0 and self._comm.rank == 0:
                    self._client.send(shard.server, [MessageType.CLOSE, shard.session])
                if shard.server not in world:
                    shard.server = living[number % len(living)]
            self._number(shards)
            mine = self._comm.rank == 0
            if mine:
                try:
                    self._open_sessions(shards, stop)
                except _ServerDiedError:
                    mine = False
            # No worker may push before all servers are ready. If the first worker has died, another one begins again.
            opened = self._comm.all_gather_object(mine, "opening the servers")
            needed = {world[0], *(shard.server for shard in shards)}
            is_open = any(opened) and needed <= {*self._comm.world_ranks}

    def _rescue(self) -> "list[_Shard]":
        """Move the shards of servers that have died to others; return these shards. Collective.

        They go on with the weights of the worker that pulled the newest version.
        """
        moved = set[int]()
        while True:
            versions = self._comm.all_gather_object([shard.version for shard in self._shards], "the servers that live")
            world = list(self._comm.world_ranks)
            lost = [i for i, shard in enumerate(self._shards) if shard.server not in world]
            if not lost:
                return [self._shards[i] for i in sorted(moved)]
            for i in lost:
                shard, newest = self._shards[i], max(theirs[i] for theirs in versions)
                source = world[[theirs[i] for theirs in versions].index(newest)]
                now = self._comm.world_ranks
                part = shard.of(self._weights)
                (values,) = self._comm.broadcast([part], now.index(source) if source in now else 0, "a shard")
                part[:] = np.asarray(values)
                if self._comm.rank == 0:
                    _log.warning(
                        f"the server at rank {shard.server} has died. Its {shard.elements / self._n:.0%} of the "
                        f"weights go on as rank {source} pulled them after {newest} updates; later ones are lost."
                    )
            moved.update(lost)
            self._open_together([self._shards[i] for i in lost])

    def _replacing(self, again: "Callable[[list[_Shard]], list[Call]]") -> Replace | None:
        """Return the function that moves the shards of servers that die while this worker waits for answers.

        Args:
            again: function from these shards to messages for their new servers.
        """

        def replace(gone: Set[int], answers: Mapping[int, Message]) -> list[Call]:
            if not any(shard.server in gone for shard in self._shards):
                return []
            self._receive_all(answers)
            return again(self._rescue())

        return replace if self._comm.survives else None

    def _receive_all(self, answers: Mapping[int, Message]) -> None:
        for shard in self._shards:
            if shard.session in answers:
                self._receive(shard, answers[shard.session])

    def _flush_together(self) -> dict[int, Message]:
        """Return the answers of all servers to a flush, while servers may die. Collective."""
        answers, calls = dict[int, Message](), self.finish()
        while calls:
            answers |= self._client.call(calls, MessageType.FINAL, self._replacing(self.finish))
            self._receive_all(answers)
            # A server may have died after it answered some of the workers.
            calls = self.finish(self._rescue())
        return answers

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def residuals(self) -> list[np.ndarray]:
        residuals = [shard.state.residual for shard in self._shards if hasattr(shard.state, "residual")]
        return views(np.concatenate(residuals) if residuals else np.zeros(self._n, np.float32), self.specs)

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        """Add tensors to the residual; a no-op for codecs without a residual."""
        flat = np.concatenate([np.ravel(t) for t in tensors])
        for shard in self._shards:
            if hasattr(shard.state, "residual"):
                np.add(shard.state.residual, shard.of(flat), out=shard.state.residual)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the codec's state of each shard, such as residuals. The weights are saved with the model."""
        states = [shard.state for shard in self._shards if shard.state is not None]
        return {f"{i}.{name}": value for i, state in enumerate(states) for name, value in state.arrays().items()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        shards, residual = joined_residual(state)
        if shards not in (0, len(self._shards)):
            state = {"residual": residual}
        codec = self._codec
        if codec is None or not shards + ("residual" in state):
            return
        for i, shard in enumerate(self._shards):
            mine = {k.removeprefix(f"{i}."): v for k, v in state.items() if k.startswith(f"{i}.")}
            if "residual" in state:  # `merge` made it, or another division into shards saved it
                mine = codec.init([shard.elements]).arrays() | {"residual": shard.of(state["residual"])}
            shard.state = codec.restore(mine, [shard.elements])
