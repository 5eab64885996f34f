"""Automatic choice of a strategy, by a measurement of a few steps and of the network."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdx.comm import Comm
from hvdx.comm.launcher import kernel_threads
from hvdx.strategies import link
from hvdx.strategies.all_reduce import AllReduce
from hvdx.strategies.base import Strategy, TensorSpec, ring_bytes, views
from hvdx.strategies.compiling import announce
from hvdx.strategies.driver import HostExchange
from hvdx.strategies.telemetry import Telemetry
from hvdx.strategies.threshold import Threshold

#: Number of steps to measure. The first step of an epoch is not measured: its time may include compiling.
TRIAL_STEPS = 3
# Smallest saving for which a lossy strategy is chosen, as a share of a step: fp16 over float32, threshold over both.
_WORTH_FP16, _WORTH_THRESHOLD = 0.03, 0.1
# Largest number of elements on which the codec is timed; the time of more elements is extrapolated.
_TIMED_ELEMENTS = 1 << 22
# Bytes per second at which memory is read at best, for a lower bound of the time of compression.
_MEMORY = 2e10
# Bytes per second of casts between float32 and float16.
_CASTING = 1e10


@dataclass(frozen=True)
class Measured:
    """Measurements on which the choice depends.

    Attributes:
        size: number of ranks.
        elements: number of float32 elements in a step.
        computing: seconds of computing in a step, on the slowest rank.
        network: link between the ranks.
        threads: threads of this rank's codec; None leaves the number to the codec.
    """

    size: int
    elements: int
    computing: float
    network: link.Link
    threads: int | None = None

    def dense_seconds(self, itemsize: int) -> float:
        """Return the seconds of a ring all-reduce and of the casts to float16 and back.

        The ring has 2 (N - 1) rounds with 1 / N of the elements each.

        Args:
            itemsize: bytes per element on the network: 4, or 2 for float16.
        """
        rounds = 2 * (self.size - 1)
        casting = 0.0 if itemsize == 4 else 2 * (4 + itemsize) * self.elements / _CASTING
        part = itemsize * self.elements / self.size
        return rounds * (self.network.latency + part / self.network.bandwidth) + casting

    def density(self, overhead: float) -> float:
        """Return the density whose messages take a share of a step's computing time.

        Args:
            overhead: the share.
        """
        return link.affordable_density(self.network, self.size, self.elements, overhead * self.computing)

    def threshold_seconds(self, density: float, coding: float) -> float:
        """Return the seconds of an exchange of thresholded updates: latency, N - 1 received messages, and the codec.

        Args:
            density: density of the messages.
            coding: seconds of the codec.
        """
        incoming = (self.size - 1) * link.message_bytes(self.elements, density)
        return 2 * self.network.latency + incoming / self.network.bandwidth + coding


class Auto(Strategy):
    """Automatic choice of a strategy: measure the network and a few steps, then train with the fastest strategy.

    The first steps are dense: mean gradients over MPI, without Horovod. Compression can cost accuracy, so `Threshold`
    is chosen only if it saves a tenth of a step, and fp16 only if it saves 3 %.

    Args:
        overhead: share of a step's computing time that a threshold message may take; see `Threshold`.

    Example:
        >>> Auto()
        Auto()
    """

    name = "auto"
    placement = "gradient"
    runs = "host"
    provisional = True
    remembers = False

    def __init__(self, overhead: float = 0.1):
        self.threshold = Threshold(overhead=overhead)
        self.overhead = self.threshold.overhead

    def open(self, comm: Comm, specs: Sequence[TensorSpec], momentum: float = 0.0, name: str = "") -> "TrialExchange":
        """Open the exchange of the measured steps."""
        return TrialExchange(comm, specs)

    def ready(self, exchanges: Sequence["TrialExchange"]) -> bool:
        return bool(exchanges) and all(e.ready for e in exchanges)

    def successor(self, exchanges: Sequence["TrialExchange"], comm: Comm, updates: bool) -> Strategy:
        """Choose the successor on rank 0, which prints the reason. Collective."""
        # The largest time, because the time between two exchanges of one optimiser includes the other optimisers' work.
        everyone = comm.all_gather_object(max(e.seconds for e in exchanges), "the choice of a strategy")
        chosen = None
        if comm.rank == 0:
            elements = sum(e.telemetry.elements for e in exchanges)
            threads = kernel_threads(comm.local_size)
            chosen, reason = self.decide(Measured(comm.size, elements, max(everyone), exchanges[0].network, threads))
            if isinstance(chosen, Threshold) and not updates:
                chosen = Threshold(placement="gradient", overhead=chosen.overhead)
                reason += f" This optimiser has no updates, so its gradients are compressed: {chosen}."
            print(f"hvdx: auto: {reason}", file=sys.stderr, flush=True)
        strategy: Strategy = comm.all_gather_object(chosen, "the strategy")[0]
        return strategy

    def decide(self, measured: Measured) -> tuple[Strategy, str]:
        """Return the strategy that should be the fastest, and the reason. It times the codec, so call it on one rank.

        Args:
            measured: measurements of the steps and the link.
        """
        density = measured.density(self.overhead)
        exact, half = measured.dense_seconds(4), measured.dense_seconds(2)
        saving = _WORTH_THRESHOLD * (measured.computing + min(exact, half))
        coding = 16 * measured.elements / _MEMORY
        if measured.threshold_seconds(density, coding) + saving < min(exact, half):
            # `Threshold` may be faster, so it is worth some seconds to compile and time the codec.
            coding = coding_seconds(measured.elements, measured.size, density, measured.threads)
        sparse = measured.threshold_seconds(density, coding)
        chosen: Strategy = AllReduce()
        if exact - half > _WORTH_FP16 * (measured.computing + exact):
            chosen = AllReduce(compression="fp16")
        if sparse + saving < min(exact, half):
            chosen = self.threshold
        pays = "does not pay here" if isinstance(chosen, AllReduce) else "pays"
        reason = (
            f"{measured.size} workers, {measured.network}, {measured.elements:,} parameters: a step computes "
            f"{1e3 * measured.computing:.3g} ms; an exchange should take {1e3 * exact:.3g} ms in float32, "
            f"{1e3 * half:.3g} ms in fp16, {1e3 * sparse:.3g} ms by threshold at density {density:.2g}. "
            f"Threshold compression {pays}: training with {chosen}."
        )
        return chosen, reason


class TrialExchange(HostExchange):
    """Exchange of mean gradients while steps are measured.

    Args:
        comm: the ranks.
        specs: the tensors.
    """

    def __init__(self, comm: Comm, specs: Sequence[TensorSpec]):
        super().__init__(specs, Telemetry())
        self._channel = comm.channel("the gradients")
        self._size = comm.size
        self._flat = np.zeros(self._n, np.float32)
        self.network = link.probe(self._channel)
        #: Seconds of computing in each measured step.
        self.computed: list[float] = []
        self._opened = time.perf_counter()

    def combine(self, tensors: Sequence[np.ndarray], finite: bool) -> list[np.ndarray]:
        """Return the mean gradients; NaN of one rank reaches all ranks."""
        begin = time.perf_counter()
        if self._last_end is not None:
            self.computed.append(self._computed)
        np.concatenate([np.ravel(t) for t in tensors], out=self._flat)
        self._channel.all_reduce(self._flat)
        self._flat /= self._size
        counts = self.telemetry
        counts.steps += 1
        counts.exchanging += time.perf_counter() - begin
        sent = ring_bytes(self._flat.nbytes, self._size)
        counts.sent, counts.received = counts.sent + sent, counts.received + sent
        return views(self._flat, self.specs)

    @property
    def ready(self) -> bool:
        """True after enough measured steps, or after too many steps without a measurement (epochs of one step)."""
        return len(self.computed) >= TRIAL_STEPS or self.telemetry.steps >= 3 * TRIAL_STEPS

    @property
    def seconds(self) -> float:
        """Seconds of computing in a step."""
        if self.computed:
            return float(np.median(self.computed))
        return (time.perf_counter() - self._opened - self.telemetry.exchanging) / max(self.telemetry.steps, 1)


def coding_seconds(elements: int, size: int, density: float, threads: int | None = None) -> float:
    """Return the seconds to encode an update and to decode those of all ranks, on this machine.

    Args:
        elements: number of elements of an update.
        size: number of ranks, which is the number of messages.
        density: density to aim at.
        threads: threads of the kernels.
    """
    from hvdx import codec

    timed = min(elements, _TIMED_ELEMENTS)
    update = np.random.default_rng(0).normal(size=timed).astype(np.float32)
    threshold = codec.Threshold(target_density=density, threads=threads)
    if not threshold.prepared:
        announce(threshold, "Threshold", " to measure their speed")
    threshold.prepare()
    state, out, seconds = threshold.init([timed]), [np.zeros(timed, np.float32)], []
    for _ in range(3):
        begin = time.perf_counter()
        message, state = threshold.encode([update], state)
        threshold.decode([message] * size, out, 1 / size)
        seconds.append(time.perf_counter() - begin)
    return min(seconds) * elements / timed
