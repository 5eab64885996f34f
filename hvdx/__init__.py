"""Training of Keras 3 models on several machines."""

from typing import TYPE_CHECKING, Any

from hvdx.averaging import average, average_weights
from hvdx.strategies import AllReduce, Auto, ParameterAveraging, ParameterServer, Threshold
from hvdx.version import __version__

if TYPE_CHECKING:
    from hvdx.keras.fit.data import shard
    from hvdx.keras.horovod.api import init, local_rank, local_size, rank, shutdown, size

__all__ = [
    "AllReduce",
    "Auto",
    "ParameterAveraging",
    "ParameterServer",
    "Threshold",
    "__version__",
    "average",
    "average_weights",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shard",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    # Loaded on first access, so that `import hvdx` and the command line need no TensorFlow.
    import importlib

    if name == "codec":
        return importlib.import_module("hvdx.codec")
    if name in __all__ or name in ("keras", "run"):  # hvdx.keras has the error for `horovod.run`
        package = importlib.import_module("hvdx.keras")
        return package if name == "keras" else getattr(package, name)
    raise AttributeError(f"module 'hvdx' has no attribute {name!r}")
