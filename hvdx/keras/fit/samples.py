"""Sample counts of training steps, for averages that are weighted by them."""

import keras
import tensorflow as tf

from hvdx.errors import ConfigError
from hvdx.keras.adapters.optimizer import count_samples, optimizers_of
from hvdx.keras.types import Structure


def count_samples_of(model: keras.Model, data: Structure) -> None:
    """Pass the number of samples of a training step to a model's optimisers.

    Args:
        model: compiled model.
        data: data of the step.

    Raises:
        ConfigError: if the first input has no samples to count.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    parts = tf.nest.flatten(x)
    if not parts or parts[0] is None or not len(parts[0].shape):
        raise ConfigError(
            "ParameterAveraging: weighted=True: the first input of a step has no samples to count. Train without "
            "weighted=True, or in a loop that calls hvdx.keras.count_samples."
        )
    count = tf.shape(parts[0])[0]
    for optimizer in optimizers_of(model):
        count_samples(optimizer, count)
