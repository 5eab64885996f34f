"""Description of a fit for its record: the model, the optimiser, the software and the machine."""

import importlib
import importlib.metadata
import math
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import keras
import numpy as np

from hvdx.comm import Comm
from hvdx.comm.launcher import usable_memory
from hvdx.keras import backend
from hvdx.keras.backend import tf
from hvdx.keras.costs import leaves_of
from hvdx.keras.fit import data
from hvdx.keras.optimizer_state import innermost, slots
from hvdx.keras.seams.frames import epoch_iterator
from hvdx.keras.seams.iterators import batch_size_of, dataset_of
from hvdx.keras.seams.optimizers import trained_variables
from hvdx.log import Log
from hvdx.version import __version__

T = TypeVar("T")
_log = Log(__name__)


def attempt(describe: Callable[[T], dict[str, object] | None], thing: T) -> dict[str, object] | None:
    """Describe a user's object; return {} if that fails, because training is worth more than its record.

    Args:
        describe: function of this module.
        thing: its argument.

    Example:
        >>> attempt(lambda thing: {"size": thing}, 3)
        {'size': 3}
    """
    try:
        return describe(thing)
    except Exception as error:  # Properties of a user's class may raise anything.
        _log.warning(f"record: {type(thing).__name__} cannot be described: {error!r}")
        return {}


def describe_model(model: keras.Model) -> dict[str, object]:
    """Return name, parameters, tensors, dtype policy and layers of a built model.

    Args:
        model: built Keras model.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="top")], name="small")
        >>> describe_model(model)["layers"]
        [{'name': 'top', 'class': 'Dense', 'parameters': 15, 'inputs': 4, 'outputs': 3}]
    """
    return {
        "name": model.name,
        "parameters": int(sum(math.prod(v.shape) for v in model.weights)),
        "tensors": [list(v.shape) for v in model.trainable_weights],
        "dtype": model.dtype_policy.name,
        "layers": [
            {
                "name": layer.name,
                "class": type(layer).__name__,
                "parameters": int(sum(math.prod(v.shape) for v in layer.weights)),
                "inputs": _elements(layer, "input"),
                "outputs": _elements(layer, "output"),
            }
            for layer in leaves_of(model)
        ],
    }


def _elements(layer: keras.layers.Layer, side: str) -> int | None:
    """Return the elements per sample of a layer's input or output; None if they are unknown."""
    try:
        shapes = [tuple(tensor.shape) for tensor in keras.tree.flatten(getattr(layer, side))]
        return sum(math.prod(shape[1:]) for shape in shapes)
    except (AttributeError, ValueError, TypeError):
        # Subclassed models do not record the shapes of their layers, and some axes have no fixed length.
        return None


def describe_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, object] | None:
    """Return name, momentum and variables per weight of an optimiser; None without an optimiser.

    Args:
        optimizer: Keras optimiser, or None.
    """
    if optimizer is None:
        return None
    inner = innermost(optimizer)
    trained = len(trained_variables(inner))
    return {
        "name": type(inner).__name__,
        "momentum": _momentum(inner),
        "slots": round(len(slots(inner)) / trained) if inner.built and trained else None,
    }


def _momentum(optimizer: keras.optimizers.Optimizer) -> float:
    """Return the share of an update that an optimiser carries over into the next: `momentum` or `beta_1`, else 0."""
    values = (getattr(optimizer, name, None) for name in ("momentum", "beta_1"))
    return next((float(value) for value in values if isinstance(value, int | float)), 0.0)


def batch_size(callback: keras.callbacks.Callback) -> int | None:
    """Return the samples of a step on this rank; None if they are unknown.

    Args:
        callback: a callback, in one of its hooks during `fit`.
    """
    iterator = epoch_iterator(callback)
    return batch_size_of(iterator) or data.batch_size(dataset_of(iterator))


def describe_versions(comm: Comm) -> dict[str, str | None]:
    """Return the versions of hvdx, of the libraries that it uses, and of MPI; None for those that are absent.

    Of the frameworks, the backend of Keras alone is among them.

    Args:
        comm: the ranks.
    """
    return {
        "hvdx": __version__,
        "python": platform.python_version(),
        backend.name(): importlib.import_module(backend.name()).__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "numba": _installed("numba"),
        "mpi": comm.library or None,
        "horovod": _installed("horovod"),
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_machine() -> dict[str, object]:
    """Return the cores, processor and bytes of memory of this host, and the backend's threads; None if unknown."""
    cores = os.cpu_count()
    return {
        "cores": cores,
        "threads": _threads() or cores,
        "cpu": _read(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or platform.processor() or platform.machine(),
        "memory": usable_memory() or None,
    }


def _threads() -> int:
    if backend.name() == "tensorflow" and (threads := tf.config.threading.get_intra_op_parallelism_threads()):
        return int(threads)
    number = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return int(number) if number.isdigit() else 0


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    kilobytes = _read(r"^VmHWM:\s*(\d+)", "/proc/self/status")
    return 1024 * int(kilobytes or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _read(pattern: str, path: str) -> str:
    """Return the first group of a pattern in a file; "" if there is none."""
    try:
        found = re.search(pattern, Path(path).read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def describe_process() -> dict[str, object]:
    """Return host, command, HVDX_STRATEGY and HVDX_SEED (None unless it is an integer) of this process."""
    seed = os.environ.get("HVDX_SEED", "").strip()
    return {
        "host": socket.gethostname(),
        "spelling": os.environ.get("HVDX_STRATEGY", ""),
        "seed": int(seed) if re.fullmatch(r"-?\d+", seed) else None,
        "command": list(sys.orig_argv),
    }
