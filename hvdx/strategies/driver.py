"""What exchanges on the host do alike.

`HostExchange` has the clocks and tells of steps that are skipped. `MessageExchange` adds what all strategies need that
send every rank every rank's message: the vote on NaN, skipping, overlap, byte counts.
"""

import abc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hvdx.comm import Comm, Received
from hvdx.errors import ConfigError, HvdxError, UpdateError
from hvdx.strategies.base import Exchange, TensorSpec, views
from hvdx.strategies.telemetry import Telemetry

if TYPE_CHECKING:
    from hvdx.codec import Codec  # which brings Numba, and not all strategies need it

T = TypeVar("T")

# What a rank says of its step in the header of its message.
_FINE, _NOT_FINITE, _REFUSED = 0, 1, 2
#: After so many skipped steps in a row the training is over: it would never come back.
PATIENCE = 100


class HostExchange(Exchange):
    """An exchange that runs on the host; a subclass has `combine`, and overrides what else differs.

    Args:
        specs: the tensors.
        telemetry: where to count.

    Attributes:
        telemetry: what it cost so far.
        blamed: for a step that is not finite, the variable whose gradient held NaN or infinity; "" if it is not known.
    """

    def __init__(self, specs: Sequence[TensorSpec], telemetry: Telemetry):
        self.specs, self.telemetry, self.blamed = list(specs), telemetry, ""
        self._n = self.telemetry.elements = sum(s.elements for s in specs)
        # When the last step ended; None where the next one's beginning tells nothing of how long a step computes.
        self._left: float | None = None
        self._computed = 0.0
        self._skips = 0

    @abc.abstractmethod
    def combine(self, tensors: Sequence[np.ndarray], finite: bool) -> list[np.ndarray]:
        """Do what `Exchange.step` says, without the clock of what lies between two steps."""

    def step(self, tensors: Sequence[np.ndarray], finite: Any = True) -> list[np.ndarray]:
        """See `Exchange.step`."""
        if self._left is not None:
            self._computed = time.perf_counter() - self._left
            self.telemetry.computing += self._computed
        result = self.combine(tensors, bool(finite))
        self._left = time.perf_counter()
        return result

    def restart_timer(self) -> None:
        """Restart the clock of computing before a run of steps."""
        self._left = None

    @property
    def is_open(self) -> bool:
        """Whether the next step may come; else `begin` has to come before it, where the placement is "weights"."""
        return True

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        """Take the weights to begin with, where the placement is "weights" and it is not open. Collective.

        Args:
            weights: of the shapes of the specs; rank 0's count.
        """

    def renew(self) -> None:
        """Forget what an exception ended, on some ranks perhaps before it had begun. Collective."""

    @property
    def residuals(self) -> list[np.ndarray]:
        """What this rank has not sent of its tensors: float32 arrays of the shapes of the specs, not to be changed."""
        return [np.zeros(s.shape, np.float32) for s in self.specs]

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        """Add to what is unsent; nothing happens where nothing is kept back.

        Args:
            tensors: float32 arrays of the shapes of the specs.
        """

    def drain(self) -> None:
        """Wait for what is on its way, and keep it for the next step, which will not know the difference. Collective.

        Unlike after `flush`, the training goes on as if nobody had asked.
        """

    def _variable_at(self, element: int) -> int:
        """Which of the tensors an element of them all belongs to."""
        ends = np.cumsum([s.elements for s in self.specs])
        return int(np.searchsorted(ends, element, side="right"))

    def _skipped(self, speaks: bool, said: Callable[[str], str], given_up: Callable[[], str]) -> None:
        """Count a step that was skipped, and say so in powers of two, so that a long series does not fill the terminal.

        Args:
            speaks: whether this rank does.
            said: what to say, made of words on how many there were in a row.
            given_up: what to raise when there were 100.
        """
        self.telemetry.skipped += 1
        self._skips += 1
        if self._skips >= PATIENCE:
            raise HvdxError(given_up())
        if speaks and (self._skips & (self._skips - 1)) == 0:
            again = f", {self._skips} in a row" if self._skips > 1 else ""
            print(f"hvdx: {said(again)}", file=sys.stderr, flush=True)


@dataclass
class _Sent:
    """A message on its way.

    Attributes:
        message: this rank's; it must not change before it is decoded.
        codec: what it was encoded with.
        active: ranks whose messages count.
        status: of this rank.
        step: its number, from 0.
        update: what this rank added to its residual for it.
    """

    message: np.ndarray
    codec: "Codec[Any]"
    active: int
    status: int
    step: int
    update: Sequence[np.ndarray] = ()


class MessageExchange(HostExchange):
    """Sends every rank every rank's message, and adds them up in rank order; a subclass has `encode`.

    All ranks decide by what travels in the headers of messages, so that they decide alike without another exchange. A
    step in which one rank has NaN is skipped by all, and leaves the residual as it was.

    Args:
        comm: the ranks.
        specs: the tensors.
        what: what travels, for messages.
        op: "mean" of what the ranks sent, or their "sum".
        overlap: let messages travel while the next step is computed; they are added one step late.
    """

    def __init__(self, comm: Comm, specs: Sequence[TensorSpec], what: str, op: str = "mean", overlap: bool = False):
        super().__init__(specs, Telemetry())
        self._rank, self._size, self._op = comm.rank, comm.size, op
        self._channel = comm.channel(what)
        # What is handed out; a subclass may write to it while it encodes.
        self._flat = np.zeros(self._n, np.float32)
        self._out = views(self._flat, specs)
        self._thread = ThreadPoolExecutor(1, "hvdx-exchange") if overlap else None
        self._pending: tuple[_Sent, Future[Received]] | None = None
        self._held: np.ndarray | None = None
        self._step = 0
        self._last: Received | None = None

    # -- what a subclass has ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def codec(self) -> "Codec[Any]":
        """Return the codec of this step, which is that of all ranks; asked before `encode`."""

    @abc.abstractmethod
    def encode(self, tensors: Sequence[np.ndarray], codec: "Codec[Any]") -> np.ndarray:
        """Make the message of a step: uint8[bytes].

        Args:
            tensors: float32 arrays of the shapes of the specs.
            codec: of this step.

        Raises:
            UpdateError: they cannot be encoded, such as for NaN: all ranks skip the step.
        """

    @property
    def residual(self) -> np.ndarray | None:
        """float32[elements]: what has not been sent, which `encode` adds to its tensors; None for none."""
        return None

    def active(self) -> int:
        """Return the number of ranks whose messages count in this step: those from 0 on."""
        return self._size

    def observe(self, received: Received) -> None:
        """Look at the headers and messages of all ranks, the same on every rank; headers hold status and nanoseconds.

        Args:
            received: headers are [status, computing, the transfer before].
        """

    # -- a step -------------------------------------------------------------------------------------------------------

    def combine(self, tensors: Sequence[np.ndarray], finite: bool) -> list[np.ndarray]:
        """See `HostExchange.combine`."""
        # Before the next update is encoded: a step that was skipped leaves the residual as it was.
        late = self._arrived()
        sent = self._clock("encoding", lambda: self._encode(tensors, finite))
        header = [sent.status, round(1e9 * self._computed), round(1e9 * (self._last.seconds if self._last else 0))]
        if self._thread is None:
            received = self._channel.exchange(header, sent.message)
            late = (sent, received) if self._count(sent, received) else None
        result = self._clock("decoding", lambda: self._due(late))
        if self._thread is not None:
            # Not before: it writes its messages where the late ones were.
            self._pending = sent, self._thread.submit(self._channel.exchange, header, sent.message)
        self._step += 1
        return result

    def _encode(self, tensors: Sequence[np.ndarray], finite: bool) -> _Sent:
        codec, active = self.codec(), self.active()
        sent = _Sent(np.zeros(0, np.uint8), codec, active, _FINE, self._step)
        if self._rank >= active:
            return sent  # it does not count, NaN or not
        try:
            sent.message = self.encode(tensors, codec)
        except UpdateError as error:
            where = f"rank {self._rank}, step {self._step + 1}: {self.specs[error.variable].name}"
            print(f"hvdx: {where}: {error}", file=sys.stderr, flush=True)
            sent.status = _REFUSED
            return sent
        sent.status = _FINE if finite else _NOT_FINITE
        # TensorFlow's arrays end with the step, and whether this one is skipped is known later.
        sent.update = tensors if self._thread is None else [t.copy() for t in tensors]
        return sent

    def flush(self) -> list[np.ndarray] | None:
        """See `Exchange.flush`."""
        if self._pending is None and self._held is None:
            return None
        return self._clock("decoding", lambda: self._due(self._arrived()))

    def drain(self) -> None:
        """See `HostExchange.drain`."""
        if self._pending is not None:
            self._clock("decoding", lambda: self._due(self._arrived()))
            self._held = self._flat.copy()

    def _arrived(self) -> tuple[_Sent, Received] | None:
        """The step that was on its way, if there was one, and if it is to be added."""
        if self._pending is None:
            return None
        (sent, future), self._pending = self._pending, None
        begin = time.perf_counter()
        received = future.result()
        # What of the exchange the computation did not hide.
        return (sent, received) if self._count(sent, received, time.perf_counter() - begin) else None

    def _due(self, what: tuple[_Sent, Received] | None) -> list[np.ndarray]:
        """What is to be added now: what all ranks sent, and what was held."""
        self._flat.fill(0)
        if what is not None:
            sent, received = what
            scale = 1.0 / sent.active if self._op == "mean" else 1.0
            sent.codec.decode(received.messages[: sent.active], self._out, scale)
        if self._held is not None:
            np.add(self._flat, self._held, out=self._flat)
            self._held = None
        return self._out

    # -- what is counted ----------------------------------------------------------------------------------------------

    def _clock(self, what: str, work: Callable[[], T]) -> T:
        begin = time.perf_counter()
        result = work()
        setattr(self.telemetry, what, getattr(self.telemetry, what) + time.perf_counter() - begin)
        return result

    def _count(self, sent: _Sent, received: Received, shown: float | None = None) -> bool:
        """Note what an exchange cost; return whether its step is to be added, and not skipped."""
        self._last = received
        counts, others = self.telemetry, self._size - 1
        header = 8 * (received.headers.shape[1] + 1)
        counts.steps += 1
        counts.messages += sent.message.size
        counts.sent += others * (sent.message.size + header)
        counts.received += sum(m.size for m in received.messages) - sent.message.size + others * header
        if shown is None:
            counts.waiting += received.waited
            counts.exchanging += received.seconds
        else:
            counts.exchanging += shown
        self.observe(received)
        if received.headers[:, 0].any():
            self._take_back(sent)
            self._say_skipped(received.headers[:, 0], sent.step)
            return False
        self._skips = 0
        return True

    def _take_back(self, sent: _Sent) -> None:
        """Leave the residual as it was before a step that all ranks skip.

        Its update is dropped everywhere: a run of skipped steps, all taken at the same weights, would otherwise be
        added at once when it ends.
        """
        if sent.message.size and self.residual is not None:
            sent.codec.decode([sent.message], [self.residual])
            for tensor, residual in zip(sent.update, self.residuals, strict=True):
                np.subtract(residual, tensor, out=residual)

    def _say_skipped(self, statuses: np.ndarray, step: int) -> None:
        ranks = np.flatnonzero(statuses).tolist()
        listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        self._skipped(
            self._rank == 0,
            lambda again: f"step {step + 1}: NaN or infinity on {listed}; all ranks skipped the step{again}.",
            lambda: f"{PATIENCE} steps in a row were skipped: NaN or infinity on {listed}. The training has diverged: "
            "lower the learning rate, clip gradients, or look at the data of that rank.",
        )

    # -- what it remembers --------------------------------------------------------------------------------------------

    @property
    def residuals(self) -> list[np.ndarray]:
        """See `HostExchange.residuals`."""
        return super().residuals if self.residual is None else views(self.residual, self.specs)

    def add_to_residual(self, tensors: Sequence[np.ndarray]) -> None:
        """See `HostExchange.add_to_residual`."""
        if self.residual is not None:
            for residual, tensor in zip(self.residuals, tensors, strict=True):
                np.add(residual, tensor, out=residual)

    def state_dict(self) -> dict[str, np.ndarray]:
        """See `Exchange.state_dict`; a subclass adds what it remembers itself."""
        if self._pending is not None:
            raise HvdxError("a step is still on its way: flush before saving.")
        return ({} if self._held is None else {"late": self._held}) | {"step": np.array(self._step)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See `Exchange.load_state_dict`; a subclass restores what it remembers itself."""
        if "step" not in state:
            raise ConfigError(f"expected a saved state with a step, got {sorted(state)}.")
        late = state.get("late")
        if late is not None and late.size != self._n:
            raise ConfigError(f"the saved state has a step of {late.size} elements, and not of {self._n}.")
        self._step = int(state["step"])
        self._held = None if late is None else np.array(late, np.float32)
