"""The datasets that a `tf.data` pipeline is made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from hvdx.keras.backend import tf
from hvdx.keras.seams.graphs import ConcreteFunction, closure_of
from hvdx.keras.seams.replacing import Method
from hvdx.keras.types import GeneratorState


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Return the datasets that a dataset reads.

    Relies on: `Dataset._inputs`; `_impl` of readers of files, which do not count the datasets that they are made of.
    """
    inside = getattr(dataset, "_impl", None)
    return [inside] if isinstance(inside, tf.data.Dataset) else list(dataset._inputs())


def functions_of(dataset: tf.data.Dataset) -> list[ConcreteFunction]:
    """Return the concrete functions that a dataset calls for its elements, such as that of `map`.

    Relies on: `Dataset._functions`, each with a `function`.
    """
    wrappers = dataset._functions() if hasattr(dataset, "_functions") else []
    return [wrapper.function for wrapper in wrappers if hasattr(wrapper.function, "graph")]


def determinism_of(dataset: tf.data.Dataset) -> str:
    """Return "true", "false" or "default": whether a dataset yields its elements in order.

    Relies on: `_deterministic` of `map`, `interleave` and others.
    """
    return str(getattr(dataset, "_deterministic", "true"))


def seeds_of(dataset: tf.data.Dataset) -> tuple[int, ...]:
    """Return the pair of seeds of a random dataset, (0, 0) if it has none; () for others.

    Relies on: `_seed` and `_seed2`, tensors.
    """
    pair = [getattr(dataset, "_seed", None), getattr(dataset, "_seed2", None)]
    return tuple(int(seed) for seed in pair if isinstance(seed, tf.Tensor))


#: What users call a shuffle that has no seed.
UNSEEDED_SHUFFLE = "Dataset.shuffle without a seed"


def unseeded_order(dataset: tf.data.Dataset) -> str:
    """Return what users call a random dataset without a seed.

    Relies on: the names of TensorFlow's classes, `_ShuffleDataset` and `_RandomDataset`.
    """
    names = {
        "_ShuffleDataset": UNSEEDED_SHUFFLE,
        "_RandomDataset": "Dataset.random or sample_from_datasets without a seed",
    }
    return names.get(type(dataset).__name__, "a random order without a seed")


def tensors_in(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Return the tensors that a source holds, such as arrays, bounds of a range, and names of files.

    Relies on: they are attributes of the dataset, or in lists.
    """
    held = [v for value in vars(dataset).values() for v in (value if isinstance(value, list | tuple) else [value])]
    return [v for v in held if isinstance(v, tf.Tensor) and v.dtype not in (tf.variant, tf.resource)]


def cache_file_of(dataset: tf.data.Dataset) -> str:
    """Return the file of a dataset that `cache` made; "" for a cache in memory, and for other datasets.

    Relies on: `CacheDataset._filename`, a tensor, and its name.
    """
    name = getattr(dataset, "_filename", None)
    return os.fsdecode(name.numpy()) if name is not None and "CacheDataset" in type(dataset).__name__ else ""


def copies_to_device(dataset: tf.data.Dataset) -> bool:
    """Return whether a dataset copies another one to a GPU.

    Relies on: the name of the class, `_CopyToDeviceDataset`.
    """
    return "CopyToDevice" in type(dataset).__name__


def batch_size_of_dataset(dataset: tf.data.Dataset) -> int | None:
    """Return the batch size of a dataset that batches; None for others.

    Relies on: `_BatchDataset._batch_size`; `set_batch_size` sets the same attribute.
    """
    size = getattr(dataset, "_batch_size", None)
    return None if size is None else int(size)


def set_batch_size(dataset: tf.data.Dataset, size: int) -> None:
    """Let `batch_size_of_dataset` return a size for a dataset that TensorFlow does not batch."""
    dataset._batch_size = size


def dataset_before(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Return the dataset that a transformation reads; None for a source.

    Relies on: `UnaryDataset._input_dataset`.
    """
    return getattr(dataset, "_input_dataset", None)


def keeps_steps(dataset: tf.data.Dataset) -> bool:
    """Return whether a transformation yields an element for each one that it reads, in order, as `map` does.

    Relies on: the names of TensorFlow's classes.
    """
    kept = "Map", "Prefetch", "Take", "Skip", "Repeat", "Options", "AssertCardinality"
    return type(dataset).__name__.lstrip("_").removeprefix("Parallel") in {f"{name}Dataset" for name in kept}


def generator_states(datasets: Sequence[tf.data.Dataset]) -> list[GeneratorState]:
    """Return TensorFlow's record of each Python generator of `Dataset.from_generator`.

    Relies on: the closures of the functions in `Dataset._functions` hold it, and it has `get_next_id`.
    """
    functions = [f for dataset in datasets for f in dataset._functions()]
    held = [v for f in functions for inner in closure_of(getattr(f, "_func", None)) for v in closure_of(inner)]
    states = [v for v in held if hasattr(v, "_generator") and hasattr(v, "get_next_id")]
    return list({id(state): state for state in states}.values())


def wrap_generator(state: GeneratorState, wrapper: Callable[[Method], Method]) -> None:
    """Replace a generator of `generator_states` by `wrapper(generator)`.

    Relies on: `_GeneratorState._generator` is called when a pass begins.
    """
    state._generator = wrapper(state._generator)
