"""Options of `Threshold` as one value, and its warm-up: in the first steps a residual's delay harms most."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hvdx.errors import ConfigError

if TYPE_CHECKING:
    from hvdx import codec  # imports Numba

#: Steps of a warm-up, if none are given.
DEFAULT_STEPS = 200
#: Density in the first step of a warm-up.
START = 1 / 8
# Warm-ups of earlier versions, and why they went.
_REMOVED = {
    "workers": "it dropped the updates of most workers, and no training was better with it",
    "lookahead": "the lookahead now follows the lag of the messages in every step",
}


@dataclass(frozen=True)
class Warmup:
    """Warm-up of a training: the density falls from 1/8 to its target, by the same factor in every step.

    Lin et al. (2018, "Deep Gradient Compression") lower it every epoch.

    Attributes:
        steps: number of steps; 0 for no warm-up.
    """

    steps: int = 0

    def density(self, step: int, target: float) -> float:
        """Return the density of a step.

        Args:
            step: number of the step, from 0.
            target: density after the warm-up.

        Example:
            >>> [round(Warmup(2).density(step, 1 / 32), 4) for step in range(3)]
            [0.125, 0.0625, 0.0312]
        """
        if step >= self.steps or target >= START:
            return target
        return START * (target / START) ** (step / self.steps)


def parse_warmup(text: str, tau: float | None = None) -> Warmup:
    """Parse a warm-up.

    Args:
        text: "auto", "none", or "density", with or without ":steps"; 200 without them. "auto" is "density", unless tau
            is fixed.
        tau: the fixed tau, if there is one.

    Raises:
        ConfigError: if the text is anything else, or lowers a density although tau is fixed.

    Example:
        >>> parse_warmup("density:50"), parse_warmup("auto"), parse_warmup("auto", tau=0.001)
        (Warmup(steps=50), Warmup(steps=200), Warmup(steps=0))
    """
    kind, colon, steps = str(text).partition(":")
    if text == "none" or (text == "auto" and tau is not None):
        return Warmup()
    if text == "auto":
        return Warmup(DEFAULT_STEPS)
    if kind in _REMOVED:
        raise ConfigError(
            f"threshold: warmup={kind!r} was removed: {_REMOVED[kind]}. Leave warmup out, or use 'density:200'."
        )
    if kind != "density" or (colon and not (steps.isdecimal() and int(steps) > 0)):
        raise ConfigError(
            f"threshold: warmup: expected 'auto', 'none', or 'density', with or without ':steps', such as "
            f"'density:500'; got {text!r}."
        )
    if tau is not None:
        raise ConfigError(
            "threshold: warmup='density' lowers a density, and tau is fixed. Give target_density instead, or "
            "warmup='none'."
        )
    return Warmup(int(steps) if colon else DEFAULT_STEPS)


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
