"""A worker's side of the parameter server: push what a step has changed, and go on with what the servers have."""

import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvdx.comm import Comm
from hvdx.comm.launcher import kernel_threads
from hvdx.errors import HvdxError, UpdateError
from hvdx.strategies.base import Exchange, TensorSpec, agree_on_strategy, agree_on_tensors, views
from hvdx.strategies.serving.messages import Kind, cut
from hvdx.strategies.serving.office import office_of
from hvdx.strategies.serving.updates import is_finite, make_codec
from hvdx.strategies.telemetry import ServerTelemetry

if TYPE_CHECKING:
    from hvdx.strategies.parameter_server import ParameterServer

# Updates in a row that may be refused before the training is given up.
_PATIENCE = 100
# Bytes of a head on the wire.
_HEAD_BYTES = 88


class ServerExchange(Exchange):
    """One worker's exchange of one list of variables; see `ParameterServer`. Collective.

    Args:
        strategy: its options.
        comm: the workers.
        specs: the variables.

    Raises:
        ReplicaError: the workers have different strategies or variables.
        ConfigError: more servers, or more updates to collect, than there are workers.
    """

    telemetry: ServerTelemetry

    def __init__(self, strategy: "ParameterServer", comm: Comm, specs: Sequence[TensorSpec]):
        self._strategy, self._comm, self._specs = strategy, comm, list(specs)
        agree_on_strategy(strategy, comm)
        agree_on_tensors(specs, comm)
        self._n = sum(s.elements for s in specs)
        self._dtype = np.dtype(np.float64 if any(s.itemsize > 4 for s in specs) else np.float32)
        ranks = strategy.server_ranks(comm)
        self._parts = dict(zip(ranks, cut(self._n, len(ranks)), strict=False))
        self._servers = list(self._parts)
        self._plans = {server: strategy.plan(comm.size, end - begin, self._dtype.name) for server, (begin, end) in
                       self._parts.items()}  # fmt: skip
        self._codec = make_codec(strategy.codec, kernel_threads(comm.local_size))
        self._states = [self._codec.init([end - begin]) for begin, end in self._parts.values()] if self._codec else []
        # As the servers had them last, and what this worker has changed since.
        self._weights, self._update = np.zeros(self._n, self._dtype), np.zeros(self._n, self._dtype)
        self._weight_views, self._update_views = views(self._weights, specs), views(self._update, specs)
        # Codecs take float32.
        self._single = self._update if self._dtype == np.float32 else np.zeros(self._n, np.float32)
        self._versions = dict.fromkeys(self._servers, 0)
        self._office, self._session = office_of(comm), -1
        self._left: float | None = None
        self._refusals = 0
        self.telemetry = ServerTelemetry(elements=self._n)

    # -- the beginning and the end of a session -----------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the servers have weights for it."""
        return self._session >= 0

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        """Give the servers the weights to begin with. Collective.

        Args:
            weights: of the shapes of the specs; worker 0's count.

        Raises:
            ExchangeError: see `Channel.exchange`.
        """
        if self._comm.rank in self._servers:
            self._office.open_server()
        self._office.sessions = max(self._comm.all_gather_object(self._office.sessions, "opening a session")) + 1
        self._session = self._office.sessions
        self._office.exchanges[self._session] = self
        for view, weight in zip(self._weight_views, weights, strict=True):
            view[...] = weight
        if self._comm.rank == 0:
            for server, (begin, end) in self._parts.items():
                plan = np.frombuffer(pickle.dumps(self._plans[server]), np.uint8)
                self._office.send(server, [Kind.OPEN, self._session], plan)
                self._office.send(server, [Kind.LOAD, self._session], self._weights[begin:end].view(np.uint8))
                self._count_bytes(server, sent=plan.size + (end - begin) * self._dtype.itemsize, received=0)
            self._office.await_answers(self._servers, Kind.READY, self._session)
        self._versions = dict.fromkeys(self._servers, 0)
        # Nobody may push before all servers are ready.
        self._comm.all_gather_object(None, "opening a session")

    def _close(self) -> None:
        """The servers may forget the weights."""
        if self._comm.rank == 0:
            for server in self._servers:
                self._office.send(server, [Kind.CLOSE, self._session])
        self._office.exchanges.pop(self._session, None)
        self._session = -1

    def place(self, sender: int, kind: Kind, size: int) -> np.ndarray | None:
        """Where the body of a server's letter goes: the weights, straight to their place."""
        begin, end = self._parts.get(sender, (0, 0))
        if kind in (Kind.WEIGHTS, Kind.FINAL) and size == (end - begin) * self._dtype.itemsize:
            return self._weights[begin:end].view(np.uint8)
        return None

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, tensors: Sequence[np.ndarray], finite: bool = True) -> list[np.ndarray]:
        """Push what a step has changed, and pull. Not collective.

        Args:
            tensors: this worker's weights after its own step, of the shapes of the specs.
            finite: False where its gradients held NaN or infinity: nothing is sent then.

        Returns:
            The servers' weights: fresh arrays of the shapes of the specs.

        Raises:
            ExchangeError: a server did not answer within the time limit.
            WireError: a server could not read what it was sent.
            HvdxError: 100 updates in a row held NaN.
        """
        begin, counts = time.perf_counter(), self.telemetry
        if self._left is not None:
            counts.computing += begin - self._left
        for update, now, before in zip(self._update_views, tensors, self._weight_views, strict=True):
            np.subtract(now, before, out=update)
        bodies = self._encoded() if finite and is_finite(self._update) else None
        encoded = time.perf_counter()
        for i, server in enumerate(self._servers):
            head = [Kind.PUSH, self._session, self._versions[server], int(bodies is not None)]
            body = None if bodies is None else bodies[i]
            self._office.send(server, head, body)
            self._count_bytes(server, 0 if body is None else body.size)
        answers = self._office.await_answers(self._servers, Kind.WEIGHTS, self._session)
        there = time.perf_counter()
        held, fine = 0.0, True
        for server, letter in answers.items():
            _, _, version, staleness, accepted, waited, *_ = letter.head
            self._versions[server] = version
            fine = fine and bool(accepted)
            held = max(held, waited / 1e6)
            if accepted:
                counts.staleness.add(staleness)
        counts.steps += 1
        self._note(fine)
        result = [w.copy() for w in self._weight_views]
        self._left = time.perf_counter()
        counts.encoding += encoded - begin
        counts.waiting += min(held, there - encoded)
        counts.exchanging += max(there - encoded - held, 0.0)
        counts.decoding += self._left - there
        return result

    def _encoded(self) -> list[np.ndarray] | None:
        """What goes to each server; None where an update cannot be sent."""
        parts = list(self._parts.values())
        if self._codec is None:
            sizes = [(end - begin) * self._dtype.itemsize for begin, end in parts]
            self.telemetry.messages += sum(sizes)
            return [self._update[begin:end].view(np.uint8) for begin, end in parts]
        if self._single is not self._update:
            self._single[:] = self._update
        bodies: list[np.ndarray] = []
        for i, (begin, end) in enumerate(parts):
            try:
                body, self._states[i] = self._codec.encode([self._single[begin:end]], self._states[i])
            except UpdateError as error:
                # A part that was encoded before it stays in its message, which is not sent; so it goes back.
                for k, message in enumerate(bodies):
                    self._keep(k, message)
                print(f"hvdx: rank {self._comm.rank}: {error}", file=sys.stderr, flush=True)
                return None
            bodies.append(body)
        self.telemetry.messages += sum(body.size for body in bodies)
        return bodies

    def _keep(self, part: int, message: np.ndarray) -> None:
        if hasattr(self._states[part], "residual"):
            self._codec.decode([message], [self._states[part].residual])

    def _note(self, fine: bool) -> None:
        """Say what was refused, in powers of two, so that a long series does not fill the terminal."""
        if fine:
            self._refusals = 0
            return
        self.telemetry.skipped += 1
        self._refusals += 1
        if self._refusals >= _PATIENCE:
            raise HvdxError(
                f"{_PATIENCE} updates in a row of rank {self._comm.rank} held NaN or infinity. The training has "
                "diverged: lower the learning rate, clip gradients, or look at the data of that rank. Workers of a "
                "parameter server go further together than one alone; so divide the learning rate by their number."
            )
        if self._refusals & (self._refusals - 1) == 0:
            again = f", {self._refusals} in a row" if self._refusals > 1 else ""
            print(
                f"hvdx: step {self.telemetry.steps}: NaN or infinity on rank {self._comm.rank}; its update was "
                f"refused{again}.",
                file=sys.stderr,
                flush=True,
            )

    def _count_bytes(self, server: int, sent: int, received: int | None = None) -> None:
        """A letter to a server, and the answer: the server's weights, unless it is said how long it is."""
        if server != self._comm.rank:
            begin, end = self._parts[server]
            self.telemetry.sent += sent + _HEAD_BYTES
            self.telemetry.received += _HEAD_BYTES
            self.telemetry.received += (end - begin) * self._dtype.itemsize if received is None else received

    def resume(self) -> None:
        """See `Exchange.resume`."""
        self._left = None

    def flush(self) -> list[np.ndarray] | None:
        """Wait until all workers have flushed: the weights with all that anybody sent, alike on all. Collective.

        It ends the session: the next step takes a new beginning.
        """
        if not self.is_open:
            return None
        for server in self._servers:
            self._office.send(server, [Kind.FLUSH, self._session])
            self._count_bytes(server, 0)
        begin = time.perf_counter()
        answers = self._office.await_answers(self._servers, Kind.FINAL, self._session)
        self.telemetry.ending += time.perf_counter() - begin
        self._left = None
        servers = []
        for server, letter in sorted(answers.items()):
            _, _, version, updates, applied, refused, working, since, *_ = letter.head
            self._versions[server] = version
            servers.append((server, version, updates, applied, refused, working / 1e6, since / 1e6))
        self.telemetry.servers = tuple(servers)
        # What this rank's own server gave to the others, and took from them.
        sent, received = self._office.traffic(self._session)
        self.telemetry.sent += sent
        self.telemetry.received += received
        self._close()
        return [w.copy() for w in self._weight_views]

    # -- what it remembers --------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> list[np.ndarray]:
        """See `Exchange.unsent`."""
        residuals = [state.residual for state in self._states if hasattr(state, "residual")]
        return views(np.concatenate(residuals) if residuals else np.zeros(self._n, np.float32), self._specs)

    def owe(self, tensors: Sequence[np.ndarray]) -> None:
        """See `Exchange.owe`; a codec that keeps nothing owes nothing."""
        flat = np.concatenate([np.ravel(t) for t in tensors])
        for state, (begin, end) in zip(self._states, self._parts.values(), strict=False):
            if hasattr(state, "residual"):
                state.residual += flat[begin:end]

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Exchange.arrays`: what the codec has not sent of each part; the weights are the model's."""
        return {f"{i}.{name}": value for i, state in enumerate(self._states) for name, value in state.arrays().items()}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `Exchange.restore`."""
        for i, (begin, end) in enumerate(self._parts.values() if self._states else ()):
            mine = {k.removeprefix(f"{i}."): v for k, v in arrays.items() if k.startswith(f"{i}.")}
            if "residual" in arrays:  # of other parts than these
                mine = self._codec.init([end - begin]).arrays() | {"residual": arrays["residual"][begin:end]}
            self._states[i] = self._codec.restore(mine, [end - begin])
