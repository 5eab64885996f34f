"""Warm-up of the threshold strategy: the delay by a residual does the most harm in the first steps of a training."""

from dataclasses import dataclass
from typing import Literal

from hvdx.errors import ConfigError

Kind = Literal["auto", "none", "lookahead", "density"]
#: Steps of a warm-up, if none are given.
DEFAULT_STEPS = {"lookahead": 600, "density": 200}
#: Density in the first step of a density warm-up.
START = 1 / 8
# Multiple of the overhead that an exchange may take in the first step of a density warm-up.
_FIRST_SHARE = 10.0


@dataclass(frozen=True)
class Warmup:
    """Warm-up of a training.

    Attributes:
        kind: "density": the density falls from 1/8 to its target, by the same factor in every step (Lin et al. 2018,
            "Deep Gradient Compression", lower it every epoch).
            "lookahead": updates are extrapolated further; see `hvdx.strategies.threshold.lookahead`. It is for
            optimisers that divide by second moments: with others a training may diverge.
            "none": no warm-up. "auto": for an optimiser that divides by second moments "lookahead", or "density" if it
            has no momentum, if the lookahead is given, or if messages are applied late; else "none".
        steps: number of steps.
    """

    kind: Kind = "none"
    steps: int = 0

    def for_optimizer(self, divides: bool, extrapolates: bool = True) -> "Warmup":
        """Return the warm-up of an optimiser.

        Args:
            divides: whether the optimiser divides by second moments, as Adam does.
            extrapolates: whether the lookahead of its updates may be chosen; not if messages are applied late.

        Example:
            >>> parse("auto").for_optimizer(divides=True)
            Warmup(kind='lookahead', steps=600)
        """
        if self.kind != "auto":
            return self
        if not divides:
            return Warmup()
        kind: Kind = "lookahead" if extrapolates else "density"
        return Warmup(kind, DEFAULT_STEPS[kind])

    def overhead(self, step: int, target: float) -> float:
        """Return the share of a step's computing time that an exchange may take under an automatic density.

        Args:
            step: number of the step, from 0.
            target: share after the warm-up. That of the first step is ten times as large.

        Example:
            >>> [round(Warmup("density", 2).overhead(step, 0.1), 3) for step in range(3)]
            [1.0, 0.316, 0.1]
        """
        if self.kind != "density" or step >= self.steps:
            return target
        return float(target * _FIRST_SHARE ** (1 - step / self.steps))

    def density(self, step: int, target: float) -> float:
        """Return the density of a step.

        Args:
            step: number of the step, from 0.
            target: density after the warm-up.

        Example:
            >>> [round(Warmup("density", 2).density(step, 1 / 32), 4) for step in range(3)]
            [0.125, 0.0625, 0.0312]
        """
        if self.kind != "density" or step >= self.steps or target >= START:
            return target
        return START * (target / START) ** (step / self.steps)

    def __str__(self) -> str:
        return self.kind if self.kind in ("auto", "none") else f"{self.kind}:{self.steps}"


def parse(text: str) -> Warmup:
    """Parse a warm-up.

    Args:
        text: "auto", "none", or "lookahead" or "density", with or without ":steps". Without them, that of "lookahead"
            takes 600 steps, and that of "density" 200.

    Raises:
        ConfigError: if the text is anything else.

    Example:
        >>> parse("density:50")
        Warmup(kind='density', steps=50)
    """
    kind, colon, steps = str(text).partition(":")
    right = kind in DEFAULT_STEPS and (not colon or (steps.isdecimal() and int(steps) > 0))
    if text == "none":
        return Warmup()
    if text == "auto":
        return Warmup("auto")
    if kind == "workers":
        raise ConfigError(
            "threshold: warmup='workers' was removed: it dropped the updates of most workers, and no training was "
            "better with it. Leave warmup out, or use 'density:200'."
        )
    if not right:
        raise ConfigError(
            f"threshold: warmup: expected 'auto', 'none', or {', '.join(map(repr, DEFAULT_STEPS))}, with or without "
            f"':steps', such as 'density:500'; got {text!r}."
        )
    return Warmup(kind, int(steps) if colon else DEFAULT_STEPS[kind])  # type: ignore[arg-type]
