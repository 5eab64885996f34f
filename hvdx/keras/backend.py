"""The backend of Keras; others than hvdx trains on are refused before anything else of the room imports Keras.

`tf` is TensorFlow. With JAX or PyTorch it is imported when something of it is first used, so it may be absent.
"""

import contextlib
import functools
import importlib
import operator
import os
import sys
from typing import TYPE_CHECKING, TypeGuard

from hvdx.errors import ConfigError

_KNOWN = ("tensorflow", "jax", "torch")


@functools.cache
def name() -> str:
    """Return the backend that Keras computes with: "tensorflow", "jax" or "torch".

    Raises:
        ConfigError: if `KERAS_BACKEND` or `keras.json` names another one, or one that is not installed.
    """
    found = os.environ.get("KERAS_BACKEND")
    if not found or found in _KNOWN:
        try:
            import keras
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"Keras: expected an installed backend, got no module {error.name}. Do: pip install 'hvdx[tf]', or "
                "'hvdx[jax]' or 'hvdx[torch]' with KERAS_BACKEND=jax or torch."
            ) from error

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
            f"{what}: expected Keras on TensorFlow, got the backend {name()}, on which hvdx trains by Distribute. "
            "Do: set KERAS_BACKEND=tensorflow before the script starts."
        )


def is_a(value: object, kind: str) -> bool:
    """Return whether a value is of a class of TensorFlow, and do not import TensorFlow for it.

    Args:
        kind: name of the class, such as "IndexedSlices".
    """
    # Whoever made such a value has imported TensorFlow.
    return "tensorflow" in sys.modules and isinstance(value, _class(kind))


def on_cpu() -> contextlib.AbstractContextManager[object]:
    """Return a context in which TensorFlow makes tensors on the host."""
    return tf.device("CPU:0") if name() == "tensorflow" else contextlib.nullcontext()


def is_dataset(value: object) -> "TypeGuard[tf.data.Dataset]":
    """Return whether a value is a `tf.data.Dataset`; see `is_a`."""
    return is_a(value, "data.Dataset")


@functools.cache
def _class(kind: str) -> type:
    return operator.attrgetter(kind)(tf)


class _TensorFlow:
    """TensorFlow, imported when something of it is used."""

    def __getattr__(self, attribute: str) -> object:
        try:
            module = importlib.import_module("tensorflow")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"tf.{attribute}: expected TensorFlow to be installed, got none. Do: pip install 'hvdx[tf]'."
            ) from error
        return getattr(module, attribute)


if TYPE_CHECKING or name() == "tensorflow":
    import tensorflow as tf
else:
    tf = _TensorFlow()
