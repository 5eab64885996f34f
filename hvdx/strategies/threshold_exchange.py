"""One step after another of the threshold strategy: encode, exchange, and add what all ranks sent."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from hvdx import codec
from hvdx.comm import Comm, Received
from hvdx.comm.launcher import kernel_threads
from hvdx.errors import ConfigError, HvdxError, UpdateError
from hvdx.strategies import link
from hvdx.strategies.base import Exchange, TensorSpec, views
from hvdx.strategies.compiling import prepare_together
from hvdx.strategies.telemetry import Telemetry
from hvdx.strategies.warmup import Warmup

T = TypeVar("T")

# What a rank says of its step in the head of its message.
_FINE, _NOT_FINITE, _REFUSED = 0, 1, 2
# After so many skipped steps in a row the training is over: it would never come back.
_PATIENCE = 100
# How often density="link" is reconsidered, and by how much it has to differ to be changed.
_FIRST_LOOK, _LOOK_EVERY, _WORTH_A_CHANGE = 8, 64, 1.15
# The density before the link and the length of a step are known.
_UNKNOWN = 1 / 32
# How often the residual is measured: a pass over all of it.
_RESIDUAL_EVERY = 64


class Options(Protocol):
    """The options that an exchange reads; see `hvdx.strategies.Threshold`."""

    tau: float | None
    target_density: float | str | None
    op: str
    overlap: bool
    budget: float
    start: Warmup
    threads: int | None

    def make_codec(self, density: float | None, threads: int | None) -> "codec.Threshold":
        """Make the codec of these options."""


@dataclass
class _Sent:
    """A message on its way.

    Attributes:
        dense: it is a bfloat16 message of all elements.
        active: ranks whose messages count.
        message: this rank's; it must not change before it is decoded.
        status: of this rank.
        step: its number, from 0.
        update: what this rank added to its residual for it.
    """

    dense: bool
    active: int
    message: np.ndarray
    status: int
    step: int
    update: Sequence[np.ndarray] = ()


class ThresholdExchange(Exchange):
    """See `hvdx.strategies.Exchange`.

    Args:
        strategy: its options, the same on all ranks.
        comm: the ranks.
        specs: the tensors, of the same shapes on all ranks.
        lead: see `Threshold`.
    """

    def __init__(self, strategy: Options, comm: Comm, specs: Sequence[TensorSpec], lead: float):
        self._strategy, self._size, self._rank = strategy, comm.size, comm.rank
        self._channel = comm.channel("the updates")
        self._threads = strategy.threads or kernel_threads(comm.local_size)
        self._sizes = [s.elements for s in specs]
        self._names = [s.name for s in specs]
        self._n = sum(self._sizes)
        self._lead = lead
        # What is handed out; while an update is encoded, where it is scaled.
        self._flat = np.zeros(self._n, np.float32)
        self._out = views(self._flat, specs)
        self._specs = list(specs)
        self._thread = ThreadPoolExecutor(1, "hvdx-exchange") if strategy.overlap else None
        self._pending: tuple[_Sent, Future[Received]] | None = None
        self._held: np.ndarray | None = None
        self._step = self._skips = 0
        self._warned = False
        self._density = self._first_density()
        self._codec = strategy.make_codec(self._density, self._threads)
        self._bfloat16 = codec.make("bf16")
        self._state: Any = self._codec.init(self._sizes)
        self._compile(comm)
        self._estimate = link.Estimate(link.probe(self._channel)) if strategy.target_density == "link" else None
        self._left: float | None = None
        self._computed = 0.0
        self._before = 0
        self._last: Received | None = None
        self.telemetry = Telemetry(elements=self._n)

    def _compile(self, comm: Comm) -> None:
        """Have the kernels compiled and called before anything is timed, and wait until they are everywhere."""
        prepare_together(self._codec, comm, "Threshold")
        trial, out = np.ones(1, np.float32), np.zeros(1, np.float32)
        message, _ = self._codec.encode([trial], self._codec.init([1]))
        self._codec.decode([message], [out])
        self._channel.exchange([])

    def _first_density(self) -> float | None:
        given = self._strategy.target_density
        return _UNKNOWN if isinstance(given, str) else given

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, tensors: Sequence[np.ndarray], finite: bool = True) -> list[np.ndarray]:
        """See `Exchange.step`."""
        if self._left is not None:
            self._computed = time.perf_counter() - self._left
            self.telemetry.computing += self._computed
        # Before the next update is encoded: a step that was skipped leaves the residual as it was.
        late = self._arrived()
        sent = self._clock("encoding", lambda: self._encode(tensors, finite))
        head = [sent.status, round(1e9 * self._computed), round(1e9 * (self._last.seconds if self._last else 0))]
        if self._thread is None:
            received = self._channel.exchange(head, sent.message)
            late = (sent, received) if self._count(sent, received) else None
        result = self._clock("decoding", lambda: self._due(late))
        if self._thread is not None:
            # Not before: it writes its messages where the late ones were.
            self._pending = sent, self._thread.submit(self._channel.exchange, head, sent.message)
        self._step += 1
        self._consider()
        self._left = time.perf_counter()
        return result

    def resume(self) -> None:
        """See `Exchange.resume`."""
        self._left = None

    @property
    def unsent(self) -> list[np.ndarray]:
        """See `Exchange.unsent`."""
        return views(self._state.residual, self._specs)

    def owe(self, tensors: Sequence[np.ndarray]) -> None:
        """See `Exchange.owe`."""
        for residual, tensor in zip(self.unsent, tensors, strict=True):
            np.add(residual, tensor, out=residual)

    def flush(self) -> list[np.ndarray] | None:
        """See `Exchange.flush`."""
        if self._pending is None and self._held is None:
            return None
        return self._clock("decoding", lambda: self._due(self._arrived()))

    def hold(self) -> None:
        """See `Exchange.hold`."""
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
        out = self._decode(what)
        if self._held is not None:
            np.add(self._flat, self._held, out=self._flat)
            self._held = None
        return out

    def _decode(self, what: tuple[_Sent, Received] | None) -> list[np.ndarray]:
        """What all ranks sent comes to; zeros for nothing."""
        self._flat.fill(0)
        if what is not None:
            sent, received = what
            scale = 1.0 / sent.active if self._strategy.op == "mean" else 1.0
            self._codec_of(sent).decode(received.messages[: sent.active], self._out, scale)
        return self._out

    def _codec_of(self, sent: _Sent) -> codec.Codec[Any]:
        """What a message was encoded with."""
        return self._bfloat16 if sent.dense else self._codec

    def _encode(self, tensors: Sequence[np.ndarray], finite: bool) -> _Sent:
        start = self._strategy.start
        active = start.active(self._step, self._size)
        status = _FINE if finite else _NOT_FINITE
        nothing = np.zeros(0, np.uint8)
        if self._rank >= active:
            # It does not count, NaN or not.
            return _Sent(False, active, nothing, _FINE, self._step)
        if start.dense(self._step):
            return self._encode_dense(tensors, status)
        density = None if self._density is None else start.density(self._step, self._density)
        if density != self._codec.target_density:
            self._codec = self._strategy.make_codec(density, self._threads)
        try:
            message = self._encode_ahead(tensors)
        except UpdateError as error:
            name = self._names[error.variable]
            print(f"hvdx: rank {self._rank}, step {self._step + 1}: {name}: {error}", file=sys.stderr, flush=True)
            return _Sent(False, active, nothing, _REFUSED, self._step)
        counts = self.telemetry
        entries = int(self._state.sent.sum())
        counts.entries += entries
        counts.encoded += self._n
        counts.entry_bytes += message.size
        counts.density, counts.tau = entries / max(self._n, 1), float(np.median(self._state.taus))
        self._warn_of_size(message.size)
        return _Sent(False, active, message, status, self._step, self._kept(tensors))

    def _warn_of_size(self, size: int) -> None:
        """Say once that compressing takes more bytes than not to: a fixed tau far below the updates does that."""
        if size > 4 * self._n + 1000 and not self._warned:
            self._warned = True
            print(
                f"hvdx: rank {self._rank}: a message of {size:,} bytes, where float32 takes {4 * self._n:,}: "
                f"tau={self._strategy.tau} is too small for these updates. Raise it, or give target_density instead.",
                file=sys.stderr,
                flush=True,
            )

    def _encode_ahead(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """Encode (1 + lead) times the update, and take lead times it off the residual again.

        That adds update + lead * (update - the update before) without keeping the one before.
        """
        if not self._lead:
            message, self._state = self._codec.encode(tensors, self._state)
            return message
        for tensor, scaled in zip(tensors, self._out, strict=True):
            np.multiply(tensor, np.float32(1 + self._lead), out=scaled)
        message, self._state = self._codec.encode(self._out, self._state)
        np.multiply(self._flat, np.float32(self._lead / (1 + self._lead)), out=self._flat)
        np.subtract(self._state.residual, self._flat, out=self._state.residual)
        return message

    def _encode_dense(self, tensors: Sequence[np.ndarray], status: int) -> _Sent:
        """Everything, as bfloat16; what the rounding takes away waits in the residual."""
        update = np.concatenate([np.ravel(t) for t in tensors]) + self._state.residual
        if not np.isfinite(update).all():
            print(f"hvdx: rank {self._rank}, step {self._step + 1}: NaN in the update", file=sys.stderr, flush=True)
            return _Sent(True, self._size, np.zeros(0, np.uint8), _REFUSED, self._step)
        message, _ = self._bfloat16.encode([update], self._bfloat16.init([self._n]))
        self._bfloat16.decode([message], [update], -1.0)
        self._state.residual[:] = update
        self.telemetry.density, self.telemetry.tau = 1.0, 0.0
        return _Sent(True, self._size, message, status, self._step, self._kept(tensors))

    def _kept(self, tensors: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """A step's update, until it is known whether the step is skipped: TensorFlow's arrays end with the step."""
        return tensors if self._thread is None else [t.copy() for t in tensors]

    def _take_back(self, sent: _Sent) -> None:
        """Leave the residual as it was before a step that all ranks skip.

        Its update is dropped everywhere: a run of skipped steps, all taken at the same weights, would otherwise be
        added at once when it ends.
        """
        if sent.message.size:
            self._codec_of(sent).decode([sent.message], [self._state.residual])
            for tensor, residual in zip(sent.update, self.unsent, strict=True):
                np.subtract(residual, tensor, out=residual)

    def _say_skipped(self, statuses: np.ndarray, step: int) -> None:
        self.telemetry.skipped += 1
        self._skips += 1
        ranks = np.flatnonzero(statuses).tolist()
        listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        if self._skips > _PATIENCE:
            raise HvdxError(
                f"{_PATIENCE} steps in a row were skipped: NaN or infinity on {listed}. The training has diverged: "
                "lower the learning rate, clip gradients, or look at the data of that rank."
            )
        # Powers of two, so that a long series does not fill the terminal.
        if self._rank == 0 and (self._skips & (self._skips - 1)) == 0:
            again = f", {self._skips} in a row" if self._skips > 1 else ""
            print(
                f"hvdx: step {step + 1}: NaN or infinity on {listed}; all ranks skipped the step{again}.",
                file=sys.stderr,
                flush=True,
            )

    # -- what it costs, and what the link affords -------------------------------------------------------------------

    def _clock(self, what: str, work: Callable[[], T]) -> T:
        begin = time.perf_counter()
        result = work()
        setattr(self.telemetry, what, getattr(self.telemetry, what) + time.perf_counter() - begin)
        return result

    def _count(self, sent: _Sent, received: Received, shown: float | None = None) -> bool:
        """Note what an exchange cost: whether its step is to be added, and not skipped."""
        self._last = received
        counts, others = self.telemetry, self._size - 1
        head = 8 * (received.heads.shape[1] + 1)
        counts.steps += 1
        counts.messages += sent.message.size
        counts.sent += others * (sent.message.size + head)
        counts.received += sum(m.size for m in received.messages) - sent.message.size + others * head
        if shown is None:
            counts.waiting += received.waited
            counts.exchanging += received.seconds
        else:
            counts.exchanging += shown
        if counts.steps % _RESIDUAL_EVERY == 1 and counts.tau:
            counts.residual = self.residual_norm()
        self._see(received)
        if received.heads[:, 0].any():
            self._take_back(sent)
            self._say_skipped(received.heads[:, 0], sent.step)
            return False
        self._skips = 0
        return True

    def residual_norm(self) -> float:
        """Root mean square of what has not been sent, in tau of the last step."""
        residual, tau = self._state.residual, float(np.median(self._state.taus))
        return float(np.sqrt(np.dot(residual, residual) / max(residual.size, 1))) / tau if tau else 0.0

    def _see(self, received: Received) -> None:
        if self._estimate is not None:
            sizes = [m.size for m in received.messages]
            # The transfers are those of the step before: each rank's own clock comes with the next head.
            self._estimate.see(float(np.median(received.heads[:, 1])) / 1e9, self._before, link.slowest(
                received.heads[:, 2].tolist()))  # fmt: skip
            self._before = sum(sizes) - min(sizes, default=0)

    def _consider(self) -> None:
        """Ask anew what the link affords, where that decides; alike on all ranks."""
        if self._estimate is None or (self._step != _FIRST_LOOK and self._step % _LOOK_EVERY):
            return
        self._estimate.refresh()
        computing = self._estimate.computing
        if computing is None or self._density is None:
            return
        new = link.affordable_density(self._estimate.link, self._size, self._n, self._strategy.budget * computing)
        if not 1 / _WORTH_A_CHANGE < new / self._density < _WORTH_A_CHANGE:
            self._density = new

    # -- what it remembers ------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Exchange.arrays`."""
        if self._pending is not None:
            raise HvdxError("a step is still on its way: flush before saving.")
        saved = {f"codec.{k}": v for k, v in self._state.arrays().items()}
        if self._held is not None:
            saved["late"] = self._held
        density = np.nan if self._density is None else self._density
        return saved | {"step": np.array(self._step), "density": np.array(density)}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `Exchange.restore`."""
        if "step" not in arrays or "density" not in arrays:
            raise ConfigError(f"threshold: the saved state has no step and density; it holds {sorted(arrays)}.")
        mine = {k.removeprefix("codec."): v for k, v in arrays.items() if k.startswith("codec.")}
        self._state = self._codec.restore(mine, self._sizes)
        self._step = int(arrays["step"])
        late = arrays.get("late")
        if late is not None and late.size != self._n:
            raise ConfigError(f"threshold: the saved state has a step of {late.size} elements, and not of {self._n}.")
        self._held = None if late is None else np.array(late, np.float32)
        if self._strategy.target_density == "link":
            self._density = float(arrays["density"])
