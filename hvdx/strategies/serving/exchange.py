"""Exchange of a worker with the parameter servers: push the update of a step, and pull the current weights."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdx.comm import Comm, Message
from hvdx.comm.launcher import kernel_threads
from hvdx.errors import UpdateError
from hvdx.strategies.compiling import prepare_together
from hvdx.strategies.contract import TensorSpec, views
from hvdx.strategies.host_exchange import MAX_SKIPPED_STEPS, HostExchange, StepInput, find
from hvdx.strategies.serving.client import Call
from hvdx.strategies.serving.messages import MessageType
from hvdx.strategies.serving.update_codecs import is_finite, joined_residual, make_codec
from hvdx.strategies.serving.worker_sessions import Options, SurvivingSessions, WorkerSessions, answered
from hvdx.strategies.telemetry import ServerTelemetry


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

    telemetry: ServerTelemetry

    def __init__(self, strategy: Options, comm: Comm, specs: Sequence[TensorSpec]):
        super().__init__(specs, ServerTelemetry())
        dtype = np.dtype(np.float64 if any(s.itemsize > 4 for s in specs) else np.float32)
        self._codec = make_codec(strategy.codec, kernel_threads(comm.local_size))
        if self._codec is not None:
            prepare_together(self._codec, comm, "ParameterServer")
        kind = SurvivingSessions if comm.survives else WorkerSessions
        self._sessions = kind(strategy, comm, self._n, dtype, self._count)
        self._shards = self._sessions.shards
        # State of the codec, by shard.
        self._states: list[Any] = [
            self._codec.init([shard.elements]) if self._codec else None for shard in self._shards
        ]
        # The change that this worker has made since it pulled the weights; the same in float32, the dtype of codecs.
        self._update = np.zeros(self._n, dtype)
        self._single = self._update if dtype == np.float32 else np.zeros(self._n, np.float32)
        self._weight_views, self._update_views = views(self._sessions.weights, specs), views(self._update, specs)
        self._reason = ""

    # -- begin and end of a session -----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if the servers hold weights for this exchange."""
        return self._sessions.is_open

    def renew(self) -> None:
        self._sessions.renew()

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        """Load worker 0's weights into the servers; the other workers wait until the servers have them.

        Args:
            weights: arrays of the shapes of the specs; those of worker 0 are used.

        Raises:
            ExchangeError: if worker 0 or a server did not answer within the time limit.
        """
        self.close()  # an exception may have left a session open
        for view, weight in zip(self._weight_views, weights, strict=True):
            view[...] = weight
        self._sessions.open()

    def close(self) -> None:
        """Close the session, so that the servers delete the weights."""
        self._sessions.close()

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
        answers = self._sessions.push(calls)
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
            self._sessions.count(shard, 0 if body is None else body.size, shard.of(self._update).nbytes)
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
        for shard, answer in answered(self._shards, answers):
            self._sessions.receive(shard, answer)
            _, _, _, staleness, accepted, waited, *_ = answer.header
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

    def _encode(self) -> list[np.ndarray] | None:
        """Return the encoded update for each shard; None if the codec refuses the update."""
        if self._codec is None:
            self.telemetry.messages += self._update.nbytes
            return [shard.of(self._update).view(np.uint8) for shard in self._shards]
        if self._single is not self._update:
            self._single[:] = self._update
        bodies: list[np.ndarray] = []
        for i, shard in enumerate(self._shards):
            try:
                body, self._states[i] = self._codec.encode([shard.of(self._single)], self._states[i])
            except UpdateError as error:
                # The whole update is dropped, so the residuals of the shards before this one are restored.
                for encoded, state, message in zip(self._shards, self._states, bodies, strict=False):
                    if hasattr(state, "residual"):
                        residual = state.residual
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
        rank = self._sessions.rank
        self._skipped(
            True,
            lambda again: f"step {self.telemetry.steps} of rank {rank}: its update was refused{again}: {self._reason}.",
            lambda: f"{MAX_SKIPPED_STEPS} updates in a row of rank {rank} were refused; the last: {self._reason}. If "
            "the training has diverged, lower the learning rate, clip gradients, or check the data of that rank.",
        )

    def _count(self, sent: int, received: int) -> None:
        self.telemetry.sent += sent
        self.telemetry.received += received

    def flush(self) -> list[np.ndarray] | None:
        """Wait until all workers have flushed; return the final weights, the same on all workers. Collective.

        The final weights include every update of every worker. The flush ends the session: `begin` must be called
        before the next step.
        """
        if not self.is_open:
            return None
        begin = time.perf_counter()
        answers = self._sessions.flush()
        return self.final(answers, time.perf_counter() - begin)

    def finish(self) -> list[Call]:
        """Return the messages that tell the servers that this worker has flushed."""
        return self._sessions.flush_calls(self._shards)

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
        self._sessions.count_served()
        self.close()
        return [w.copy() for w in self._weight_views]

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def residuals(self) -> list[np.ndarray]:
        residuals = [state.residual for state in self._states if hasattr(state, "residual")]
        return views(np.concatenate(residuals) if residuals else np.zeros(self._n, np.float32), self.specs)

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        """Add tensors to the residual; a no-op for codecs without a residual."""
        flat = np.concatenate([np.ravel(t) for t in tensors])
        for shard, state in zip(self._shards, self._states, strict=True):
            if hasattr(state, "residual"):
                np.add(state.residual, shard.of(flat), out=state.residual)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the codec's state of each shard, such as residuals. The weights are saved with the model."""
        states = [state for state in self._states if state is not None]
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
            self._states[i] = codec.restore(mine, [shard.elements])
