"""Exchange of the threshold strategy: the density of each step, and its encoding."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np

from hvdx import codec as codecs
from hvdx.comm import Comm, Received, progress
from hvdx.comm.launcher import kernel_threads
from hvdx.errors import ConfigError, UpdateError
from hvdx.strategies import link
from hvdx.strategies.base import TensorSpec
from hvdx.strategies.compiling import prepare_together
from hvdx.strategies.step import MessageExchange
from hvdx.strategies.threshold.density import INITIAL_DENSITY, DensityControl
from hvdx.strategies.threshold.noise import NoiseEstimate
from hvdx.strategies.threshold.shards import whole_residual
from hvdx.strategies.threshold.warmup import Warmup

# Integers of a header before the sample of gradients.
_HEADER = 3
# Steps between measurements of the residual, each of which reads all of it.
_RESIDUAL_EVERY = 64


class Options(Protocol):
    """Options that the exchange reads; see `hvdx.strategies.Threshold`."""

    tau: float | None
    target_density: float | str | None
    op: str
    overlap: bool
    overhead: float
    start: Warmup
    threads: int | None

    def make_codec(
        self, density: float | None, threads: int | None, device: str, part: int | None = None, of_sum: int = 1
    ) -> codecs.Threshold:
        """Make the codec of these options."""


class ThresholdExchange(MessageExchange):
    """Exchange of one optimiser under `Threshold`.

    Args:
        strategy: options, the same on all ranks.
        comm: the ranks.
        specs: the tensors, of the same shapes on all ranks.
        lookahead: see `Threshold`.
        device: device of the tensors, of the result and of the residual; see `Strategy.device_for`.
        network: the link between the ranks, if it has been measured.
        summed: number of ranks whose updates each message adds up; see `hvdx.strategies.threshold.hosts`.
        elements: number of elements from which an automatic density starts, if it is not that of the tensors.
    """

    def __init__(
        self,
        strategy: Options,
        comm: Comm,
        specs: Sequence[TensorSpec],
        lookahead: float,
        device: str = "cpu",
        network: link.Link | None = None,
        summed: int = 1,
        elements: int | None = None,
    ):
        given = strategy.target_density
        self._density = INITIAL_DENSITY if isinstance(given, str) else given
        self._strategy, self._threads = strategy, strategy.threads or kernel_threads(comm.local_size)
        self._kind = device
        self._codec = self.make_codec(self._density)
        arrays: Any = None if device == "cpu" else self._codec.arrays
        super().__init__(comm, specs, "the updates", strategy.op, strategy.overlap, arrays)
        self._lookahead, self._warned = lookahead, False
        self._sizes = self.encoded_sizes()
        self._bfloat16 = codecs.make("bf16")
        self._state: Any = self._codec.init(self._sizes)
        self._compile(comm)
        self._noise, self._summed = NoiseEstimate(), summed
        self._control: DensityControl | None = None
        if given == "auto":
            self.network = network or link.probe(self._channel)
            messages = self.messages(comm.size)
            self._control = DensityControl(strategy.overhead, self.network, messages, elements or self._n)

    def _compile(self, comm: Comm) -> None:
        """Compile and call the kernels before anything is timed, and wait until all ranks have done so."""
        prepare_together(self._codec, comm, "Threshold")
        place = self._codec.arrays.place
        # Kernels for a GPU are compiled by their first launch, in each process.
        with nullcontext() if self._device is None else progress.compiling("the CUDA kernels of Threshold"):
            trial, out = place(np.ones(1, np.float32)), place(np.zeros(1, np.float32))
            message, _ = self._codec.encode([trial], self._codec.init([1]))
            self._codec.decode([message], [out])
        self._channel.exchange([])

    @property
    def way(self) -> str:
        """How messages travel, if it is not from each worker to all others; else ""."""
        return ""

    @property
    def residual(self) -> Any:
        return self._state.residual

    # -- a step ---------------------------------------------------------------------------------------------------

    def active(self) -> int:
        """Return the number of active workers, which is lower during a warm-up by workers."""
        return self._strategy.start.active(self._step, self._size)

    def codec(self) -> codecs.Codec[Any]:
        """Return the codec of this step; bfloat16 in a dense warm-up."""
        start = self._strategy.start
        if start.dense(self._step):
            return self._bfloat16
        density = None if self._density is None else start.density(self._step, self._density)
        if density != self._codec.target_density:
            self._codec = self.make_codec(density)
        return self._codec

    def make_codec(self, density: float | None) -> codecs.Threshold:
        """Make the codec of a density; None for a fixed tau."""
        return self._strategy.make_codec(density, self._threads, self._kind)

    def encoded_sizes(self) -> list[int]:
        """Return the numbers of elements of the arrays that the codec encodes."""
        return [s.elements for s in self.specs]

    def messages(self, size: int) -> float:
        """Return the number of messages of whole updates that a rank receives in a step from `size` ranks."""
        return size - 1

    def encode(self, tensors: Sequence[np.ndarray], codec: codecs.Codec[Any]) -> np.ndarray:
        if codec is self._bfloat16:
            return self._encode_dense(tensors)
        # With the subtraction of the previous step this adds update + lookahead * (update - previous update), and the
        # previous update need not be stored.
        message, self._state = self._codec.encode(tensors, self._state, self._lookahead)
        counts = self.telemetry
        entries = int(self._state.sent.sum())
        counts.entries += entries
        counts.encoded += self._n
        counts.entry_bytes += message.size
        counts.density, counts.tau = entries / max(self._n, 1), float(np.median(self._state.taus))
        self._warn_of_size(message.size)
        return message

    def _warn_of_size(self, size: int) -> None:
        """Warn once if messages are larger than float32 updates, which a fixed tau far below the updates causes."""
        if size > 4 * self._n + 1000 and not self._warned:
            self._warned = True
            rank = self._numbers[self._rank]
            print(
                f"hvdx: rank {rank}: a message has {size:,} bytes, the update in float32 only {4 * self._n:,}: "
                f"tau={self._strategy.tau} is too small for these updates. Raise it, or give target_density instead.",
                file=sys.stderr,
                flush=True,
            )

    def _encode_dense(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """Encode the whole update as bfloat16; the residual keeps the rounding errors."""
        fetch = self._codec.arrays.fetch
        update = np.concatenate([np.ravel(t if self._device is None else fetch(t)) for t in tensors])
        update += self.read_residual()
        finite = np.isfinite(update)
        if not finite.all():
            raise UpdateError("is NaN or infinite.", *self._find(int(np.argmin(finite))))
        message, _ = self._bfloat16.encode([update], self._bfloat16.init([self._n]))
        self._bfloat16.decode([message], [update], -1.0)
        self.write_residual(update)
        self.telemetry.density, self.telemetry.tau = 1.0, 0.0
        return message

    # -- the density --------------------------------------------------------------------------------------------------

    def observe(self, received: Received) -> None:
        if not received.headers[:, 0].any():
            self.observe_samples(received)
        computing = float(np.median(received.headers[:, 1])) / 1e9
        self._measure(computing, link.slowest(received.headers[:, 2].tolist()))

    def _measure(self, computing: float, cost: float) -> None:
        """Measure the residual if that is due, and adapt an automatic density to the seconds of a step."""
        counts = self.telemetry
        if counts.steps % _RESIDUAL_EVERY == 1 and counts.tau:
            counts.residual = self.residual_norm()
        # In a warm-up, the density is not that of the control.
        if self._control is not None and self._codec.target_density == self._control.density and counts.tau:
            self._control.observe(computing, cost)
            self._density = self._control.density

    def residual_norm(self) -> float:
        """Return the root mean square of the residual, in units of the last step's tau."""
        residual, tau = self._state.residual, float(np.median(self._state.taus))
        residual = residual if self._device is None else self._device.fetch(residual)
        return float(np.sqrt(np.dot(residual, residual) / max(residual.size, 1))) / tau if tau else 0.0

    # -- second moments -----------------------------------------------------------------------------------------------

    def observe_samples(self, received: Received) -> None:
        """Add the samples of gradients that arrived to the estimate of their noise."""
        more = np.ascontiguousarray(received.headers[:, _HEADER:])
        if more.size:
            self._noise.observe(more.view(np.float16), self._summed)

    def more_header(self) -> Sequence[int]:
        """Return the sample of this rank's gradients as float16, four in an integer."""
        if not self.sample or self._size * self._summed == 1:
            return ()
        sample = np.concatenate([np.ravel(s) for s in self.sample])
        words = np.zeros(-(-sample.size // 4) * 4, np.float16)
        # An element that float16 cannot hold becomes infinity, and the estimate leaves the sample out.
        with np.errstate(over="ignore"):
            words[: sample.size] = sample
        return words.view(np.int64).tolist()

    def scale(self, active: int) -> float:
        return super().scale(active * self._summed) * self._noise.factor(active * self._summed)

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        density = np.nan if self._density is None else self._density
        encoder = {f"codec.{k}": v for k, v in self._state.arrays().items()}
        noise = {"noise": self._noise.state.copy()} if self._noise.state[0] else {}
        return super().state_dict() | encoder | {"density": np.array(density)} | noise

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        if "step" not in state or "density" not in state:
            raise ConfigError(f"threshold: the saved state: expected step and density, got {sorted(state)}.")
        state = self.with_whole_residual(state)
        mine = {k.removeprefix("codec."): v for k, v in state.items() if k.startswith("codec.")}
        self._state = self._codec.restore(mine, self._sizes)
        # Checkpoints of optimisers without second moments, and old ones, hold none.
        self._noise.state[:] = state.get("noise", 0.0)
        super().load_state_dict(state)
        if self._strategy.target_density == "auto":
            self._density = float(state["density"])
            assert self._control is not None
            self._control.density = self._density

    def with_whole_residual(self, state: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return a saved state in which the residual of this rank also has that of its shard, if one was saved."""
        return whole_residual(state, self._rank)
