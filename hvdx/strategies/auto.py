"""Automatic choice of a strategy, by a measurement of a few steps and of the network."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from hvdx.comm import Comm
from hvdx.comm.launcher import kernel_threads, own_cores
from hvdx.costs.link import probe
from hvdx.costs.measure import measure_codec
from hvdx.costs.model import Situation
from hvdx.costs.sizes import ring_bytes
from hvdx.costs.types import Codec, Link, Machine, Prediction
from hvdx.log import Log
from hvdx.strategies.all_reduce import AllReduce
from hvdx.strategies.compiling import announce
from hvdx.strategies.contract import Exchange, Strategy, TensorSpec, views
from hvdx.strategies.host_exchange import HostExchange, StepInput
from hvdx.strategies.telemetry import Telemetry
from hvdx.strategies.threshold import Threshold

_log = Log(__name__)
if TYPE_CHECKING:
    from hvdx.codec.base import Array

#: Number of steps to measure. The first step of an epoch is not measured: its time may include compiling.
TRIAL_STEPS = 3
# Smallest saving for which a lossy strategy is chosen, as a share of a step: fp16 over float32, threshold over both.
_WORTH_FP16, _WORTH_THRESHOLD = 0.03, 0.2
#: Smallest ratio of the samples per second of all workers to those of one worker, for which several are worth it.
WORTH_WORKERS = 1.1


class Auto(Strategy):
    """Automatic choice of a strategy: measure the network and a few steps, then train with the fastest strategy.

    The first steps are dense: mean gradients over MPI, without Horovod. Compression can cost accuracy, so `Threshold`
    is chosen only if it saves a fifth of a step, and fp16 only if it saves 3 %.

    Args:
        overhead: share of a step's computing time that a threshold message may take; see `Threshold`.

    Example:
        >>> Auto()
        Auto()
    """

    name = "auto"
    placement = "gradient"
    runs = "host"
    survives = True  # as all do that it chooses among
    provisional = True
    persists_between_fits = False

    def __init__(self, overhead: float = 0.1):
        self.threshold = Threshold(overhead=overhead)
        self.overhead = self.threshold.overhead

    def open(self, comm: Comm, specs: Sequence[TensorSpec], name: str = "") -> "TrialExchange":
        """Open the exchange of the measured steps."""
        return TrialExchange(comm, specs)

    def ready(self, exchanges: "Sequence[Exchange[Array]]") -> bool:
        trials = cast(Sequence[TrialExchange], exchanges)
        return bool(trials) and all(e.ready for e in trials)

    def successor(self, exchanges: "Sequence[Exchange[Array]]", comm: Comm, updates: bool) -> Strategy:
        """Choose the successor on rank 0, which prints the reason. Collective."""
        trials = cast(Sequence[TrialExchange], exchanges)

        def choose() -> tuple[Strategy, str]:
            # The largest time, because the time between two exchanges of one optimiser includes the other optimisers'
            # work.
            seconds = max(comm.all_gather_object(max(e.seconds for e in trials), "the choice of a strategy"))
            mine = self._choose(trials, comm, seconds, updates) if comm.rank == 0 else None
            found = comm.all_gather_object(mine, "the strategy")[0]
            assert found is not None  # that of rank 0
            return found

        strategy, reason = comm.complete(choose)
        if comm.rank == 0:
            _log.info(f"auto: {reason}")
        return strategy

    def _choose(
        self, trials: "Sequence[TrialExchange]", comm: Comm, seconds: float, updates: bool
    ) -> tuple[Strategy, str]:
        """Return the successor and the reason, after steps that take these seconds to compute."""
        tensors = tuple(spec.elements for e in trials for spec in e.specs)
        # The link of all ranks was measured with the messages of all, also of those that share a host.
        link = trials[0].network
        situation = Situation(comm.size, tensors, seconds, link, cores=own_cores(comm.local_size))
        if len(set(comm.hosts)) == 1:
            machine = Machine(message=link.latency, transport=link.bandwidth)
            situation = replace(situation, machine=machine, per_host=comm.size)
        chosen, reason = self.decide(situation, kernel_threads(comm.local_size))
        if isinstance(chosen, Threshold) and not updates:
            chosen = Threshold(placement="gradient", overhead=chosen.overhead)
            reason += f" The updates of this optimiser cannot be compressed, so its gradients are: {chosen}."
        return chosen, reason

    def decide(self, situation: Situation, threads: int | None = None) -> tuple[Strategy, str]:
        """Return the strategy that should be the fastest, and the reason. It times the codec, so call it on one rank.

        Args:
            situation: measurements of the steps and the link, on a machine of default speeds.
            threads: threads of this rank's codec; None leaves the number to the codec.
        """
        half_precision = AllReduce(compression="fp16")
        exact, half = AllReduce().predict(situation), half_precision.predict(situation)
        dense = min(exact.overhead, half.overhead)
        saving = _WORTH_THRESHOLD * (situation.computing + dense)
        sparse = self._predict_threshold(situation)
        if sparse.overhead + saving < dense:
            # `Threshold` may be faster, so it is worth some seconds to compile and time the codec.
            codec = codec_speed(situation.elements, threads)
            sparse = self._predict_threshold(replace(situation, machine=replace(situation.machine, codec=codec)))
        chosen: Strategy = AllReduce()
        best = exact
        if exact.overhead - half.overhead > _WORTH_FP16 * exact.seconds:
            chosen, best = half_precision, half
        if sparse.overhead + saving < dense:
            chosen, best = self.threshold, sparse
        pays = "does not pay here" if isinstance(chosen, AllReduce) else "pays"
        reason = (
            f"{situation.workers} workers, {situation.link}, {situation.elements:,} parameters: a step computes "
            f"{1e3 * situation.computing:.3g} ms; an exchange should take {1e3 * exact.overhead:.3g} ms in float32, "
            f"{1e3 * half.overhead:.3g} ms in fp16, {1e3 * sparse.overhead:.3g} ms by threshold ({sparse.note}). "
            f"Threshold compression {pays}: training with {chosen}."
        )
        return chosen, reason + self._declined(situation, best)

    def _predict_threshold(self, situation: Situation) -> Prediction:
        found = self.threshold.predict(situation)
        assert found is not None  # its density is "auto"
        return found

    def _declined(self, situation: Situation, best: Prediction) -> str:
        """Return a sentence if one worker alone would be as fast; "" otherwise."""
        ratio = situation.workers * situation.computing / best.seconds
        if situation.workers == 1 or (ratio >= WORTH_WORKERS and not best.starved):
            return ""
        why = f"{situation.workers} workers take {ratio:.2g} times its samples per second"
        if best.starved:
            why = "at so low a density, the workers hardly learn from each other"
        return f" One worker alone would be as fast: {why}. `hvdx advise` shows other strategies."


class TrialExchange(HostExchange):
    """Exchange of mean gradients while steps are measured.

    Args:
        comm: the ranks.
        specs: the tensors.
    """

    def __init__(self, comm: Comm, specs: Sequence[TensorSpec]):
        super().__init__(specs, Telemetry())
        self._comm, self._channel = comm, comm.channel("the gradients")
        self._flat = np.zeros(self._n, np.float32)
        self.network: Link = probe(self._channel)
        #: Seconds of computing in each measured step.
        self.computed: list[float] = []
        self._opened = time.perf_counter()

    def combine(self, step_input: StepInput) -> list[np.ndarray]:
        """Return the mean gradients; NaN of one rank reaches all ranks."""
        begin = time.perf_counter()
        if step_input.computing is not None:
            self.computed.append(step_input.computing)
        self._comm.complete(lambda: self._set_means(step_input.tensors))
        counts = self.telemetry
        counts.steps += 1
        counts.exchanging += time.perf_counter() - begin
        sent = ring_bytes(self._flat.nbytes, self._comm.size)
        counts.sent, counts.received = counts.sent + sent, counts.received + sent
        return views(self._flat, self.specs)

    def _set_means(self, tensors: "Sequence[Array]") -> None:
        np.concatenate([np.ravel(t) for t in tensors], out=self._flat)
        self._channel.all_reduce(self._flat)
        self._flat /= self._comm.size

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


def codec_speed(elements: int, threads: int | None = None) -> Codec:
    """Return the measured speed of the threshold codec; report it first if its kernels have to be compiled.

    Args:
        elements: number of elements of an update.
        threads: threads of the kernels.
    """
    from hvdx import codec

    threshold = codec.Threshold(target_density=0.01, threads=threads)
    if not threshold.prepared:
        announce(threshold, "Threshold", " to measure their speed")
    return measure_codec(elements, threads)
