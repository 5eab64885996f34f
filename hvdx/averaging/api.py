"""`hvdx.average` and `hvdx.average_weights`: the mean of saved networks and of models in memory."""

import contextlib
import json
import os
import re
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from hvdx.averaging.distance import Distance, distances
from hvdx.averaging.formats import known, open_network
from hvdx.averaging.hugging_face import INDEX_ENDING
from hvdx.averaging.keras_config import comparable
from hvdx.averaging.mean import Integers, Mean, resolve_weights
from hvdx.averaging.network import Network, Tensor, Values, native
from hvdx.averaging.output import check_free, write_whole
from hvdx.averaging.saved_model import SavedModel
from hvdx.errors import AverageError, ConfigError

# A Keras archive takes two descriptors, and its unpacked weights take one.
_PER_NETWORK = 3
# Descriptors for output, temporary files and libraries.
_OTHERS = 64


def _open_now() -> int:
    """Return the number of files that this process has open."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def _files(path: Path) -> int:
    """Return the maximum number of open files of a network; those in its folder, or beside its index, may be shards."""
    folder = path if path.is_dir() else path.parent if path.name.endswith(INDEX_ENDING) else None
    try:
        return _PER_NETWORK + (len(os.listdir(folder)) if folder is not None else 0)
    except OSError:
        # `open_network` reports the error.
        return _PER_NETWORK


@contextlib.contextmanager
def room_for(paths: Sequence[Path]) -> Iterator[None]:
    """Raise the limit on open files, if necessary, until the block ends.

    Raises:
        ConfigError: if the system does not allow enough open files.
    """
    needed = sum(map(_files, paths)) + _open_now() + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        yield
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{len(paths)} networks: expected a limit of {needed} open files, got {hard}. Do: ulimit -n {needed}; or "
            "average them in groups, and then the means, weighted by the sizes of the groups."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


_OTHER = "Only networks of the same architecture have a mean."
# Mean and variance that `Normalization.adapt` has computed, in Keras' files; the third tensor is an integer.
_ADAPTED = re.compile(r"(?:^|/)(normalization(?:_\d+)?)/vars/[01]$")


def check_alike(networks: Sequence[Network]) -> None:
    """Check that all networks have the same tensors and the same architecture.

    Raises:
        AverageError: if two networks differ; the message names the file, and the tensor or the setting.
    """
    first = networks[0]
    for other in networks[1:]:
        if other.format != first.format:
            raise AverageError(
                f"{other.path}: expected {first.format}, the format of {first.path}, got {other.format}. Give networks "
                "of one format."
            )
        _check_tensors(first, other)
        if first.architecture is not None and other.architecture is not None:
            where = _difference(first.architecture, other.architecture)
            if where is not None:
                place, a, b = where
                raise AverageError(f"{other.path}: {place}: expected {a!r}, as in {first.path}, got {b!r}. {_OTHER}")


def adapted_differently(networks: Sequence[Network]) -> list[str]:
    """Return the names of Keras' `Normalization` layers whose statistics differ between networks."""
    first, *others = networks
    layers = {name: found[1] for name in first.tensors if (found := _ADAPTED.search(name))}
    differ = (
        layer
        for name, layer in layers.items()
        for other in others
        if not np.array_equal(first.tensors[name].array(), other.tensors[name].array(), equal_nan=True)
    )
    return list(dict.fromkeys(differ))


def _check_tensors(first: Network, other: Network) -> None:
    # Tensors are compared in the order of the first file: its first difference says more about two architectures than
    # the first in alphabetical order.
    for name, tensor in first.tensors.items():
        theirs = other.tensors.get(name)
        if theirs is None:
            extra = [n for n in other.tensors if n not in first.tensors]
            hint = f" Is {extra[0]} its name here?" if len(extra) == 1 else ""
            raise AverageError(f"{other.path}: {name}: is in {first.path}, and missing here.{hint} {_OTHER}")
        if theirs.shape != tensor.shape:
            raise AverageError(
                f"{other.path}: {name}: expected the shape {list(tensor.shape)}, as in {first.path}, got "
                f"{list(theirs.shape)}. {_OTHER}"
            )
        if native(theirs.dtype) != native(tensor.dtype):
            raise AverageError(
                f"{other.path}: {name}: expected {native(tensor.dtype)}, as in {first.path}, got "
                f"{native(theirs.dtype)}. Save both in one dtype."
            )
    for name in other.tensors:
        if name not in first.tensors:
            raise AverageError(f"{first.path}: {name}: is in {other.path}, and missing here. {_OTHER}")


def _difference(a: object, b: object, place: str = "") -> tuple[str, Any, Any] | None:
    """Return the place of the first difference between two JSON values, and both values there; None if equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            found = _difference(a.get(key), b.get(key), f"{place}.{key}" if place else str(key))
            if found:
                return found
        return None
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            found = _difference(x, y, f"{place}[{i}]")
            if found:
                return found
        return None
    if isinstance(a, list) and isinstance(b, list):
        return f"the length of {place}", len(a), len(b)
    return None if a == b else (place, a, b)


Progress = Callable[[int, int], object]


def average(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    swa: bool = False,
    integers: Integers | None = None,
    recalibrate: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Average saved networks of one architecture, and save the result in their format.

    Sums are computed in float64, and each tensor keeps its dtype. Most formats need memory for a few blocks of one
    tensor at a time. Everything that is not a tensor (configuration, metadata) is copied from the first network.

    Args:
        paths: two or more networks of one format: Keras `.keras` and `.weights.h5`, TensorFlow checkpoints (their
            prefix) and SavedModels, PyTorch `.pt`, `.pth` and `.safetensors`, MXNet Gluon `.params`, directories of
            Hugging Face checkpoints.
        out: path of the result; its folder has to exist.
        weights: one number per network; only ratios matter, e.g. [600, 400].
        ema: decay of an exponential moving average over the networks, oldest first.
        swa: stochastic weight averaging: equal weights for the snapshots of one run, oldest first.
        integers: rule for integer and boolean tensors and for step counters of optimisers: they must be "equal", or
            the values of the "first" or "last" network are taken. The default is "equal"; with `ema` and `swa`, where
            counters grow from snapshot to snapshot, it is "last".
        recalibrate: `.npz` or `.npy` file of inputs, on which the batch normalisation statistics of a `.keras` model
            are recomputed.
        force: permission to replace an existing file, or an existing SavedModel by a SavedModel. Links are followed.
        progress: function that is called with the number of bytes read so far, and their total number.

    Raises:
        ConfigError: if an option is invalid or contradicts another.
        AverageError: if networks differ or are damaged (the message names file and tensor), or if the result cannot be
            written. Existing files then stay unchanged.

    Warns:
        UserWarning: if batch normalisation statistics are stale, if `Normalization` layers were adapted to different
            data, or if a mean is NaN or infinite.

    Example:
        >>> import tempfile, pathlib
        >>> from hvdx.averaging.safetensors import save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     a, b, mean = (pathlib.Path(folder, f"{name}.safetensors") for name in ("a", "b", "mean"))
        ...     save(a, {"w": np.array([1.0, 2.0])})
        ...     save(b, {"w": np.array([3.0, 2.0])})
        ...     average([a, b], mean)
        ...     open_network(mean).tensors["w"].array().tolist()
        [2.0, 2.0]
    """
    inputs, target = [Path(p) for p in paths], Path(out)
    numbers = resolve_weights(len(inputs), weights, ema, swa)
    rule: Integers = integers or ("last" if swa or ema is not None else "equal")
    if rule not in get_args(Integers):
        raise ConfigError(f"integers: expected one of 'equal', 'first', 'last', got {rule!r}.")
    check_free(target, force, inputs)
    if target.is_symlink():
        target = target.resolve()
    with opened(inputs) as networks:
        first = networks[0]
        _check_suffix(target, first)
        if target.is_dir() and not isinstance(first, SavedModel):
            raise AverageError(
                f"{target}: it is a SavedModel, which only a SavedModel replaces; the result is a file of format "
                f"{first.format}. Name another output, or remove it first."
            )
        if recalibrate is not None:
            _check_recalibrates(first, Path(recalibrate))
        adapted = adapted_differently(networks)
        total = sum(t.nbytes for t in first.tensors.values())
        counter = _Counter(total * len(networks), progress)
        mean = Mean(networks, numbers, rule, counter.add)

        def write(partial: Path) -> None:
            first.write(partial, mean.values)
            if recalibrate is not None:
                from hvdx.averaging.recalibrate import recalibrate_archive

                recalibrate_archive(partial, Path(recalibrate))

        try:
            write_whole(target, total, force, write)
        finally:
            mean.close()
    _warn(first, mean, adapted, recalibrate is not None)


def compare(paths: Sequence[str | os.PathLike[str]], progress: Progress | None = None) -> list[Distance]:
    """Measure the distances between saved networks of one architecture.

    Args:
        paths, progress: see `average`.

    Returns:
        One `Distance` per tensor, in the order of the file, and one for all floating point tensors together.

    Raises:
        AverageError: if networks differ or are damaged.
    """
    with opened([Path(p) for p in paths]) as networks:
        total = sum(t.nbytes for n in networks for t in n.tensors.values())
        return distances(networks, _Counter(total, progress).add)


def average_weights(models: Sequence[Any], weights: Sequence[float] | None = None) -> list[np.ndarray]:
    """Return the mean of the weights of models in memory.

    Args:
        models: Keras models of one architecture, or lists of arrays from `model.get_weights()`.
        weights: one number per model; only ratios matter.

    Returns:
        Arrays for `model.set_weights`, in the dtypes of the first model.

    Raises:
        AverageError: if there is no model, or if architectures, integers or booleans differ.
        ConfigError: if `weights` is invalid.

    Example:
        >>> [a.tolist() for a in average_weights([[np.zeros(2)], [np.ones(2)]], weights=[1, 3])]
        [[0.75, 0.75]]
    """
    networks = [InMemory(model, f"model {i}") for i, model in enumerate(models)]
    if not networks:
        raise AverageError("average_weights: expected one model or more, got none.")
    check_alike(networks)
    mean = Mean(networks, resolve_weights(len(networks), weights))
    try:
        return [
            np.concatenate([np.empty(0, t.dtype), *mean.values(t)]).reshape(t.shape)
            for t in networks[0].tensors.values()
        ]
    finally:
        mean.close()


@contextlib.contextmanager
def opened(paths: Sequence[Path]) -> Iterator[list[Network]]:
    """Open networks of one architecture until the block ends.

    Raises:
        AverageError: if there are fewer than two, if they differ or are damaged, or if they have no tensors.
        ConfigError: if the system allows too few open files.
    """
    if len(paths) < 2:
        raise AverageError(f"expected two networks or more, got {len(paths)}.")
    with room_for(paths), contextlib.ExitStack() as stack:
        networks = []
        for path in paths:
            networks.append(open_network(path))
            stack.callback(networks[-1].close)
        check_alike(networks)
        if not networks[0].tensors:
            raise AverageError(f"{paths[0]}: expected one tensor or more, found none.")
        yield networks


def _check_suffix(out: Path, network: Network) -> None:
    """Reject an output name with the ending of another format, such as a PyTorch file called model.keras."""
    for kind in known():
        if out.name.endswith(kind.suffixes) and not out.name.endswith(network.suffixes):
            ending = f"End it in {network.suffixes[0]}." if network.suffixes else "Leave out the ending."
            raise AverageError(
                f"{out}: expected a name for {network.format}, the format of {network.path}, got one for "
                f"{kind.format}. {ending}"
            )


def _check_recalibrates(network: Network, data: Path) -> None:
    """Check, before anything is averaged, that the result can be recalibrated."""
    from hvdx.averaging.keras_archive import KerasArchive
    from hvdx.averaging.recalibrate import read_inputs

    if not isinstance(network, KerasArchive):
        raise ConfigError(
            f"recalibrate: expected .keras models, which include their architecture, got {network.format}. Load the "
            "result into its model, and run the model on training data in training mode."
        )
    read_inputs(data)


class _Counter:
    """Sum of the bytes that were read, for `progress`."""

    def __init__(self, total: int, progress: Progress | None):
        self._read, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        self._read += count
        if self._progress is not None:
            self._progress(self._read, self._total)


def _warn(network: Network, mean: Mean, adapted: Sequence[str], recalibrated: bool) -> None:
    if adapted:
        warnings.warn(
            f"{', '.join(adapted)}: expected Normalization layers that were adapted to the same data, got different "
            "statistics. Their mean fits none of the networks, which learned from inputs of different scales. Adapt "
            "one layer to data of all of them before the trainings, and train again from it.",
            stacklevel=3,
        )
    if mean.not_a_number:
        reason = "one of the networks does, or they hold infinities of both signs"
        warnings.warn(f"the mean of {mean.not_a_number[0]} holds NaN: {reason}.", stacklevel=3)
    elif mean.infinite:
        warnings.warn(f"the mean of {mean.infinite[0]} holds infinity: one of the networks does.", stacklevel=3)
    if network.normalises and not recalibrated:
        warnings.warn(
            "the networks have batch normalisation, whose statistics do not fit the averaged weights. Recompute them "
            "on training data: --recalibrate (recalibrate=) for .keras models; else run the model in training mode.",
            stacklevel=3,
        )
