"""Options of `Threshold` as one value."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hvdx.strategies.threshold.warmup import Warmup

if TYPE_CHECKING:
    from hvdx import codec  # imports Numba


@dataclass(frozen=True)
class Options:
    """Options, the same on all ranks; see `hvdx.strategies.Threshold`.

    Attributes:
        start: the warm-up.
        lookahead: the lookahead, if the user gave one.
        asynchronous: True if workers take steps at different times.
    """

    tau: float | None
    target_density: float | str | None
    start: Warmup
    lookahead: float | None
    asynchronous: bool
    overhead: float
    period: int | str
    exchange: str
    local: str
    index_coding: Literal["rice", "none"]
    threads: int | None

    def make_codec(
        self,
        density: float | None,
        threads: int | None,
        device: str = "cpu",
        part: int | None = None,
        tau_factor: int = 1,
    ) -> "codec.Threshold":
        """Make the codec of these options.

        Args:
            density: density to aim at; None keeps the threshold at tau.
            threads: threads of the codec's kernels.
            device: device of the codec's arrays.
            part: number of elements of a part, if messages are split.
            tau_factor: factor on a fixed tau: the number of updates in a sum that the codec encodes.
        """
        from hvdx import codec

        return codec.Threshold(
            tau=self.tau * tau_factor if density is None and self.tau is not None else None,
            target_density=density,
            index_coding=self.index_coding,
            threads=threads,
            device=device,
            part=part,
        )
