"""Choose a strategy for the network that is there: measure a few steps, model the others, take the cheapest."""

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

#: Steps that are measured. What lies before the first of an epoch, compiling for one, is not computing.
TRIAL_STEPS = 3
# What is lossy has to save this share of a step before it is taken: fp16 over float32, threshold over both.
_WORTH_FP16, _WORTH_THRESHOLD = 0.03, 0.1
# A codec on this many elements is timed; more take proportionally longer.
_TIMED_ELEMENTS = 1 << 22
# Bytes a second at which memory is read, at best: what compression could cost at the very least.
_MEMORY = 2e10
# Bytes a second at which float32 becomes float16 and the other way round.
_CASTING = 1e10


@dataclass(frozen=True)
class Measured:
    """What the choice rests on.

    Attributes:
        size: number of ranks.
        elements: float32 numbers in a step.
        computing: seconds that a step computes, on the slowest rank.
        network: the link between the ranks.
        threads: that this rank's codec may use; None leaves it to the codec.
    """

    size: int
    elements: int
    computing: float
    network: link.Link
    threads: int | None = None

    def dense_seconds(self, itemsize: int) -> float:
        """What a ring all-reduce takes: 2 (N - 1) rounds of one N-th each, and the casts of float16."""
        rounds = 2 * (self.size - 1)
        casting = 0.0 if itemsize == 4 else 2 * (4 + itemsize) * self.elements / _CASTING
        part = itemsize * self.elements / self.size
        return rounds * (self.network.latency + part / self.network.bandwidth) + casting

    def density(self, overhead: float) -> float:
        """The density whose messages take this share of a step's computing."""
        return link.affordable_density(self.network, self.size, self.elements, overhead * self.computing)

    def threshold_seconds(self, density: float, coding: float) -> float:
        """What an exchange of thresholded updates takes: latency, N - 1 messages that come in, and the codec."""
        incoming = (self.size - 1) * link.message_bytes(self.elements, density)
        return 2 * self.network.latency + incoming / self.network.bandwidth + coding


class Auto(Strategy):
    """Measure the network and a few steps, then train with the strategy that should be the fastest.

    The first steps are dense: mean gradients over MPI, without Horovod. Compression can cost accuracy, so it is taken
    only if it saves a tenth of a step.

    Args:
        overhead: the share of a step's computing that a threshold message may take, see `Threshold`.

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
        """See `Strategy.open`; of the steps that are measured."""
        return TrialExchange(comm, specs)

    def ready(self, exchanges: Sequence["TrialExchange"]) -> bool:
        """See `Strategy.ready`."""
        return bool(exchanges) and all(e.ready for e in exchanges)

    def successor(self, exchanges: Sequence["TrialExchange"], comm: Comm, updates: bool) -> Strategy:
        """See `Strategy.successor`; rank 0 says why."""
        # Between two exchanges of one optimiser lies what the others compute as well.
        everyone = comm.all_gather_object(max(e.seconds for e in exchanges), "the choice of a strategy")
        chosen = None
        if comm.rank == 0:
            elements = sum(e.telemetry.elements for e in exchanges)
            threads = kernel_threads(comm.local_size)
            chosen, reason = self.decide(Measured(comm.size, elements, max(everyone), exchanges[0].network, threads))
            if isinstance(chosen, Threshold) and not updates:
                chosen = Threshold(placement="gradient", overhead=chosen.overhead)
                reason += f" This optimiser has no updates to send: {chosen}."
            print(f"hvdx: auto: {reason}", file=sys.stderr, flush=True)
        strategy: Strategy = comm.all_gather_object(chosen, "the strategy")[0]
        return strategy

    def decide(self, measured: Measured) -> tuple[Strategy, str]:
        """The strategy that should be the fastest, and why; to be asked on one rank, since it times the codec.

        Args:
            measured: what the steps and the link showed.
        """
        density = measured.density(self.overhead)
        exact, half = measured.dense_seconds(4), measured.dense_seconds(2)
        saving = _WORTH_THRESHOLD * (measured.computing + min(exact, half))
        coding = 16 * measured.elements / _MEMORY
        if measured.threshold_seconds(density, coding) + saving < min(exact, half):
            # It might pay, so it is worth the seconds that compiling and timing the codec take.
            coding = coding_seconds(measured.elements, measured.size, density, measured.threads)
        sparse = measured.threshold_seconds(density, coding)
        chosen: Strategy = AllReduce()
        if exact - half > _WORTH_FP16 * (measured.computing + exact):
            chosen = AllReduce(compression="fp16")
        if sparse + saving < min(exact, half):
            chosen = self.threshold
        verdict = "Compression does not pay here" if isinstance(chosen, AllReduce) else "It pays"
        reason = (
            f"{measured.size} workers, {measured.network}, {measured.elements:,} parameters: a step computes "
            f"{1e3 * measured.computing:.3g} ms; to combine it should take {1e3 * exact:.3g} ms in float32, "
            f"{1e3 * half:.3g} in fp16, {1e3 * sparse:.3g} by threshold at density {density:.2g}. "
            f"{verdict}: training with {chosen}."
        )
        return chosen, reason


class TrialExchange(HostExchange):
    """Mean gradients, while steps are measured.

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
        #: Seconds that each step computed.
        self.computed: list[float] = []
        self._opened = time.perf_counter()

    def combine(self, tensors: Sequence[np.ndarray], finite: bool) -> list[np.ndarray]:
        """See `HostExchange.combine`; NaN of one rank becomes that of all."""
        begin = time.perf_counter()
        if self._left is not None:
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
        """Whether enough was measured; or where epochs are of one step, whether there is no use in waiting for it."""
        return len(self.computed) >= TRIAL_STEPS or self.telemetry.steps >= 3 * TRIAL_STEPS

    @property
    def seconds(self) -> float:
        """Seconds that a step computes."""
        if self.computed:
            return float(np.median(self.computed))
        return (time.perf_counter() - self._opened - self.telemetry.exchanging) / max(self.telemetry.steps, 1)


def coding_seconds(elements: int, size: int, density: float, threads: int | None = None) -> float:
    """Seconds to encode an update and decode everyone's, on this machine.

    Args:
        elements: of an update.
        size: number of ranks, so of messages.
        density: to aim at.
        threads: of the kernels.
    """
    from hvdx import codec

    timed = min(elements, _TIMED_ELEMENTS)
    update = np.random.default_rng(0).normal(size=timed).astype(np.float32)
    threshold = codec.Threshold(target_density=density, threads=threads)
    if not threshold.prepared:
        announce(threshold, "Threshold", ", whose speed decides")
    threshold.prepare()
    state, out, seconds = threshold.init([timed]), [np.zeros(timed, np.float32)], []
    for _ in range(3):
        begin = time.perf_counter()
        message, state = threshold.encode([update], state)
        threshold.decode([message] * size, out, 1 / size)
        seconds.append(time.perf_counter() - begin)
    return min(seconds) * elements / timed
