"""The backend of Keras; others than hvdx trains on are refused before anything else of the room imports Keras."""

import functools
import os

from hvdx.errors import ConfigError

_KNOWN = ("tensorflow", "jax", "torch")


@functools.cache
def name() -> str:
    """Return the backend that Keras computes with: "tensorflow", "jax" or "torch".

    Raises:
        ConfigError: if `KERAS_BACKEND` or `keras.json` names another one.
    """
    found = os.environ.get("KERAS_BACKEND")
    if not found or found in _KNOWN:
        import keras  # a backend that is not installed would raise here

        found = keras.backend.backend()
    if found not in _KNOWN:
        raise ConfigError(
            f"Keras: expected one of the backends {', '.join(_KNOWN)}, on which hvdx trains, got {found}. Do: set "
            "KERAS_BACKEND=tensorflow before the script starts, or in os.environ before its first import of keras."
        )
    return found


def needs_tensorflow(what: str) -> None:
    """Refuse what hvdx has for TensorFlow alone.

    Args:
        what: name of it, for the error.

    Raises:
        ConfigError: if Keras computes with another backend.
    """
    if name() != "tensorflow":
        raise ConfigError.on_all_ranks(
            f"{what}: expected Keras on TensorFlow, got the backend {name()}, on which hvdx trains by Distribute with "
            "AllReduce, Threshold and ParameterAveraging. Do: set KERAS_BACKEND=tensorflow before the script starts."
        )


name()
