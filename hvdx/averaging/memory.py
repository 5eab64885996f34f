"""Network in memory: a Keras model, or its list of arrays."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.averaging.keras_config import comparable
from hvdx.averaging.network import Network, Tensor, Values
from hvdx.errors import AverageError


class InMemory(Network):
    """Weights of a model in memory.

    Args:
        model: object with `get_weights()`, or a list of arrays.
        name: name of the model in error messages.
    """

    format = "model in memory"
    suffixes = ()

    def __init__(self, model: Any, name: str):
        self.path = Path(name)
        # Keras numbers the names of layers across models, so tensors are identified by their position.
        arrays = model.get_weights() if hasattr(model, "get_weights") else model
        self.tensors = {f"weight {i}": _tensor(f"weight {i}", np.asarray(a)) for i, a in enumerate(arrays)}
        self.architecture = _architecture(model)

    @classmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """Return False: a model in memory is not a file."""
        return False

    @classmethod
    def open(cls, path: Path) -> Network:
        """Raise an error: there is no file to open."""
        raise AverageError(f"{path}: expected a model in memory.")

    def write(self, out: Path, values: Values) -> None:
        """Raise an error: there is no file format to write."""
        raise AverageError(f"{out}: expected a file format, got a model in memory.")


def _architecture(model: object) -> Any:
    if not hasattr(model, "to_json"):
        return None
    try:
        return comparable(json.loads(model.to_json()))
    except Exception:
        # A model of a custom class need not have a configuration.
        return None


def _tensor(name: str, array: np.ndarray) -> Tensor:
    flat = np.ascontiguousarray(array).reshape(-1)

    def read(start: int, out: np.ndarray) -> None:
        out[...] = flat[start : start + out.size]

    return Tensor(name, array.shape, array.dtype, read)
