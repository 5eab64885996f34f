"""State of a model besides its weights: its configuration, its vocabularies, and the statistics of adapted layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import xxhash

from hvdx.keras.backend import is_a, tf
from hvdx.keras.fit.agreement import pipeline
from hvdx.keras.fit.agreement.sample import Sample, alike, sample
from hvdx.keras.seams.models import direct_layers_of, layers_of
from hvdx.keras.seams.pipelines import functions_of

# Keys that may differ: names (counters of Keras), seeds (noise of a rank's own), and numbers of objects.
_OMITTED = {"name", "seed", "shared_object_id"}
# Length from which a list counts as one value.
_LONG = 64

#: Digest of a vocabulary, or a sample of statistics.
State: TypeAlias = int | Sample


def adapted(model: keras.Model) -> list[tuple[str, State]]:
    """Return the state of each preprocessing layer of a model.

    Returns:
        Name of the layer, and a digest of its vocabulary or a sample of its statistics.
    """
    found: list[tuple[str, State]] = []
    for layer in layers_of(model):
        name = f"{type(layer).__name__} {layer.name}"
        table: Any = getattr(layer, "lookup_table", None)
        if is_a(table, "lookup.experimental.MutableHashTable") or is_a(table, "lookup.StaticHashTable"):
            found.append((name, table_digest(table.resource_handle, table.key_dtype, table.value_dtype)))
        if getattr(layer, "idf_weights_const", None) is not None:
            found.append((name, sample(layer.idf_weights_const)))
        if isinstance(layer, keras.layers.Normalization) and layer.mean is not None:
            found.append((name, sample((layer.mean, layer.variance))))
        if isinstance(layer, keras.layers.Discretization) and layer.bin_boundaries is not None:
            found.append((name, sample(np.asarray(layer.bin_boundaries))))
    return found


def synchronized(model: keras.Model) -> list[str]:
    """Return the names of the layers that ask Keras for the statistics of all replicas."""
    layers = [layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]
    return [layer.name for layer in layers if getattr(layer, "synchronized", False)]


def tables_of(end: object) -> list[tuple[str, State]]:
    """Return a digest of each lookup table that the functions of a dataset use, such as those of a `StringLookup`.

    Args:
        end: a dataset; anything else has no tables.
    """
    found: dict[int, tuple[str, State]] = {}
    for function in (f for dataset in pipeline.datasets(end) for f in functions_of(dataset)):
        handles = {id(inside): outside for outside, inside in function.graph.captures}
        for operation in function.graph.get_operations():
            handle = handles.get(id(operation.inputs[0])) if operation.type == "LookupTableFindV2" else None
            if isinstance(handle, tf.Tensor) and id(handle) not in found and hasattr(handle, "numpy"):
                digest = table_digest(handle, operation.get_attr("Tin"), operation.get_attr("Tout"))
                found[id(handle)] = ("a lookup table of the dataset", digest)
    return list(found.values())


def table_digest(handle: tf.Tensor, keys: tf.DType, values: tf.DType) -> int:
    """Return a digest of the entries of a lookup table, which does not depend on their order.

    Args:
        handle: handle of the table's resource.
        keys, values: dtypes.
    """
    exported = tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=keys, Tvalues=values)
    left, right = (_numbers(part) for part in exported)
    # Constants of SplitMix64 (Steele, Lea, Flood 2014); uint64 wraps around.
    entries = (left * np.uint64(0x9E3779B97F4A7C15) + right) * np.uint64(0xBF58476D1CE4E5B9)
    entries = (entries ^ (entries >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return int((entries ^ (entries >> np.uint64(29))).sum(dtype=np.uint64))


def _numbers(part: tf.Tensor) -> np.ndarray:
    """Return a uint64 for each row of keys or values of a table."""
    if part.dtype == tf.string:
        part = tf.strings.to_hash_bucket_fast(part, 2**63 - 1)
    numbers = part.numpy()
    if numbers.dtype.kind == "f":
        numbers = numbers.astype(np.float64).view(np.uint64)
    rows = numbers.astype(np.uint64).reshape(len(numbers), -1)
    return rows @ (2 * np.arange(rows.shape[1], dtype=np.uint64) + np.uint64(1))


def differing(everyone: Sequence[list[tuple[str, State]]]) -> list[str]:
    """Compare the results of `adapted` or `tables_of` on all ranks.

    Returns:
        Name of each layer that differs, with the ranks where it is not as on rank 0; [] if the ranks have different
        numbers of layers.
    """
    if len({len(states) for states in everyone}) > 1:
        return []
    listed = []
    for (name, first), *others in zip(*everyone, strict=True):
        ranks = [rank for rank, (_, other) in enumerate(others, 1) if not _same(first, other)]
        if ranks:
            listed.append(f"{name} (ranks {', '.join(map(str, ranks))})")
    return listed


def _same(first: State, other: State) -> bool:
    if isinstance(first, Sample) and isinstance(other, Sample):
        return alike(first, other)
    return type(first) is type(other) and first == other


def configuration(model: keras.Model) -> dict[str, str]:
    """Return the values of a model's configuration, and of the layers in it, by their places.

    Names of layers are replaced by numbers, because Keras' counters may differ between ranks.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> configuration(model)["0 Sequential.layers.1.config.units"]
        '3'
    """
    values: dict[str, str] = {}
    for i, (kind, config) in enumerate(_configs(model)):
        numbers: dict[str, int] = {}
        for name in _names(config):
            numbers.setdefault(name, len(numbers))
        values |= dict(_leaves(f"{i} {kind}", config, numbers))
    return values


def digest(configured: Mapping[str, str]) -> int:
    """Return a digest of the result of `configuration`."""
    return xxhash.xxh3_64("\0".join(f"{k}={v}" for k, v in sorted(configured.items())).encode()).intdigest()


def differing_values(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> list[str]:
    """Compare the results of `configuration` on two ranks.

    Args:
        first: values on rank 0.
        other: values on another rank.
        rank: number of the other rank.

    Returns:
        Each value that differs, as it is on both ranks.
    """
    places = dict.fromkeys([*first, *other])
    values = [(place.partition(" ")[2], first.get(place, "nothing"), other.get(place, "nothing")) for place in places]
    return [f"{name} is {a:.60} on rank 0, {b:.60} on rank {rank}" for name, a, b in values if a != b]


def _configs(layer: keras.layers.Layer) -> Iterator[tuple[str, object]]:
    """Yield the configuration of a layer, and those of the layers in it that its own does not contain."""
    try:
        config = layer.get_config()
    except Exception:  # Many subclassed layers have no configuration, and a user's get_config may raise anything.
        config = {}
    yield type(layer).__name__, config
    if not isinstance(config, Mapping) or "layers" not in config:
        for inner in direct_layers_of(layer):
            yield from _configs(inner)


def _names(config: object) -> Iterator[str]:
    """Yield the names of the layers in a configuration."""
    if isinstance(config, Mapping):
        inner = config.get("config")
        if isinstance(inner, Mapping) and not str(config.get("class_name")).endswith("Policy"):
            yield from (value for value in [inner.get("name")] if isinstance(value, str))
        for value in config.values():
            yield from _names(value)
    elif isinstance(config, list | tuple) and not _is_long(config):
        for value in config:
            yield from _names(value)


def _leaves(place: str, value: object, numbers: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":
            return  # Its code holds the path of its file.
        if value.get("class_name") in ("__numpy__", "__tensor__"):
            yield place, f"an array with digest {xxhash.xxh3_64(repr(value).encode()).hexdigest()}"
            return
        policy = str(value.get("class_name")).endswith("Policy")
        for key, inner in value.items():
            if policy and key == "config":
                yield f"{place}.{key}", repr(inner.get("name") if isinstance(inner, Mapping) else type(inner).__name__)
            elif key not in _OMITTED:
                yield from _leaves(f"{place}.{key}", inner, numbers)
    elif isinstance(value, list | tuple) and not _is_long(value):
        for i, inner in enumerate(value):
            yield from _leaves(f"{place}.{i}", inner, numbers)
    elif isinstance(value, list | tuple):
        yield place, f"{len(value)} values with digest {xxhash.xxh3_64(repr(value).encode()).hexdigest()}"
    elif isinstance(value, str | bytes | bool | int | float | None):
        yield place, f"layer {numbers[value]}" if isinstance(value, str) and value in numbers else repr(value)
    elif isinstance(value, np.ndarray | np.generic) or is_a(value, "Tensor"):
        data = np.ascontiguousarray(value)
        yield place, f"{data.dtype}{list(data.shape)} with digest {xxhash.xxh3_64(data.tobytes()).hexdigest()}"
    else:
        # The representation of an object may hold its address.
        yield place, type(value).__name__


def _is_long(values: list[object] | tuple[object, ...]) -> bool:
    """Return whether a list counts as one value: it is long, and holds no parts of a configuration."""
    return len(values) >= _LONG and not isinstance(values[0], Mapping | list | tuple)
