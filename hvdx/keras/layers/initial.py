"""Initial values of parts of weights."""

from collections.abc import Sequence
from typing import Literal

import keras
import numpy as np
import tensorflow as tf

from hvdx.errors import ConfigError
from hvdx.keras.weight_parts import WeightPart

Draw = Literal["whole", "shard"]
# Initialisers whose values do not depend on the shape, and so need no correction.
_PER_ELEMENT = ("Constant", "Ones", "RandomNormal", "RandomUniform", "TruncatedNormal", "Zeros")


class PartInitializer(keras.initializers.Initializer):
    """Initialiser of one part of a weight.

    Args:
        initializer: initialiser of the whole weight.
        part: the part.
        draw: "whole": draw the whole weight and keep this part, so that the weights are those of a layer that is not
            split, with the same seed. "shard": draw this part alone, with the variance of the whole weight, for weights
            that are larger than the memory of a rank.
        where: owner of the weight, for error messages.

    Raises:
        ConfigError: if `draw` is unknown, or the initialiser cannot draw a part alone.
    """

    def __init__(self, initializer: keras.initializers.Initializer, part: WeightPart, draw: Draw, where: str):
        if draw not in ("whole", "shard"):
            raise ConfigError(f"{where}: draw: expected 'whole' or 'shard', got {draw!r}.")
        self._initializer, self._part, self._draw = initializer, part, draw
        if draw == "shard":
            self._initializer = _of_part(initializer, part, where)

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> tf.Tensor:
        """Return the initial values of the part."""
        if self._draw == "shard":
            return self._initializer(shape, dtype=dtype)
        return self._part.cut(self._initializer(self._part.shape, dtype=dtype))


def _of_part(
    initializer: keras.initializers.Initializer, part: WeightPart, where: str
) -> keras.initializers.Initializer:
    """Return an initialiser that draws a part with a seed of its own and the variance of the whole weight."""
    kinds = {cls.__name__ for cls in type(initializer).__mro__}
    scaled = "VarianceScaling" in kinds
    if not scaled and not kinds & set(_PER_ELEMENT):
        raise ConfigError(
            f"{where}: draw='shard': expected an initializer of independent values, such as GlorotUniform, got "
            f"{type(initializer).__name__}, which needs the whole weight. Use draw='whole'."
        )
    config = initializer.get_config()
    if config.get("seed") is None and hasattr(initializer, "seed"):
        config["seed"] = initializer.seed
    if isinstance(config.get("seed"), int):
        # Parts with the same seed would hold the same values.
        config["seed"] = int(np.random.SeedSequence([config["seed"], part.position]).generate_state(1)[0] >> 1)
    if scaled:
        general = keras.initializers.VarianceScaling
        scale = initializer.scale * _fan(part.part_shape, initializer.mode) / _fan(part.shape, initializer.mode)
        return general(scale, initializer.mode, initializer.distribution, seed=config["seed"])
    return type(initializer).from_config(config)


def _fan(shape: tuple[int, ...], mode: str) -> float:
    """Return the number by which `VarianceScaling` divides its scale, for a matrix."""
    inputs, outputs = shape[0], shape[-1]
    return max(1.0, {"fan_in": inputs, "fan_out": outputs, "fan_avg": (inputs + outputs) / 2}[mode])
