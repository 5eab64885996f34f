"""Batch normalisation after averaging: recomputation of its statistics on data."""

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdx.averaging.hdf5 import Hdf5
from hvdx.averaging.keras_archive import KerasArchive
from hvdx.averaging.network import Network, Tensor, Values
from hvdx.errors import AverageError

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

_BATCH = 256
_FEWEST = 2
_SEED = 0
_USUAL = ("x", "x_train")

#: The inputs of a model: one array, or several by name.
Inputs = np.ndarray | Mapping[str, np.ndarray]


def recalibrate_archive(path: Path, data: Path, batch_size: int = _BATCH) -> None:
    """Recompute the batch normalisation statistics of a `.keras` file on data. The rest of the file stays the same.

    Args:
        path: `.keras` file; its name may have any ending.
        data: `.npy` file; or `.npz` file with `x`, `x_train` or a single array, or with one array per input of the
            model, under its name.
        batch_size: maximum number of examples per batch.

    Raises:
        AverageError: if Keras cannot load the model, the data do not fit it, or it has no batch normalisation.
    """
    import keras

    with tempfile.TemporaryDirectory(prefix="hvdx-") as folder:
        # Keras recognises the format by the ending of the name.
        named = Path(folder, "model.keras")
        named.symlink_to(path.resolve())
        try:
            model = keras.saving.load_model(named, compile=False)
        except Exception as error:
            raise AverageError(
                f"recalibrate: expected a model that Keras can load, got {type(error).__name__}: {_first(error)}. "
                "Register custom classes, and call hvdx.average(...) in a program that imports them."
            ) from error
        inputs = _fitted(model, data, read_inputs(data))
        before, after = Path(folder, "before.weights.h5"), Path(folder, "after.weights.h5")
        model.save_weights(before)
        try:
            recalibrate(model, inputs, batch_size)
        except AverageError:
            raise
        except Exception as error:
            raise AverageError(f"{data}: the model does not run on it: {_first(error)}.") from error
        model.save_weights(after)
        _replace(path, before, after)


def recalibrate(model: "keras.Model", inputs: Inputs, batch_size: int = _BATCH) -> None:
    """Set the moving means and variances of a Keras model to the averages of the means and variances of batches.

    Other variables do not change. Frozen layers (`trainable=False`), which use their statistics in training too, keep
    them.

    Args:
        model: model with `BatchNormalization` layers, at any depth.
        inputs: inputs of the model, [n, ...].
        batch_size: maximum number of examples per batch.

    Raises:
        AverageError: if there is no such layer, if there are fewer than two examples, if a channel has fewer than two
            values in a batch, or if statistics are NaN or infinite.

    Examples are shuffled, in the same order each time, since batches of data that are sorted by class vary less than
    the data do. Variances are unbiased, as in PyTorch; Keras stores biased ones.

    Source: Izmailov et al. 2018, "Averaging weights leads to wider optima and better generalization", section 3.2.
        PyTorch's `update_bn` gives a short last batch the weight of a full one; here the sizes of batches differ by at
        most one example.
    """
    layers = _normalisations(model)
    if not layers:
        raise AverageError(
            "recalibrate: expected a model with batch normalisation that is not frozen, found none. Leave it out."
        )
    arrays = list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]
    count = len(arrays[0])
    if count < _FEWEST:
        raise AverageError(
            f"recalibrate: expected {_FEWEST} examples or more, got {count}: a variance needs two. Give some "
            "hundreds of training examples."
        )
    batches, order = -(-count // batch_size), shuffled(count)
    edges = [count * i // batches for i in range(batches + 1)]
    kept = [(v, v.numpy()) for v in model.variables if not any(v is s for layer in layers for s in _statistics(layer))]
    with _watched(layers) as sums:
        for begin, end in itertools.pairwise(edges):
            # Sorted indices read a memory-mapped file from front to back.
            model(_batch(model, inputs, np.sort(order[begin:end])), training=True)
    for layer in layers:
        _check_finite(layer, sums[id(layer)][1])
    for layer in layers:
        calls, totals = sums[id(layer)]
        # A layer that the model did not call has no new statistics.
        for variable, total in zip(_statistics(layer), totals, strict=True):
            if calls:
                variable.assign(total / calls)
    for variable, value in kept:
        variable.assign(value)


def shuffled(count: int) -> np.ndarray:
    """Return the order of the examples, a permutation that is the same for each call.

    Example:
        >>> sorted(shuffled(3).tolist())
        [0, 1, 2]
    """
    return np.random.default_rng(_SEED).permutation(count)


def _check_finite(layer: "keras.layers.BatchNormalization", totals: list[np.ndarray]) -> None:
    if not all(np.isfinite(total).all() for total in totals):
        raise AverageError(
            f"recalibrate: {layer.name}: expected finite means and variances, got NaN or infinity. Look for them in "
            "the data, and in the weights of the networks."
        )


def read_inputs(data: Path) -> Inputs:
    """Return the inputs in a file; see `recalibrate_archive`.

    Raises:
        AverageError: if the file does not exist, is damaged, or contains no arrays of examples.
    """
    try:
        content = np.load(data, mmap_mode="r")
        arrays = {"": content} if isinstance(content, np.ndarray) else {k: content[k] for k in content.files}
    except FileNotFoundError:
        raise AverageError(
            f"{data}: there is no such file. Give recalibration a .npz or .npy file of inputs."
        ) from None
    except Exception as error:
        raise AverageError(
            f"{data}: expected a .npz or .npy file of numbers, which it is not, or it is damaged ({_first(error)})."
        ) from None
    if not arrays:
        raise AverageError(f"{data}: expected one array or more, found none.")
    for name, array in arrays.items():
        if array.ndim == 0 or not len(array):
            raise AverageError(f"{data}: {name or 'array'}: expected examples, got the shape {list(array.shape)}.")
    return arrays.get("", arrays)


def _fitted(model: "keras.Model", data: Path, inputs: Inputs) -> Inputs:
    """Return the arrays that are inputs of the model, after a check of names, lengths and shapes."""
    wanted = {tensor.name: tensor for tensor in _inputs(model)}
    if isinstance(inputs, np.ndarray):
        inputs = {"array": inputs}
    there = ", ".join(inputs)
    if len(wanted) > 1:
        missing = [name for name in wanted if name not in inputs]
        if missing:
            raise AverageError(
                f"{data}: {missing[0]}: is missing; expected one array per input ({', '.join(wanted)}), got {there}."
            )
        chosen: dict[str, np.ndarray] = {name: inputs[name] for name in wanted}
        lengths = {name: len(array) for name, array in chosen.items()}
        if len(set(lengths.values())) > 1:
            raise AverageError(f"{data}: expected the same number of examples for each input, got {lengths}.")
        for name, tensor in wanted.items():
            _check_shape(data, name, chosen[name], tensor)
        return chosen
    names = [name for name in [*wanted, *_USUAL] if name in inputs]
    if not names and len(inputs) > 1:
        raise AverageError(f"{data}: expected an array called x, x_train{_or(wanted)}, got {there}. Name it x.")
    name = names[0] if names else next(iter(inputs))
    for tensor in wanted.values():
        _check_shape(data, name, inputs[name], tensor)
    return inputs[name]


def _or(wanted: Mapping[str, object]) -> str:
    return "".join(f" or {name}" for name in wanted)


def _check_shape(data: Path, name: str, array: np.ndarray, tensor: "keras.KerasTensor") -> None:
    expected = list(tensor.shape)[1:]
    if len(expected) != array.ndim - 1 or any(
        e is not None and e != got for e, got in zip(expected, array.shape[1:], strict=True)
    ):
        raise AverageError(
            f"{data}: {name}: expected the shape {['n', *expected]}, which the model takes, got {list(array.shape)}."
        )


def _inputs(model: "keras.Model") -> "list[keras.KerasTensor]":
    """Return the symbolic inputs of a model; a subclassed model has none."""
    try:
        return list(model.inputs or [])
    except (AttributeError, ValueError):
        return []


def _batch(model: "keras.Model", inputs: Inputs, chosen: np.ndarray) -> Any:
    import keras

    if not isinstance(inputs, Mapping):
        return np.asarray(inputs[chosen])
    return keras.tree.map_structure(lambda tensor: np.asarray(inputs[tensor.name][chosen]), model.input)


def _normalisations(model: "keras.Model") -> "list[keras.layers.BatchNormalization]":
    import keras

    # Keras lists nested layers with this method; it has no public counterpart.
    layers = model._flatten_layers(include_self=False, recursive=True)
    return [
        layer
        for layer in layers
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and layer.built
    ]


def _unbiased(
    layer: "keras.layers.BatchNormalization",
    inputs: "tf.Tensor",
    training: object = None,
    mask: "tf.Tensor | None" = None,
) -> float:
    """Return Bessel's correction n / (n - 1), for the n values of a channel in a batch."""
    count = np.prod(inputs.shape) / inputs.shape[layer.axis]
    if mask is not None:
        count *= np.mean(np.asarray(mask))
    if count < _FEWEST:
        raise AverageError(
            f"recalibrate: {layer.name}: expected {_FEWEST} values or more of a channel in a batch, got {count:.0f}. "
            "Give it more training data, or a larger batch_size."
        )
    return float(count / (count - 1))


def _statistics(layer: "keras.layers.BatchNormalization") -> "tuple[keras.Variable, keras.Variable]":
    return layer.moving_mean, layer.moving_variance


@contextlib.contextmanager
def _watched(layers: "list[keras.layers.BatchNormalization]") -> Iterator[dict[int, tuple[int, list[np.ndarray]]]]:
    """Count the calls of layers, and sum the statistics of their input batches, until the block ends."""
    sums: dict[int, tuple[int, list[np.ndarray]]] = {}
    momenta = [layer.momentum for layer in layers]
    before = [[s.numpy() for s in _statistics(layer)] for layer in layers]
    calls = [layer.call for layer in layers]

    def watch(layer: "keras.layers.BatchNormalization", call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: object, **kwargs: object) -> object:
            result = call(*args, **kwargs)
            count, totals = sums[id(layer)]
            found = [np.asarray(s.numpy(), np.float64) for s in _statistics(layer)]
            found[1] *= _unbiased(layer, *args, **kwargs)
            sums[id(layer)] = (count + 1, [t + f for t, f in zip(totals, found, strict=True)])
            return result

        return watched

    try:
        for layer, call in zip(layers, calls, strict=True):
            sums[id(layer)] = (0, [np.zeros(s.shape) for s in _statistics(layer)])
            # With momentum 0, the moving statistics are those of the last call alone.
            layer.momentum = 0.0
            layer.call = watch(layer, call)
            for statistic in _statistics(layer):
                statistic.assign(np.zeros(statistic.shape))
        yield sums
    except BaseException:
        sums.clear()
        raise
    finally:
        for layer, call, momentum, values in zip(layers, calls, momenta, before, strict=True):
            layer.call, layer.momentum = call, momentum
            if not sums.get(id(layer), (0, []))[0]:
                # The model did not call the layer, or an exception ended the pass.
                for statistic, value in zip(_statistics(layer), values, strict=True):
                    statistic.assign(value)


def _replace(path: Path, before: Path, after: Path) -> None:
    """Copy the tensors that recalibration changed into an archive."""
    with contextlib.ExitStack() as stack:
        archive, old, new = KerasArchive.open(path), Hdf5.open(before), Hdf5.open(after)
        for network in (archive, old, new):
            stack.callback(network.close)
        changed = {name for name, t in new.tensors.items() if not _same(t.array(), old.tensors[name].array())}
        temporary = path.with_name(f"{path.name}.recalibrated")
        archive.write(temporary, _merged(archive, new, changed))
    os.replace(temporary, path)


def _merged(archive: Network, new: Network, changed: set[str]) -> Values:
    def values(tensor: Tensor) -> Iterator[np.ndarray]:
        source = new if tensor.name in changed else archive
        step = 1 << 20
        for start in range(0, tensor.size, step):
            yield source.tensors[tensor.name].array_at(start, min(step, tensor.size - start))

    return values


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


def _first(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
