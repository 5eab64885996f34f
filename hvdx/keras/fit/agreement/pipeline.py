"""Walks through a `tf.data` pipeline, from its end to its sources."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdx.keras.backend import is_dataset, tf
from hvdx.keras.fit.agreement.sample import Sample, alike, sample
from hvdx.keras.seams.pipelines import (
    UNSEEDED_SHUFFLE,
    determinism_of,
    functions_of,
    inputs_of,
    seeds_of,
    tensors_in,
    unseeded_order,
)

# Operations of TensorFlow that draw random numbers.
_RANDOM = re.compile("Random|TruncatedNormal|Multinomial|Stateful(Uniform|StandardNormal)")
# Transformations after which a pass still reads each element of the source once.
_COMPLETE = re.compile("_(TensorSlice|Shuffle|(Parallel)?Batch|Prefetch|(Parallel)?Map|Cache|Options)Dataset(V2)?")
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc", "GeneratorDataset"}


class Step(NamedTuple):
    """Source or transformation of a pipeline on which the order of its elements depends.

    Attributes:
        kind: name of the dataset's class.
        seeds: pair of seeds of a random order, or ().
        source: sample of a source's arrays or names of files; None for a transformation.
    """

    kind: str
    seeds: tuple[int, ...]
    source: Sample | None


def datasets(end: object) -> Iterator[tf.data.Dataset]:
    """Yield a dataset and all datasets that it is made of.

    Args:
        end: a `tf.data.Dataset`; anything else yields nothing.
    """
    seen, waiting = set(), [end]
    while waiting:
        dataset = waiting.pop()
        if is_dataset(dataset) and id(dataset) not in seen:
            seen.add(id(dataset))
            yield dataset
            waiting += reversed(inputs_of(dataset))


def cause_of_other_order(end: object) -> str | None:
    """Return the reason why each process reads a dataset in another order, or None if there is none.

    Example:
        >>> cause_of_other_order(tf.data.Dataset.range(9).map(abs, 2, deterministic=False).batch(3))
        'deterministic=False'
        >>> cause_of_other_order(tf.data.Dataset.range(9).shuffle(9, seed=1).batch(3)) is None
        True
    """
    free = is_dataset(end) and end.options().deterministic is False
    for dataset in datasets(end):
        if seeds_of(dataset) == (0, 0):
            return unseeded_order(dataset)
        kept = determinism_of(dataset)
        if kept == "false" or (free and kept == "default"):
            return "deterministic=False"
        for function in functions_of(dataset):
            for operation in function.graph.get_operations():
                if operation.type.startswith("ShuffleDataset") and _constants(operation.inputs[2:4]) == (0, 0):
                    return UNSEEDED_SHUFFLE
    return None


def order_of(end: object) -> list[Step]:
    """Return the sources and the seeds of a dataset: two ranks that differ in them read different orders."""
    steps = []
    for dataset in datasets(end):
        source = None if inputs_of(dataset) else sample(tensors_in(dataset), paths=True)
        seeds = seeds_of(dataset)
        if seeds or source is not None:
            steps.append(Step(type(dataset).__name__, seeds, source))
    return steps


def same_order(first: list[Step], other: list[Step]) -> str | None:
    """Compare the results of `order_of` on two ranks.

    Returns:
        None if they are alike, otherwise what differs: "sources" or "seeds".
    """
    if [step.kind for step in first] != [step.kind for step in other]:
        return "sources"
    if any(a.seeds != b.seeds for a, b in zip(first, other, strict=True)):
        return "seeds"
    sources = [(a.source, b.source) for a, b in zip(first, other, strict=True) if a.source and b.source]
    return None if all(alike(a, b) for a, b in sources) else "sources"


def source_of(end: object) -> int | None:
    """Return a digest of the arrays or paths all of which each pass through a dataset reads; None if it is unknown.

    Integers in one dimension do not count: they may be numbers of samples, in a range of each rank.

    Example:
        >>> rows = tf.data.Dataset.from_tensor_slices([0.5, 1.5, 2.5])
        >>> source_of(rows.shuffle(3).batch(2)) == source_of(rows.batch(3)), source_of(rows.shard(2, 0))
        (True, None)
    """
    found = list(datasets(end))
    if not found or not all(_COMPLETE.fullmatch(type(dataset).__name__) for dataset in found):
        return None
    tensors = tensors_in(found[-1])
    return None if all(t.dtype.is_integer and t.shape.rank == 1 for t in tensors) else sample(tensors).digest()


def draws_random(end: object) -> bool:
    """Return whether operations of TensorFlow in a pipeline draw random numbers, as augmentations do.

    Example:
        >>> draws_random(tf.data.Dataset.range(3).map(lambda i: i + tf.random.uniform((), 0, 9, tf.int64)))
        True
    """
    graphs = (function.graph.as_graph_def() for dataset in datasets(end) for function in functions_of(dataset))
    nodes = ((graph.node, *(inner.node_def for inner in graph.library.function)) for graph in graphs)
    return any(_RANDOM.search(node.op) for parts in nodes for part in parts for node in part)


def runs_python(end: object) -> bool:
    """Return whether Python code makes elements of a dataset, so that its order cannot be read from the pipeline.

    Example:
        >>> runs_python(tf.data.Dataset.range(3).map(lambda i: i + 1))
        False
    """
    return any(
        operation.type in _PYTHON
        for dataset in datasets(end)
        for function in functions_of(dataset)
        for operation in function.graph.get_operations()
    )


def _constants(tensors: Sequence[tf.Tensor]) -> tuple[int | None, ...]:
    values = [tf.get_static_value(tensor) for tensor in tensors]
    return tuple(None if value is None else int(value) for value in values)
