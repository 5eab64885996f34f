"""Warm-up of the threshold strategy: the delay by a residual does the most harm in the first steps of a training."""

from dataclasses import dataclass

from hvdx.errors import ConfigError

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


def parse(text: str, tau: float | None = None) -> Warmup:
    """Parse a warm-up.

    Args:
        text: "auto", "none", or "density", with or without ":steps"; 200 without them. "auto" is "density", unless tau
            is fixed.
        tau: the fixed tau, if there is one.

    Raises:
        ConfigError: if the text is anything else, or lowers a density although tau is fixed.

    Example:
        >>> parse("density:50"), parse("auto"), parse("auto", tau=0.001)
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
