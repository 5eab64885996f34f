"""Refuse a backend of Keras that hvdx cannot train on, before anything else of the room imports Keras."""

import os

from hvdx.errors import ConfigError


def check() -> None:
    """Check that Keras computes with TensorFlow.

    Raises:
        ConfigError: if `KERAS_BACKEND` or `keras.json` names another backend.
    """
    name = os.environ.get("KERAS_BACKEND")
    if not name:
        import keras  # a backend that is not installed would raise here

        name = keras.backend.backend()
    if name != "tensorflow":
        raise ConfigError(
            f"Keras: expected the backend tensorflow, on which alone hvdx trains, got {name}. Do: set "
            "KERAS_BACKEND=tensorflow before the script starts, or in os.environ before its first import of keras."
        )


check()
