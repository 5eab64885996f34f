"""Functions of a training step that differ between JAX and PyTorch; a step of TensorFlow is a graph.

Each module has the same functions: `on_host`, `tell`, `around`, `sync`, `prepare`, `memory` and `has_gpu`; for updates
that stay on a GPU `device_of`, `copies`, `flat_update`, `zeros`, `add` and `sums`.
"""

import importlib
from types import ModuleType

from hvdx.keras import backend


def stepped() -> ModuleType:
    """Return the functions of the backend: `hvdx.keras.backends.jax` or `hvdx.keras.backends.torch`."""
    return importlib.import_module(f"hvdx.keras.backends.{backend.name()}")
