"""Decentralised training: every worker sends all others its thresholded update, and keeps the rest for later.

Strom 2015 ("Scalable distributed DNN training using commodity GPU cloud computing", Interspeech) and Deeplearning4j.
There is no server: all workers add what all workers sent, the sender's own included, in rank order, so that the weights
that they share stay the same to the bit.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hvdx.comm import Comm
from hvdx.errors import ConfigError
from hvdx.strategies import link, warmup
from hvdx.strategies.base import HostStrategy, TensorSpec

if TYPE_CHECKING:
    from hvdx.codec import Threshold as Codec
    from hvdx.strategies.threshold_exchange import ThresholdExchange

Placement = Literal["update", "gradient"]
Op = Literal["mean", "sum"]
View = Literal["local", "shared"]


class Threshold(HostStrategy):
    """Send what reaches a threshold tau, as multiples of +-tau, and keep the rest for later.

    Args:
        tau: a fixed threshold, in units of the update. If neither it nor `target_density` is given, the link decides.
        target_density: the share of elements to send, in (0, 1); or "link", the density whose messages take a tenth of
            a step (see `budget`) on the network that is found, between 1e-4 and 1/8, reconsidered as both drift.
        placement: "update": what is compressed is the update that this rank's own optimiser wants; "gradient": the
            gradients, before the optimiser.
        view: the weights that a worker computes its gradients at: "local", the shared ones with this worker's own
            residual, so that it sees at once what it has not sent yet; or "shared", which are the same on all workers
            at every step. By default "local" under `Distribute`, which puts the shared weights in place wherever others
            look: for validation, at the end of each epoch, for callbacks; "shared" elsewhere.
        op: "mean" of what the workers sent, or their "sum".
        warmup: how to begin: "none", "density:200" (falling from 1/8 to the target in 200 steps), "dense:50" (all of
            it, in bfloat16), "workers:200" (1, 2, 4, ... workers count).
        overlap: let messages travel while the next step is computed; they are applied one step late.
        budget: the share of a step's computing time that "link" may spend on messages.
        index_coding, scope, tau_steps: see `hvdx.codec.Threshold`.
        threads: of the codec's kernels; by default the host's cores divided by its ranks.

    Raises:
        ConfigError: an option that is not one of these.

    Example:
        >>> Threshold(target_density=0.03, warmup="dense:50")
        Threshold(target_density=0.03, warmup='dense:50')

    Source: Strom 2015; the update is compressed after the optimiser as in Deep Gradient Compression (Lin et al. 2018,
    "momentum correction"). An element sends as many tau as it holds, where Strom sends one.
    """

    name = "threshold"

    def __init__(
        self,
        tau: float | None = None,
        target_density: float | Literal["link"] | None = None,
        placement: Placement = "update",
        view: View | None = None,
        op: Op = "mean",
        warmup: str = "none",
        overlap: bool = False,
        budget: float = 0.1,
        index_coding: Literal["rice", "none"] = "rice",
        scope: Literal["all", "variable"] = "all",
        tau_steps: int = 32,
        threads: int | None = None,
    ):
        if tau is None and target_density is None:
            target_density = "link"
        if isinstance(target_density, str) and target_density != "link":
            raise ConfigError(
                f"threshold: target_density: expected 'link' or a share between 0 and 1, got {target_density!r}."
            )
        _one_of("placement", placement, ("update", "gradient"))
        _one_of("op", op, ("mean", "sum"))
        _one_of("view", view, ("local", "shared", None))
        if view == "local" and placement == "gradient":
            raise ConfigError("threshold: view='local' is of updates that are not sent yet. Use placement='update'.")
        if not isinstance(overlap, bool):
            raise ConfigError(f"threshold: overlap: expected True or False, got {overlap!r}.")
        if overlap and placement == "gradient":
            raise ConfigError(
                "threshold: overlap applies updates one step late, which gradients cannot be. Use placement='update'."
            )
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 10:
            raise ConfigError(f"threshold: budget: expected a share of a step such as 0.1, got {budget!r}.")
        self.tau, self.target_density = tau, target_density
        self.placement, self.view, self.op, self.overlap, self.budget = placement, view, op, overlap, float(budget)
        self.warmup, self.index_coding, self.scope = str(warmup), index_coding, scope
        self.tau_steps, self.threads = tau_steps, threads
        self.start = _warmup(self.warmup, tau)
        if tau is not None and target_density is not None:
            raise ConfigError(
                "threshold: both tau and target_density are given. Give one: a density finds its own tau."
            )
        self.make_codec(None if isinstance(target_density, str) else target_density, threads)  # checks the rest

    def make_codec(self, density: float | None, threads: int | None) -> "Codec":
        """The codec of these options.

        Args:
            density: the density to aim at; None leaves the threshold at tau.
            threads: of its kernels.
        """
        # Imported here, since it brings Numba, which a training without it may do without.
        from hvdx import codec

        return codec.Threshold(
            tau=self.tau if density is None else None,
            target_density=density,
            scope=self.scope,
            index_coding=self.index_coding,
            tau_steps=self.tau_steps,
            threads=threads,
        )

    def open(self, comm: Comm, specs: Sequence[TensorSpec]) -> "ThresholdExchange":
        """See `HostStrategy.open`."""
        from hvdx.strategies.threshold_exchange import ThresholdExchange

        return ThresholdExchange(self, comm, specs)

    def bytes_per_step(self, specs: Sequence[TensorSpec], size: int) -> int:
        """See `Strategy.bytes_per_step`: by the entropy of the density, 1e-2 where it is not known yet."""
        elements = sum(s.elements for s in specs)
        density = self.target_density if isinstance(self.target_density, int | float) else 0.01
        return round((size - 1) * link.message_bytes(elements, density))

    def merge(self, saved: Sequence[Mapping[str, np.ndarray]], rank: int, size: int) -> dict[str, np.ndarray]:
        """See `HostStrategy.merge`: residuals are dealt out, so that their sum stays what it was."""
        mine = {k: np.array(v) for k, v in saved[rank % len(saved)].items()}
        residual = np.zeros_like(mine["codec.residual"], dtype=np.float64)
        for other in range(rank, len(saved), size):
            residual += saved[other]["codec.residual"]
        mine["codec.residual"] = residual.astype(np.float32)
        return mine

    def __repr__(self) -> str:
        """The call that makes this strategy, without what is at its default."""
        defaults = {
            "tau": None, "target_density": None if self.tau is not None else "link", "placement": "update", "view": None,
            "op": "mean", "warmup": "none", "overlap": False, "budget": 0.1, "index_coding": "rice", "scope": "all",
            "tau_steps": 32, "threads": None,
        }  # fmt: skip
        given = [f"{k}={getattr(self, k)!r}" for k, v in defaults.items() if getattr(self, k) != v]
        return f"Threshold({', '.join(given)})"


def _warmup(text: str, tau: float | None) -> warmup.Warmup:
    start = warmup.parse(text)
    if start.kind == "density" and tau is not None:
        raise ConfigError(
            "threshold: warmup='density' lowers a density, and tau is fixed. Give target_density in its place, or "
            "warmup='dense' or 'workers'."
        )
    return start


def _one_of(option: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        listed = ", ".join(repr(k) for k in known)
        raise ConfigError(f"threshold: {option}: expected one of {listed}, got {value!r}.")
