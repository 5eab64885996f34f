"""List of file formats, and detection of the format of a path."""

from importlib import import_module
from pathlib import Path

from hvdx.averaging.network import Network
from hvdx.errors import AverageError

# Modules and their classes, in the order of detection. Importing them imports no framework.
_FORMATS = {
    "hvdx.averaging.hugging_face": "HuggingFace",
    "hvdx.averaging.safetensors": "Safetensors",
    "hvdx.averaging.pytorch": "PyTorch",
    "hvdx.averaging.mxnet": "MXNet",
    "hvdx.averaging.keras_archive": "KerasArchive",
    "hvdx.averaging.hdf5": "Hdf5",
    "hvdx.averaging.saved_model": "SavedModel",
    "hvdx.averaging.tensorflow_checkpoint": "TensorFlowCheckpoint",
}
_HEAD_BYTES = 64


def known() -> list[type[Network]]:
    """Return the classes of all formats."""
    return [getattr(import_module(module), name) for module, name in _FORMATS.items()]


def open_network(path: Path) -> Network:
    """Open a saved network of any known format.

    Args:
        path: file, directory, or prefix of a TensorFlow checkpoint.

    Raises:
        AverageError: if the network does not exist, has an unknown format, or is damaged.
    """
    kind = format_of(path)
    return kind.open(path)


def format_of(path: Path) -> type[Network]:
    """Return the class of the format of a path; see `open_network`."""
    head = b""
    try:
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise AverageError(f"{path}: {error.strerror}.") from None
    for kind in known():
        if kind.recognises(path, head):
            return kind
    if not path.exists():
        raise AverageError(f"{path}: there is no such file.")
    formats = ", ".join(f"{kind.format} ({kind.suffixes[0]})" if kind.suffixes else kind.format for kind in known())
    raise AverageError(
        f"{path}: expected a saved network, got something else, or a file that was cut short near its beginning. Give "
        f"one of: {formats}."
    )
