"""Decentralised training: every worker sends its thresholded update to all others, and keeps the rest in a residual.

Sources: Strom 2015 ("Scalable distributed DNN training using commodity GPU cloud computing", Interspeech) and
Deeplearning4j. There is no server: each worker adds up the messages of all workers, its own included, in rank order. So
the weights are the same on all workers after each exchange, to the bit.
"""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from hvdx.comm import Comm
from hvdx.costs.model import Situation
from hvdx.costs.types import Prediction
from hvdx.errors import ConfigError
from hvdx.log import Log
from hvdx.strategies.contract import (
    SecondMoments,
    Strategy,
    TensorSpec,
    agree_on_strategy,
    agree_on_tensors,
    one_of,
    refuse_unless_it_survives,
)
from hvdx.strategies.host_exchange import HostExchange
from hvdx.strategies.serving.client import StepClient
from hvdx.strategies.threshold import prediction, states
from hvdx.strategies.threshold.options import Options, parse_warmup

_log = Log(__name__)

#: Placements that a user may choose.
Placement = Literal["update", "gradient"]
ExchangeKind = Literal["auto", "all_gather", "sharded"]
Local = Literal["auto", "dense", "none"]


class Threshold(Strategy):
    """Exchange of the elements that reach a threshold tau, as multiples of +-tau. A residual keeps the rest.

    Args:
        tau: fixed threshold, in units of the update. If neither tau nor `target_density` is given, the density is
            "auto".
        target_density: share of elements to send, in (0, 1); or "auto": the density, between 1e-4 and 1/8, whose
            exchange takes the share `overhead` of a step's computing time: encoding, transfer and decoding, as
            measured. It settles in the first 100 steps or after the warm-up, and follows the network and the computing
            time.
        period: number of steps between two exchanges, in which a rank trains alone. "auto": with an automatic density
            the shortest period in which latency and other costs that do not depend on the density take half of the
            budget, at most 32 steps; else 1.
        placement: "update": compress the update that this rank's optimiser computes. "gradient": compress the
            gradients, before the optimiser.
        lookahead: extrapolation of the update u before it is sent: u + lookahead * (u - previous u) is added to the
            residual, which over time adds up to the same sum. It compensates for the steps that an element waits in the
            residual. None: it follows the lag, which each rank measures (`Lookahead` in
            `hvdx.strategies.threshold.encoder`).
        second_moments: "mean": the updates of Adam, AdamW, Nadam and RMSprop are scaled as if these optimisers divided
            by the second moment of the ranks' mean gradient. "own": they divide by that of their rank's gradients,
            which makes the steps too small if gradients are mostly noise. The option has no effect on other optimisers,
            nor with placement="gradient".
        warmup: "none", or "density:200" (falls from 1/8 to the target in 200 steps; an automatic density starts at
            1/8, and then is what `overhead` allows). "auto": "density:200", unless tau is fixed.
        max_staleness: with 0 all workers take each step together. With "inf" nobody waits until the end of an epoch:
            each worker applies messages as they come, in the same order on all workers, and a fast worker takes more of
            the steps of an epoch.
        overhead: share of a step's computing time that "auto" may spend on messages.
        exchange: "all_gather": every worker receives every worker's message. "sharded": each worker adds up the entries
            of its share of the elements and sends the sum, compressed again, to all, so that the traffic of a worker
            does not grow with their number. "auto": with an automatic density, the one whose exchange takes less time
            on this network, sharded only if it saves a fifth; with a fixed density, sharded for 8 workers or more
            whose messages have 256 kB together; with a fixed tau, all_gather.
        index_coding: see `hvdx.codec.Threshold`.
        threads: threads of the codec's kernels; by default the host's cores divided by its ranks.
        device: "cuda" to encode and decode updates on the GPU, so that only messages cross to the host; "cpu" for the
            host; "auto" for "cuda" if the variables are on a GPU and numba-cuda is installed. The weights are the same,
            to the bit.
        local: use of hosts with several ranks. "dense": the ranks of a host add up their updates in memory, and the sum
            travels as a message, in one piece for each of these ranks. `tau` then applies to the sums of hosts, and
            updates are encoded on the CPU. Each host needs as many ranks. "none": every rank sends messages to all.
            "auto": "dense" if each of at least two hosts has the same number of ranks above one, and updates are not
            encoded on a GPU; else "none".

    Raises:
        ConfigError: if an option is unknown or has a wrong value.

    Example:
        >>> Threshold(target_density=0.03, warmup="density:50")
        Threshold(target_density=0.03, warmup='density:50')

    Source: Strom 2015; the update is compressed after the optimiser as in Deep Gradient Compression (Lin et al. 2018,
    "momentum correction"). An entry carries the whole multiple of tau that the element holds; Strom sends one tau.
    """

    name = "threshold"
    own_spelling = frozenset({"max_staleness", "period"})
    runs = "host"
    target_density: float | str | None
    exchange: str
    local: str
    max_staleness: int | str

    def __init__(
        self,
        tau: float | None = None,
        target_density: float | Literal["auto"] | None = None,
        period: int | Literal["auto"] = "auto",
        placement: Placement = "update",
        lookahead: float | None = None,
        second_moments: SecondMoments = "mean",
        warmup: str = "auto",
        max_staleness: Literal[0, "inf"] = 0,
        overhead: float = 0.1,
        exchange: ExchangeKind = "auto",
        local: Local = "auto",
        index_coding: Literal["rice", "none"] = "rice",
        threads: int | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
    ):
        if tau is None and target_density is None:
            target_density = "auto"
        if isinstance(target_density, str) and target_density != "auto":
            raise ConfigError(
                f"threshold: target_density: expected 'auto' or a share between 0 and 1, got {target_density!r}."
            )
        one_of("threshold", "placement", placement, ("update", "gradient"))
        one_of("threshold", "second_moments", second_moments, ("mean", "own"))
        one_of("threshold", "device", device, ("auto", "cpu", "cuda"))
        one_of("threshold", "local", local, ("auto", "dense", "none"))
        if local == "dense" and device == "cuda":
            raise ConfigError("threshold: local='dense' adds up updates on the CPU. Use device='cpu', or local='none'.")
        one_of("threshold", "exchange", exchange, ("auto", "all_gather", "sharded"))
        if exchange == "sharded" and device == "cuda":
            raise ConfigError(
                "threshold: exchange='sharded' runs on the host. Use device='cpu', or exchange='all_gather'."
            )
        if lookahead is not None and (
            isinstance(lookahead, bool) or not isinstance(lookahead, int | float) or not 0 <= lookahead <= 1000
        ):
            raise ConfigError(f"threshold: lookahead: expected a number from 0 to 1000, got {lookahead!r}.")
        if lookahead and placement == "gradient":
            raise ConfigError("threshold: lookahead applies to updates only. Use placement='update'.")
        if isinstance(overhead, bool) or not isinstance(overhead, int | float) or not 0 < overhead <= 10:
            raise ConfigError(f"threshold: overhead: expected a share of a step such as 0.1, got {overhead!r}.")
        self.tau, self.target_density = tau, target_density
        self.placement, self.lookahead, self.overhead = placement, lookahead, float(overhead)
        self.second_moments = second_moments
        self.warmup, self.index_coding = str(warmup), index_coding
        self.threads, self.device, self.exchange = threads, device, exchange
        self.local = local
        self.start = parse_warmup(self.warmup, tau)
        self.max_staleness = _max_staleness(max_staleness)
        self.period = _period(period)
        self.asynchronous = self.max_staleness != 0
        self.survives = exchange != "sharded" and local != "dense"
        if self.asynchronous:
            self._refuse_synchronous_options()
            self.placement = "weights"
        self.may_wait = self.placement == "update"
        if self.period not in ("auto", 1) and not self.may_wait:
            raise ConfigError(
                f"threshold: period={self.period}: expected 1 with placement='gradient' and with max_staleness='inf'. "
                "Leave period out."
            )
        if tau is not None and target_density is not None:
            raise ConfigError(
                "threshold: both tau and target_density are given. Give one: a density finds its own tau."
            )
        # Checks the options of the codec.
        self.options.make_codec(None if isinstance(target_density, str) else target_density, threads)

    def _refuse_synchronous_options(self) -> None:
        """Refuse options that need steps which all workers take together."""
        refused = {
            "placement='gradient'": self.placement == "gradient",
            "device='cuda'": self.device == "cuda",
            "exchange='sharded'": self.exchange == "sharded",
            "local='dense'": self.local == "dense",
        }
        for option, present in refused.items():
            if present:
                raise ConfigError(
                    f"threshold: max_staleness={self.max_staleness!r}: expected options for workers that take steps at "
                    f"different times, got {option}. Leave {option.partition('=')[0]} out, or use max_staleness=0."
                )

    @property
    def options(self) -> Options:
        """The options of exchanges as one value."""
        waits = self.may_wait and (self.period != "auto" or self.target_density == "auto")
        return Options(
            tau=self.tau,
            target_density=self.target_density,
            start=self.start,
            lookahead=0.0 if self.placement == "gradient" else self.lookahead,
            asynchronous=self.asynchronous,
            overhead=self.overhead,
            period=self.period if waits else 1,
            exchange=self.exchange,
            local=self.local,
            index_coding=self.index_coding,
            threads=self.threads,
        )

    def device_for(self, specs: Sequence[TensorSpec]) -> str:
        return self._choose_device(specs)[0]

    def _choose_device(self, specs: Sequence[TensorSpec]) -> tuple[str, str]:
        """Return the device of an exchange, and the reason if it is not the GPU of the tensors, else ""."""
        where = {s.device for s in specs}
        there = len(where) == 1 and "CPU" not in where
        on_host = self.asynchronous or self.device == "cpu" or self.local == "dense" or self.exchange == "sharded"
        if on_host or (self.device == "auto" and not there):
            return "cpu", ""
        from hvdx.codec import devices

        if self.device == "cuda" and not there and not devices.simulated():
            raise ConfigError(
                f"threshold: device='cuda': expected all variables on one GPU, got {sorted(where)}. Do: install the "
                "backend of Keras with CUDA (tensorflow[and-cuda], jax[cuda13] or jax[cuda12] as the driver has it, a "
                "PyTorch that was built with CUDA), or use device='cpu'."
            )
        chosen = where.pop().replace("GPU", "cuda") if there else "cuda"
        try:
            devices.gpu(int(chosen.partition(":")[2]) if there else None)
        except ConfigError as error:
            if self.device == "cuda":
                raise
            return "cpu", str(error)
        return chosen, ""

    def open(self, comm: Comm, specs: Sequence[TensorSpec], name: str = "") -> HostExchange:
        refuse_unless_it_survives(self, comm)
        agree_on_strategy(self, comm)
        agree_on_tensors(specs, comm)
        device, why = self._choose_device(specs)
        if why and comm.rank == 0:
            _log.warning(f"every update crosses from the GPU to the host. {why}")
        # Imported here because it imports Numba, which other strategies do not need.
        from hvdx.strategies.threshold.routes import open_exchange

        count, options = self._ranks_to_sum(comm.hosts), self.options
        if comm.survives:
            # A dead rank would leave its shard, or the sums of its host, without an owner.
            count, options = 1, replace(options, exchange="all_gather")
        return open_exchange(options, comm, specs, device, count)

    def step_client(self, comm: Comm, steps: int, begun: int = 0) -> StepClient:
        """Return the client of rank 0, which hands out the steps."""
        return StepClient(comm, comm.world_ranks[0], steps, begun)

    def check(self, comm: Comm) -> None:
        """Refuse hosts with different numbers of ranks if `local` is "dense"."""
        self._ranks_to_sum(comm.hosts)

    def _ranks_to_sum(self, hosts: Sequence[str]) -> int:
        """Return the number of ranks whose updates are added up on each host; 1 if every rank sends its own."""
        counts = Counter(hosts)
        if self.local == "none" or (self.local == "auto" and len(counts) == 1):
            return 1
        if len(set(counts.values())) == 1:
            return counts[hosts[0]]
        if self.local == "dense":
            raise ConfigError.on_all_ranks(
                f"threshold: local='dense': expected the same number of ranks on every host, got {dict(counts)}. Start "
                "as many on each, or use local='none'."
            )
        return 1

    def in_each_step(self, why: str) -> "Threshold":
        if self.period not in ("auto", 1):
            raise ConfigError.on_all_ranks(
                f"threshold: period={self.period}: expected 1 or 'auto' for {why}. Leave period out."
            )
        other = copy.copy(self)
        other.may_wait = False
        return other

    def on_one_thread(self, why: str) -> "Threshold":
        if self.threads not in (None, 1):
            raise ConfigError(f"threshold: threads: expected 1 for {why}, got {self.threads}. Leave it out.")
        other = copy.copy(self)
        other.threads = 1
        return other

    def problem_with_split(self) -> str:
        if self.device != "cuda":
            return ""
        return (
            "device: expected 'auto' or 'cpu' for a model with split layers, whose updates are combined on the host, "
            "got 'cuda'."
        )

    def with_overhead(self, share: float) -> "Threshold":
        other = copy.copy(self)
        other.overhead = share * self.overhead
        return other

    def predict(self, situation: Situation) -> Prediction | None:
        """Predict the steps after the warm-up; None for a fixed tau, whose density depends on the updates."""
        return prediction.predict(self.options, situation)

    def merge(self, saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
        """Distribute the saved residuals over the ranks, so that their sum stays the same."""
        return states.merge(saved, rank, size)

    def _defaults(self) -> dict[str, object]:
        # Without tau, the default of `target_density` is "auto".
        defaults = super()._defaults() | ({"target_density": "auto"} if self.tau is None else {})
        # `max_staleness` sets the placement.
        return defaults | ({"placement": self.placement} if self.asynchronous else {})


def _period(value: object) -> int | str:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if number == "auto" or (isinstance(number, int) and not isinstance(number, bool) and number >= 1):
        return number
    raise ConfigError(f"threshold: period: expected a positive number of steps or 'auto', got {value!r}.")


def _max_staleness(value: object) -> int | str:
    if value not in (0, "0", "inf") or isinstance(value, bool):
        raise ConfigError(
            f"threshold: max_staleness: expected 0 or 'inf', got {value!r}. A bound between them was removed: it saved "
            "no time. Use 'inf' if a worker is slow, or ParameterServer(staleness='bound')."
        )
    return "inf" if value == "inf" else 0
