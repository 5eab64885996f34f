"""Encoder of the threshold strategy: the residual, the density of each step, and the correction for noise."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import numpy as np

from hvdx import codec as codecs
from hvdx.codec.base import Array
from hvdx.comm import Comm, progress
from hvdx.comm.launcher import kernel_threads
from hvdx.comm.memory import aligned
from hvdx.costs.types import Link
from hvdx.errors import ConfigError, UpdateError
from hvdx.log import Log
from hvdx.strategies.compiling import prepare_together
from hvdx.strategies.contract import TensorSpec
from hvdx.strategies.host_exchange import Encoded, StepInput
from hvdx.strategies.step import DeviceArrays, Encoder
from hvdx.strategies.threshold.density import INITIAL_DENSITY, MAX_PERIOD, STARVED, DensityControl
from hvdx.strategies.threshold.gradient_noise import GatheredSample, NoiseEstimate, SummedSample
from hvdx.strategies.threshold.options import START, Options

_log = Log(__name__)

# Steps whose entries are counted together, to notice an exchange that is starved.
_STARVATION_STEPS = 16
# How fast a lookahead follows the lag, which part of it pulls back, and the largest one. Found by trial on the half of
# `jobs/benchmarks/defaults.py` that is for choosing; ADR 54.
_RATE, _SHRINK, _MOST = 0.2, 0.5, 60.0


class Order(Protocol):
    """Order in which messages hold the elements of some arrays, which make up a vector."""

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each of the arrays that are encoded."""

    @property
    def shard_size(self) -> int | None:
        """Number of elements of a shard; None if messages are not split."""

    def arranged(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the arrays that are encoded, views of the given ones."""

    def origin(self, view: int, element: int) -> tuple[int, int]:
        """Return the number of the array, and the element in it, of an element of an encoded array."""

    def to_vector(self, encoded: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return the elements of all encoded arrays in the order of the vector; see `Shards`."""

    def from_vector(self, vector: np.ndarray) -> np.ndarray:
        """Return the elements of a vector in the order of the encoded arrays."""


class VectorOrder:
    """The order of the vector itself.

    Args:
        sizes: number of elements of each of the arrays.
    """

    shard_size: int | None = None

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)

    def arranged(self, arrays: Sequence[Array]) -> Sequence[Array]:
        return list(arrays)

    def origin(self, view: int, element: int) -> tuple[int, int]:
        return view, element

    def to_vector(self, encoded: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return encoded

    def from_vector(self, vector: np.ndarray) -> np.ndarray:
        return vector


class Lookahead:
    """Lookahead of an encoder: fixed, or such that what a rank has sent is neither behind its updates nor ahead.

    The residual is the sum of a rank's updates less what it has sent. Its projection on an update is the lag: the
    delay of the messages, in units of this update. The lookahead rises with the lag, and falls where updates turn
    round, before it could amplify them. No property of the optimiser enters, and ranks may have different lookaheads.

    Args:
        fixed: the lookahead, if the user gave one.

    Attributes:
        value: lookahead of the last update.

    Example:
        >>> lookahead = Lookahead()
        >>> for _ in range(100):
        ...     value = lookahead.follow(3.0 - lookahead.value)  # three updates behind without a lookahead
        >>> round(value, 2)
        2.0
    """

    def __init__(self, fixed: float | None = None):
        self.fixed, self.value = fixed, fixed or 0.0

    def follow(self, lag: float) -> float:
        """Return the lookahead of an update with this lag; a lag of NaN says nothing."""
        if self.fixed is None and math.isfinite(lag):
            self.value = min(max(self.value + _RATE * (lag - _SHRINK * self.value), 0.0), _MOST)
        return self.value

    def restore(self, value: float) -> None:
        """Go on with a saved value."""
        if self.fixed is None:
            self.value = value


class ThresholdEncoder(Encoder):
    """Encoder of one optimiser under `Threshold`.

    Args:
        options: options, the same on all ranks.
        comm: the ranks. Making the encoder is collective: its kernels are compiled.
        specs: the tensors, of the same shapes on all ranks.
        order: order of the elements in messages; that of the tensors by default.
        device: device of the tensors, of the result and of the residual; see `Strategy.device_for`.

    Attributes:
        options: see above.
        codec: codec of the last step.
        state: state of the codec.
        noise: estimate of the noise of gradients.
    """

    def __init__(
        self,
        options: Options,
        comm: Comm,
        specs: Sequence[TensorSpec],
        order: Order | None = None,
        device: str = "cpu",
    ):
        target = options.target_density
        order = order or VectorOrder([s.elements for s in specs])
        self.options, self._specs, self._order = options, list(specs), order
        self._lookahead = Lookahead(options.lookahead)
        self._threads, self._kind = options.threads or kernel_threads(comm.local_size), device
        self._density = INITIAL_DENSITY if isinstance(target, str) else target
        self.codec = self._make_codec(self._density)
        self.device: DeviceArrays | None = None if device == "cpu" else self.codec.arrays  # type: ignore[assignment]
        self.state: codecs.ThresholdState = self.codec.init(order.sizes)
        self.noise = NoiseEstimate()
        self._control: DensityControl | None = None
        self._n, self._rank = sum(s.elements for s in specs), comm.world_ranks[comm.rank]
        # Median of the thresholds in the last step.
        self._tau, self._warned = 0.0, False
        # Entries of each of the last steps with entries of this rank; whether there is nobody to learn from.
        self._entries: list[int] = []
        self._alone, self._starved = comm.size == 1, False
        # Memory of `unsent`, which TensorFlow takes without a copy.
        self._unsent: np.ndarray | None = None
        self._compile(comm)

    def _compile(self, comm: Comm) -> None:
        """Compile and call the kernels before anything is timed."""
        prepare_together(self.codec, comm, "Threshold")
        place = self.codec.arrays.place
        # Kernels for a GPU are compiled by their first launch, in each process.
        with nullcontext() if self.device is None else progress.compiling("the CUDA kernels of Threshold"):
            trial, out = place(np.ones(1, np.float32)), place(np.zeros(1, np.float32))
            message, _ = self.codec.encode([trial], self.codec.init([1]))
            self.codec.decode([message], [out])

    def follow(self, network: Link, messages: float, elements: int) -> None:
        """Adapt the density to the cost of the exchange from here on.

        Args:
            network, messages, elements: see `DensityControl`.
        """
        longest = MAX_PERIOD if self.options.period == "auto" else 1
        self._control = DensityControl(self.options.overhead, network, messages, elements, longest)

    def _make_codec(self, density: float | None) -> codecs.Threshold:
        return self.options.make_codec(density, self._threads, self._kind, self._order.shard_size)

    # -- a step -------------------------------------------------------------------------------------------------------

    @property
    def period(self) -> int:
        if isinstance(self.options.period, int):
            return self.options.period
        return 1 if self._control is None else self._control.period

    def _codec_of(self, step: int) -> codecs.Threshold:
        """Return the codec of a step, the same on all ranks."""
        density = self._density
        if self._control is not None:
            if step == 0 and self.options.start.steps:
                density = self._density = START
                self._control.restore(START)
        elif density is not None and step < self.options.start.steps:
            density = self.options.start.density(step, density)
        if density != self.codec.target_density:
            self.codec = self._make_codec(density)
        return self.codec

    def encode(self, step_input: StepInput, step: int) -> Encoded:
        tensors, codec = step_input.tensors, self._codec_of(step)
        # With the subtraction of the previous step this adds update + lookahead * (update - previous update), and the
        # previous update need not be stored.
        try:
            message, self.state = codec.encode(self._order.arranged(tensors), self.state, self._lookahead.follow)
        except UpdateError as error:
            raise UpdateError(error.problem, *self._order.origin(error.variable, error.element)) from None
        entries, self._tau = self.state.sent, float(self.state.tau)
        self._warn_of_size(message.size)
        starved, density = self._starved_steps(entries), entries / max(self._n, 1)
        return Encoded(message, codec, tensors, entries, density, self._tau, starved)

    def silent(self, step: int) -> Encoded:
        return Encoded(np.zeros(0, np.uint8), self._codec_of(step), tau=float(self.state.tau))

    def _warn_of_size(self, size: int) -> None:
        """Warn once if messages are larger than float32 updates, which a fixed tau far below the updates causes."""
        if size > 4 * self._n + 1000 and not self._warned:
            self._warned = True
            _log.warning(
                f"rank {self._rank}: a message has {size:,} bytes, the update in float32 only {4 * self._n:,}: "
                f"tau={self.options.tau} is too small for these updates. Raise it, or give target_density instead."
            )

    def _starved_steps(self, entries: int) -> int:
        """Return the number of steps that are found to be starved, this one included, and say so once on rank 0.

        Args:
            entries: entries of this rank's message.
        """
        self._entries.append(entries)
        if len(self._entries) < _STARVATION_STEPS:
            return 0
        density, self._entries = sum(self._entries) / (_STARVATION_STEPS * max(self._n, 1)), []
        target = self.options.target_density
        # A small density that the user chose is none of our business, unless the messages do not have it.
        limit = STARVED if isinstance(target, str) else min(STARVED, target / 4) if target else 0.0
        if density > limit or self._alone:
            return 0
        if not self._starved and self._rank == 0:
            self._starved = True
            remedy = "Lower tau, or give a target_density"
            if isinstance(target, str):
                remedy = f"Give a density, such as target_density=0.01, or more than overhead={self.options.overhead:g}"
            elif target:
                remedy = "Give a larger target_density, or a warm-up such as warmup='density:200'"
            _log.warning(
                f"threshold: the exchange is starved: in the last {_STARVATION_STEPS} steps rank 0 sent "
                f"{100 * density:.2g} % of the elements, so the workers hardly learn from each other. {remedy}."
            )
        return _STARVATION_STEPS

    def roll_back(self, encoded: Encoded) -> None:
        residual = self.state.residual
        if self.device is not None:
            encoded.codec.decode([encoded.message], [residual])
            self.device.subtract(encoded.tensors[0], residual)
            return
        encoded.codec.decode([encoded.message], [residual])
        at = 0
        for array in map(np.asarray, self._order.arranged(encoded.tensors)):
            part = np.asarray(residual)[at : at + array.size]
            np.subtract(part, array.reshape(-1), out=part)
            at += array.size

    # -- density and noise --------------------------------------------------------------------------------------------

    def correction(self, ranks: int) -> float:
        """Return the factor for optimisers such as Adam; 1 without samples of their gradients."""
        return self.noise.factor(ranks) if self.noise.state[0] else 1.0

    def observe_sample(self, sample: object) -> None:
        if isinstance(sample, GatheredSample | SummedSample):
            sample.add_to(self.noise)
        elif sample is not None:
            raise TypeError(f"sample: expected GatheredSample or SummedSample, got {type(sample).__name__}.")

    def observe_cost(self, computing: float, costs: Sequence[float]) -> None:
        # The same on all ranks, those included that sent nothing.
        if self._control is not None and self.codec.target_density == self._control.density:
            self._control.observe(computing, costs)
            self._density = self._control.density

    # -- the residual, and the rest of the state ----------------------------------------------------------------------

    def residual_rms(self) -> float:
        residual, tau = self.state.residual, float(self.state.tau)
        residual = residual if self.device is None else self.device.fetch(residual)
        return float(np.sqrt(np.dot(residual, residual) / max(residual.size, 1))) / tau if tau else 0.0

    def read_residual(self) -> np.ndarray:
        residual = self.state.residual if self.device is None else self.device.fetch(self.state.residual)
        return self._order.to_vector(np.asarray(residual))

    def unsent(self, allocate: Callable[[int], Array] | None) -> Array:
        if self.device is None:
            residual = np.asarray(self.state.residual)
            if self._unsent is None:
                self._unsent = aligned(0 if self._order.shard_size is None else residual.size)
            return self._order.to_vector(residual, self._unsent)
        out = (allocate or self.device.zeros)(self._n)
        self.device.copy(self.state.residual, self.device.view(out))
        return out

    def write_residual(self, values: np.ndarray) -> None:
        if self.device is None:
            np.asarray(self.state.residual)[:] = self._order.from_vector(values)
        else:
            self.device.assign(values, self.state.residual)

    def arrays(self) -> dict[str, np.ndarray]:
        density = np.nan if self._density is None else self._density
        codec = {f"codec.{k}": v for k, v in self.state.arrays().items()}
        if self._order.shard_size is not None:
            codec |= {"codec.residual": self.read_residual()}
            codec |= {"codec.lengths": np.array([self._n] * (self._n > 0), np.int64)}
        noise = {"noise": self.noise.state.copy()} if self.noise.state[0] else {}
        period = {"period": np.array(self.period)} if self.options.period == "auto" else {}
        lookahead = {"lookahead": np.array(self._lookahead.value)}
        return codec | {"density": np.array(density)} | period | lookahead | noise

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if "density" not in state:
            raise ConfigError(f"threshold: the saved state: expected a density, got {sorted(state)}.")
        mine = {k.removeprefix("codec."): v for k, v in state.items() if k.startswith("codec.")}
        if self._order.shard_size is not None and "residual" in mine and mine["residual"].size == self._n:
            mine["residual"] = self._order.from_vector(mine["residual"])
            mine["lengths"] = np.array([mine["residual"].size], np.int64)
        self.state = self.codec.restore(mine, self._order.sizes)
        # Checkpoints of optimisers without second moments, and old ones, hold none.
        self.noise.state[:] = state.get("noise", 0.0)
        self._lookahead.restore(float(state.get("lookahead", 0.0)))
        if self._control is not None:
            self._density = float(state["density"])
            # Old checkpoints have no period.
            self._control.restore(self._density, int(state.get("period", 1)))
