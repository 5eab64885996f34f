"""Sample counts of training steps, for averages that are weighted by them."""

from typing import Any

import keras
import tensorflow as tf

from hvdx.errors import ConfigError
from hvdx.keras.adapters.optimizer import count_samples, optimizers_of

_MARK = "_hvdx_counts"


def count_samples_of(model: Any) -> None:
    """Make each training step of a model pass its number of samples to the model's optimisers.

    Args:
        model: compiled model, before its training function is made.

    Raises:
        ConfigError: in the training step, if the first input has no samples to count.
    """
    restore_train_step(model)
    own_step = model.train_step

    def train_step(data: Any) -> Any:
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
        return own_step(data)

    setattr(train_step, _MARK, vars(model).get("train_step"))
    model.train_step = train_step


def restore_train_step(model: Any) -> None:
    """Undo `count_samples_of`; do nothing if the model has its own training step."""
    step = vars(model).get("train_step")
    if hasattr(step, _MARK):
        original = getattr(step, _MARK)
        if original is None:
            del model.train_step
        else:
            model.train_step = original
