"""Training of Keras 3 models on several machines."""

from typing import TYPE_CHECKING, Any

from hvdx.version import __version__

if TYPE_CHECKING:
    from hvdx.averaging import average, average_weights
    from hvdx.keras.fit.data import shard
    from hvdx.keras.horovod.api import init, local_rank, local_size, rank, shutdown, size
    from hvdx.strategies import AllReduce, Auto, ParameterAveraging, ParameterServer, Threshold

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
# Names of packages that need no TensorFlow; the others are those of hvdx.keras.
_LIGHT = {
    **dict.fromkeys(("AllReduce", "Auto", "ParameterAveraging", "ParameterServer", "Threshold"), "hvdx.strategies"),
    **dict.fromkeys(("average", "average_weights"), "hvdx.averaging"),
}


def __getattr__(name: str) -> Any:
    # Loaded on first access, so that the command line starts at once, and `import hvdx` needs no TensorFlow.
    import importlib

    if name in ("averaging", "codec", "strategies"):
        return importlib.import_module(f"hvdx.{name}")
    if name in __all__ or name in ("keras", "run"):  # hvdx.keras has the error for `horovod.run`
        package = importlib.import_module(_LIGHT.get(name, "hvdx.keras"))
        return package if name == "keras" else getattr(package, name)
    raise AttributeError(f"module 'hvdx' has no attribute {name!r}")
