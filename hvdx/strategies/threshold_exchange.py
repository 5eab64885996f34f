"""What a step sends under the threshold strategy: how much, and encoded how."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hvdx import codec as codecs
from hvdx.comm import Comm, Received
from hvdx.comm.launcher import kernel_threads
from hvdx.errors import ConfigError, UpdateError
from hvdx.strategies import link
from hvdx.strategies.base import TensorSpec
from hvdx.strategies.compiling import prepare_together
from hvdx.strategies.driver import MessageExchange
from hvdx.strategies.warmup import Warmup

# How often density="auto" is reconsidered, and by how much it has to differ to be changed.
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
    overhead: float
    start: Warmup
    threads: int | None

    def make_codec(self, density: float | None, threads: int | None) -> codecs.Threshold:
        """Make the codec of these options."""


class ThresholdExchange(MessageExchange):
    """See `hvdx.strategies.driver.MessageExchange`.

    Args:
        strategy: its options, the same on all ranks.
        comm: the ranks.
        specs: the tensors, of the same shapes on all ranks.
        lookahead: see `Threshold`.
    """

    def __init__(self, strategy: Options, comm: Comm, specs: Sequence[TensorSpec], lookahead: float):
        super().__init__(comm, specs, "the updates", strategy.op, strategy.overlap)
        self._strategy, self._lookahead, self._warned = strategy, lookahead, False
        self._threads = strategy.threads or kernel_threads(comm.local_size)
        self._sizes = [s.elements for s in specs]
        given = strategy.target_density
        self._density = _UNKNOWN if isinstance(given, str) else given
        self._codec = strategy.make_codec(self._density, self._threads)
        self._bfloat16 = codecs.make("bf16")
        self._state: Any = self._codec.init(self._sizes)
        self._compile(comm)
        self._estimate = link.Estimate(link.probe(self._channel)) if given == "auto" else None
        # Bytes that came in at a rank in the step before.
        self._before = 0

    def _compile(self, comm: Comm) -> None:
        """Have the kernels compiled and called before anything is timed, and wait until they are everywhere."""
        prepare_together(self._codec, comm, "Threshold")
        trial, out = np.ones(1, np.float32), np.zeros(1, np.float32)
        message, _ = self._codec.encode([trial], self._codec.init([1]))
        self._codec.decode([message], [out])
        self._channel.exchange([])

    @property
    def residual(self) -> np.ndarray:
        """See `MessageExchange.residual`."""
        residual: np.ndarray = self._state.residual
        return residual

    # -- a step ---------------------------------------------------------------------------------------------------

    def combine(self, tensors: Sequence[np.ndarray], finite: bool) -> list[np.ndarray]:
        """See `HostExchange.combine`."""
        result = super().combine(tensors, finite)
        self._consider()
        return result

    def active(self) -> int:
        """See `MessageExchange.active`: during a warm-up by workers not all."""
        return self._strategy.start.active(self._step, self._size)

    def codec(self) -> codecs.Codec[Any]:
        """See `MessageExchange.codec`: bfloat16 in a dense warm-up."""
        start = self._strategy.start
        if start.dense(self._step):
            return self._bfloat16
        density = None if self._density is None else start.density(self._step, self._density)
        if density != self._codec.target_density:
            self._codec = self._strategy.make_codec(density, self._threads)
        return self._codec

    def encode(self, tensors: Sequence[np.ndarray], codec: codecs.Codec[Any]) -> np.ndarray:
        """See `MessageExchange.encode`."""
        if codec is self._bfloat16:
            return self._encode_dense(tensors)
        message = self._encode_ahead(tensors)
        counts = self.telemetry
        entries = int(self._state.sent.sum())
        counts.entries += entries
        counts.encoded += self._n
        counts.entry_bytes += message.size
        counts.density, counts.tau = entries / max(self._n, 1), float(np.median(self._state.taus))
        self._warn_of_size(message.size)
        return message

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
        """Encode (1 + lookahead) times the update, and take lookahead times it off the residual again.

        That adds update + lookahead * (update - the update before) without keeping the one before.
        """
        if not self._lookahead:
            message, self._state = self._codec.encode(tensors, self._state)
            return message
        for tensor, scaled in zip(tensors, self._out, strict=True):
            np.multiply(tensor, np.float32(1 + self._lookahead), out=scaled)
        message, self._state = self._codec.encode(self._out, self._state)
        np.multiply(self._flat, np.float32(self._lookahead / (1 + self._lookahead)), out=self._flat)
        np.subtract(self._state.residual, self._flat, out=self._state.residual)
        return message

    def _encode_dense(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """Everything, as bfloat16; what the rounding takes away waits in the residual."""
        update = np.concatenate([np.ravel(t) for t in tensors]) + self._state.residual
        finite = np.isfinite(update)
        if not finite.all():
            element = int(np.argmin(finite))
            raise UpdateError("NaN in the update", self._variable_at(element), element)
        message, _ = self._bfloat16.encode([update], self._bfloat16.init([self._n]))
        self._bfloat16.decode([message], [update], -1.0)
        self._state.residual[:] = update
        self.telemetry.density, self.telemetry.tau = 1.0, 0.0
        return message

    # -- what the link affords ----------------------------------------------------------------------------------------

    def observe(self, received: Received) -> None:
        """See `MessageExchange.observe`."""
        counts = self.telemetry
        if counts.steps % _RESIDUAL_EVERY == 1 and counts.tau:
            counts.residual = self.residual_norm()
        if self._estimate is not None:
            sizes = [m.size for m in received.messages]
            # The transfers are those of the step before: each rank's own clock comes with the next header.
            self._estimate.observe(float(np.median(received.headers[:, 1])) / 1e9, self._before, link.slowest(
                received.headers[:, 2].tolist()))  # fmt: skip
            self._before = sum(sizes) - min(sizes, default=0)

    def residual_norm(self) -> float:
        """Root mean square of what has not been sent, in tau of the last step."""
        residual, tau = self._state.residual, float(np.median(self._state.taus))
        return float(np.sqrt(np.dot(residual, residual) / max(residual.size, 1))) / tau if tau else 0.0

    def _consider(self) -> None:
        """Ask anew what the link affords, where that decides; alike on all ranks."""
        if self._estimate is None or (self._step != _FIRST_LOOK and self._step % _LOOK_EVERY):
            return
        self._estimate.refresh()
        computing = self._estimate.computing
        if computing is None or self._density is None:
            return
        new = link.affordable_density(self._estimate.link, self._size, self._n, self._strategy.overhead * computing)
        if not 1 / _WORTH_A_CHANGE < new / self._density < _WORTH_A_CHANGE:
            self._density = new

    # -- what it remembers ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """See `Exchange.state_dict`."""
        density = np.nan if self._density is None else self._density
        encoder = {f"codec.{k}": v for k, v in self._state.arrays().items()}
        return super().state_dict() | encoder | {"density": np.array(density)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """See `Exchange.load_state_dict`."""
        if "step" not in state or "density" not in state:
            raise ConfigError(f"threshold: the saved state has no step and density; it holds {sorted(state)}.")
        mine = {k.removeprefix("codec."): v for k, v in state.items() if k.startswith("codec.")}
        self._state = self._codec.restore(mine, self._sizes)
        super().load_state_dict(state)
        if self._strategy.target_density == "auto":
            self._density = float(state["density"])
