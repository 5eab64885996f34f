"""Decentralised training: every worker sends its thresholded update to all others, and keeps the rest in a residual.

Sources: Strom 2015 ("Scalable distributed DNN training using commodity GPU cloud computing", Interspeech) and
Deeplearning4j. There is no server: each worker adds up the messages of all workers, its own included, in rank order. So
the weights are the same on all workers, to the bit.
"""

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from hvdx.comm import Comm
from hvdx.errors import ConfigError
from hvdx.strategies import link, warmup
from hvdx.strategies.base import (
    Exchange,
    SecondMoments,
    Strategy,
    TensorSpec,
    agree_on_strategy,
    agree_on_tensors,
    one_of,
)
from hvdx.strategies.density import STARVED, affordable_density, budget_with
from hvdx.strategies.prediction import Prediction, Situation, added
from hvdx.strategies.shards import OWNERS, divide_again

Placement = Literal["update", "gradient"]
ExchangeKind = Literal["auto", "all_gather", "sharded"]
#: Bytes of the header of a message: status, two times and the size of the message. The sample of gradients that is
#: sent with Adam and its relatives, some 140 bytes, is not included: predictions do not know the optimiser.
HEADER_BYTES = 32
#: Bytes of the message of a part of an update, besides its entries: frame, lengths, tau and the header of a tile.
PART_BYTES = 26
# Density for which the kind of exchange is chosen if the density follows the network.
_NOMINAL_DENSITY = 0.01
# A sharded exchange delays an element twice, so it is chosen only below this share of the time of an all-gather.
_WORTH_SHARDING = 0.8
# Smallest number of ranks for which it is considered: three ranks save a third of the bytes for two more rounds.
_FEWEST_SHARDS = 4
# Ranks, and bytes of the messages of all, from which a fixed density is exchanged in shards: 8 ranks save three
# quarters of the bytes, and on most links so many bytes take longer than two rounds.
_MANY, _LARGE = 8, 1 << 18
# Density at which the cost of an exchange is its fixed part.
_NEXT_TO_NOTHING = 1e-9
Op = Literal["mean", "sum"]


class Threshold(Strategy):
    """Exchange of the elements that reach a threshold tau, as multiples of +-tau. A residual keeps the rest.

    Args:
        tau: fixed threshold, in units of the update. If neither tau nor `target_density` is given, the density is
            "auto".
        target_density: share of elements to send, in (0, 1); or "auto": the density, between 1e-4 and 1/8, whose
            exchange takes the share `overhead` of a step's computing time: encoding, transfer and decoding, as
            measured. It settles in the first 100 steps, and follows the network and the computing time.
        placement: "update": compress the update that this rank's optimiser computes. "gradient": compress the
            gradients, before the optimiser.
        lookahead: extrapolation of the update u before it is sent: u + lookahead * (u - previous u) is added to the
            residual, which over time adds up to the same sum. It compensates for the steps that an element waits in the
            residual. None derives it from the optimiser: a third of momentum / (1 - momentum), at most 5; 3 for a
            momentum of 0.9.
        second_moments: "mean": the updates of Adam, AdamW, Nadam and RMSprop are scaled as if these optimisers divided
            by the second moment of the ranks' mean gradient. "own": they divide by that of their rank's gradients,
            which makes the steps too small if gradients are mostly noise. The option has no effect on other optimisers,
            nor with placement="gradient".
        op: "mean" or "sum" of the workers' updates.
        warmup: "none", "density:200" (falls from 1/8 to the target in 200 steps), "dense:50" (sends everything as
            bfloat16), "workers:200" (1, 2, 4, ... workers count).
        overlap: let messages travel while the next step is computed; they are applied one step late.
        overhead: share of a step's computing time that "auto" may spend on messages.
        exchange: "all_gather": every worker receives every worker's message. "sharded": each worker adds up the entries
            of its share of the elements and sends the sum, compressed again, to all, so that the traffic of a worker
            does not grow with their number. "auto": with an automatic density, the one whose exchange takes less time
            on this network, sharded only if it saves a fifth; with a fixed density, sharded for 8 workers or more
            whose messages have 256 kB together; with a fixed tau, all_gather.
        index_coding, scope, tau_steps: see `hvdx.codec.Threshold`.
        threads: threads of the codec's kernels; by default the host's cores divided by its ranks.
        device: "cuda" to encode and decode updates on the GPU, so that only messages cross to the host; "cpu" for the
            host; "auto" for "cuda" if the variables are on a GPU and numba-cuda is installed. The weights are the same,
            to the bit.

    Raises:
        ConfigError: if an option is unknown or has a wrong value.

    Example:
        >>> Threshold(target_density=0.03, warmup="dense:50")
        Threshold(target_density=0.03, warmup='dense:50')

    Source: Strom 2015; the update is compressed after the optimiser as in Deep Gradient Compression (Lin et al. 2018,
    "momentum correction"). An entry carries the whole multiple of tau that the element holds; Strom sends one tau.
    """

    name = "threshold"
    runs = "host"
    target_density: float | str | None
    op: str

    def __init__(
        self,
        tau: float | None = None,
        target_density: float | Literal["auto"] | None = None,
        placement: Placement = "update",
        lookahead: float | None = None,
        second_moments: SecondMoments = "mean",
        op: Op = "mean",
        warmup: str = "none",
        overlap: bool = False,
        overhead: float = 0.1,
        exchange: ExchangeKind = "auto",
        index_coding: Literal["rice", "none"] = "rice",
        scope: Literal["all", "variable"] = "all",
        tau_steps: int = 32,
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
        one_of("threshold", "op", op, ("mean", "sum"))
        one_of("threshold", "second_moments", second_moments, ("mean", "own"))
        one_of("threshold", "device", device, ("auto", "cpu", "cuda"))
        one_of("threshold", "exchange", exchange, ("auto", "all_gather", "sharded"))
        if exchange == "sharded" and (scope != "all" or device == "cuda"):
            raise ConfigError(
                "threshold: exchange='sharded' needs one tau for all variables, and runs on the host. Use scope='all' "
                "and device='cpu', or exchange='all_gather'."
            )
        if lookahead is not None and (
            isinstance(lookahead, bool) or not isinstance(lookahead, int | float) or not 0 <= lookahead <= 10
        ):
            raise ConfigError(f"threshold: lookahead: expected a number from 0 to 10, got {lookahead!r}.")
        if lookahead and placement == "gradient":
            raise ConfigError("threshold: lookahead applies to updates only. Use placement='update'.")
        if not isinstance(overlap, bool):
            raise ConfigError(f"threshold: overlap: expected True or False, got {overlap!r}.")
        if overlap and placement == "gradient":
            raise ConfigError(
                "threshold: overlap applies updates one step late, which is not possible for gradients. Use "
                "placement='update'."
            )
        if isinstance(overhead, bool) or not isinstance(overhead, int | float) or not 0 < overhead <= 10:
            raise ConfigError(f"threshold: overhead: expected a share of a step such as 0.1, got {overhead!r}.")
        self.tau, self.target_density = tau, target_density
        self.placement, self.lookahead, self.op, self.overlap, self.overhead = (
            placement,
            lookahead,
            op,
            overlap,
            float(overhead),
        )
        self.second_moments = second_moments
        self.warmup, self.index_coding, self.scope = str(warmup), index_coding, scope
        self.tau_steps, self.threads, self.device, self.exchange = tau_steps, threads, device, exchange
        self.start = _warmup(self.warmup, tau)
        if tau is not None and target_density is not None:
            raise ConfigError(
                "threshold: both tau and target_density are given. Give one: a density finds its own tau."
            )
        # Checks the options of the codec.
        self.make_codec(None if isinstance(target_density, str) else target_density, threads)

    def make_codec(
        self,
        density: float | None,
        threads: int | None,
        device: str = "cpu",
        part: int | None = None,
        of_sum: int = 1,
    ) -> Any:
        """Make the codec of these options.

        Args:
            density: density to aim at; None keeps the threshold at tau.
            threads: threads of the codec's kernels.
            device: device of the codec's arrays.
            part: number of elements of a part, if messages are split.
            of_sum: number of updates in a sum that the codec encodes; a fixed tau is multiplied by it.
        """
        from hvdx import codec

        return codec.Threshold(
            tau=self.tau * of_sum if density is None and self.tau is not None else None,
            target_density=density,
            scope=self.scope,
            index_coding=self.index_coding,
            tau_steps=self.tau_steps,
            threads=threads,
            device=device,
            part=part,
        )

    def device_for(self, specs: Sequence[TensorSpec]) -> str:
        return self._choose_device(specs)[0]

    def _choose_device(self, specs: Sequence[TensorSpec]) -> tuple[str, str]:
        """Return the device of an exchange, and the reason if it is not the GPU of the tensors, else ""."""
        where = {s.device for s in specs}
        there = len(where) == 1 and "CPU" not in where
        if self.device == "cpu" or (self.device == "auto" and not there):
            return "cpu", ""
        from hvdx.codec import devices

        if self.device == "cuda" and not there and not devices.simulated():
            raise ConfigError(
                f"threshold: device='cuda': expected all variables on one GPU, got {sorted(where)}. Install a "
                "TensorFlow that finds the GPU, or use device='cpu'."
            )
        chosen = where.pop().replace("GPU", "cuda") if there else "cuda"
        try:
            devices.gpu(int(chosen.partition(":")[2]) if there else None)
        except ConfigError as error:
            if self.device == "cuda":
                raise
            return "cpu", str(error)
        return chosen, ""

    def open(self, comm: Comm, specs: Sequence[TensorSpec], momentum: float = 0.0, name: str = "") -> Exchange:
        # Imported here because it imports Numba, which other strategies do not need.
        from hvdx.strategies.threshold_exchange import ThresholdExchange

        agree_on_strategy(self, comm)
        agree_on_tensors(specs, comm)
        device, why = self._choose_device(specs)
        if why and comm.rank == 0:
            print(f"hvdx: every update crosses from the GPU to the host. {why}", file=sys.stderr, flush=True)
        kind, network = self._choose_exchange(comm, sum(s.elements for s in specs), device)
        if kind == "sharded":
            from hvdx.strategies.threshold_sharded import ShardedExchange

            return ShardedExchange(self, comm, specs, self.lookahead_for(momentum), network)
        return ThresholdExchange(self, comm, specs, self.lookahead_for(momentum), device, network)

    def _choose_exchange(self, comm: Comm, elements: int, device: str) -> tuple[str, link.Link | None]:
        """Return the kind of exchange, and the link if it has been measured. Collective."""
        if device != "cpu" or not elements:
            return "all_gather", None
        network = None
        if self._follows_link(comm.size):
            channel = comm.channel("the link")
            network = link.probe(channel)
            channel.close()
        situation = Situation(comm.size, (elements,), 0.0, network or link.Link(0.0, 1.0))
        return self._kind_for(situation), network

    def _follows_link(self, size: int) -> bool:
        """Return whether the kind of exchange depends on the link. If the density is fixed, it must not."""
        free = self.exchange == "auto" and self.scope == "all" and self.target_density == "auto"
        return free and size >= _FEWEST_SHARDS

    def _kind_for(self, situation: Situation) -> str:
        """Return the kind of exchange."""
        size, density = situation.workers, self.target_density
        if self._follows_link(size):
            kinds = ("all_gather", "sharded")
            gathered, sharded = (sum(self._costs(situation, _NOMINAL_DENSITY, k)[0].values()) for k in kinds)
            return "sharded" if sharded < _WORTH_SHARDING * gathered else "all_gather"
        if self.exchange == "auto":
            # The result of a training with a fixed density must not depend on a measurement.
            many = size >= _MANY and self.scope == "all" and isinstance(density, float)
            large = many and size * link.message_bytes(situation.elements, float(density or 0)) >= _LARGE
            return "sharded" if large else "all_gather"
        return self.exchange if size > 1 else "all_gather"

    @staticmethod
    def _costs(given: Situation, density: float, kind: str) -> tuple[dict[str, float], float]:
        """Return the terms of an exchange, with the codec, and the bytes that a worker sends."""
        count, workers, codec = given.elements, given.workers, given.machine.codec
        message = link.message_bytes(count, density)
        if kind == "all_gather":
            # Headers travel before the messages.
            terms = added([given.all_to_all(HEADER_BYTES), given.all_to_all(message)])
            coding = {
                "encoding": codec.encoding(count, density),
                "decoding": codec.decoding(count, density, workers),
            }
            return terms | coding, (workers - 1) * (message + HEADER_BYTES)
        part = message / workers + PART_BYTES
        headers = [given.all_to_all(HEADER_BYTES / 2), given.all_to_all(HEADER_BYTES / 2)]
        terms = added([*headers, given.all_to_all(part), given.all_to_all(part)])
        shard = -(-count // workers)
        coding = {
            "encoding": codec.encoding(count, density) + codec.encoding(shard, density),
            "decoding": codec.decoding(shard, density, workers) + codec.decoding(count, density, 1),
        }
        return terms | coding, (workers - 1) * (2 * part + HEADER_BYTES)

    def with_overhead(self, share: float) -> "Threshold":
        other = copy.copy(self)
        other.overhead = share * self.overhead
        return other

    def lookahead_for(self, momentum: float) -> float:
        """Return the lookahead for an optimiser's momentum.

        Example:
            >>> Threshold().lookahead_for(momentum=0.9), Threshold(lookahead=1).lookahead_for(momentum=0.9)
            (3.0, 1)
        """
        if self.placement == "gradient":
            return 0.0
        if self.lookahead is not None:
            return self.lookahead
        # The factor 1/3 and the limit 5 were found by trial, with momenta from 0 to 0.98
        # (docs/adr/0007-updates-run-ahead.md).
        return round(min(momentum / max(1 - momentum, 1e-9) / 3, 5.0), 9)

    def predict(self, situation: Situation) -> Prediction | None:
        """Predict the steps after the warm-up; None for a fixed tau, whose density depends on the updates."""
        if self.target_density is None:
            return None
        given, count = situation, situation.elements
        kind = self._kind_for(given)

        def cost(density: float) -> float:
            return sum(self._costs(given, density, kind)[0].values())

        density = self.target_density
        if isinstance(density, str):
            limit = budget_with(cost(_NEXT_TO_NOTHING), self.overhead * given.computing)
            density = affordable_density(cost, limit)
        density = float(density)
        exchange, sent = self._costs(given, density, kind)
        coding = {name: exchange.pop(name) for name in ("encoding", "decoding")}
        hidden = min(given.computing, sum(exchange.values())) if self.overlap else 0.0
        shown = 1 - hidden / max(sum(exchange.values()), 1e-12)
        terms = {
            "waiting": given.slowest,
            # The result is returned: TensorFlow copies tensors whose addresses are not aligned. The update is made, and
            # the result is added to the weights, as on one worker.
            "copying": given.passes(8),
        }
        terms |= coding | {name: value * shown for name, value in exchange.items()}
        others = given.workers - 1
        message = link.message_bytes(count, density)
        buffers = {"residual": 4.0 * count, "buffers": 8.0 * count + given.workers * message}
        note = f"density {density:.2g}"
        if kind == "sharded":
            # The residual and the sum of a shard. Messages of the two phases are no larger than two messages.
            buffers = {"residual": 4.0 * count * (1 + 1 / given.workers), "buffers": 8.0 * count + 4 * message}
            buffers["buffers"] += 4.0 * count / given.workers
            note += ", sharded"
        made = given.prediction(terms, sent, buffers, note=note)
        if self.target_density == "auto" and others and density <= STARVED:
            # At so low a density an element waits for thousands of steps.
            return replace(made, starved=True, note=f"{made.note}, starved")
        return made

    def merge(self, saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
        """Distribute the saved residuals over the ranks, so that their sum stays the same."""
        mine = {k: np.array(v) for k, v in saved[rank % len(saved)].items()}
        residual = np.zeros_like(mine["codec.residual"], dtype=np.float64)
        for other in range(rank, len(saved), size):
            residual += saved[other]["codec.residual"]
        mine["codec.residual"] = residual.astype(np.float32)
        return mine | (divide_again(saved, rank, size) if OWNERS in mine else {})

    def _defaults(self) -> dict[str, Any]:
        # Without tau, the default of `target_density` is "auto".
        return super()._defaults() | ({"target_density": "auto"} if self.tau is None else {})


def _warmup(text: str, tau: float | None) -> warmup.Warmup:
    start = warmup.parse(text)
    if start.kind == "density" and tau is not None:
        raise ConfigError(
            "threshold: warmup='density' lowers a density, and tau is fixed. Give target_density instead, or "
            "warmup='dense' or 'workers'."
        )
    return start
