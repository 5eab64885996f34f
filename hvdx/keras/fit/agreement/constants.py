"""Constants in a traced training function: values that no variable holds, and that no broadcast makes equal."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
import xxhash

from hvdx.keras.seams.graphs import functions_in, traces_of

# Smaller constants are seeds, rates, sizes and numbers of ranks, which scripts may choose for each rank.
_ELEMENTS = 16


class Constant(NamedTuple):
    """A constant of at least 16 elements.

    Attributes:
        name: name of the operation in the graph.
        kind: dtype and shape.
        digest: digest of the values.
    """

    name: str
    kind: str
    digest: int


def constants_of(train_function: object) -> list[Constant]:
    """Return the numeric constants of at least 16 elements in a traced training function.

    Args:
        train_function: training function that Keras made, or a `tf.function`; [] if nothing was traced.
    """
    found: dict[tuple[str, int], Constant] = {}
    seen: set[str] = set()
    for function in functions_in(train_function):
        traces = traces_of(function)
        if any(tf.compat.as_str(traced.name) in seen for traced in traces):
            continue  # The definitions of a function contain those of the functions that it calls.
        for traced in traces:
            definition = traced.graph.as_graph_def()
            seen |= {inner.signature.name for inner in definition.library.function}
            for constant in (*_in_graph(definition), *_captured(traced.graph)):
                found.setdefault((constant.kind, constant.digest), constant)
    return list(found.values())


def differing(everyone: Sequence[list[Constant]]) -> list[str]:
    """Compare the constants of all ranks.

    Constants correspond if dtype and shape are equal; their names and order may differ. Where ranks have different
    numbers of constants of a dtype and shape, nothing is compared.

    Returns:
        Each constant of rank 0 that another rank lacks, with its dtype, shape and the ranks.

    Example:
        >>> mine, other = Constant("mask", "float32[64]", 1), Constant("mask", "float32[64]", 2)
        >>> differing([[mine], [mine]]), differing([[mine], [other]])
        ([], ['mask, float32[64] (ranks 1)'])
    """
    kinds = [[constant.kind for constant in constants] for constants in everyone]
    listed = []
    for constant in everyone[0]:
        if len({each.count(constant.kind) for each in kinds}) > 1:
            continue
        others = enumerate(everyone[1:], 1)
        ranks = [r for r, theirs in others if not any(c[1:] == constant[1:] for c in theirs)]
        if ranks:
            listed.append(f"{constant.name}, {constant.kind} (ranks {', '.join(map(str, ranks))})")
    return listed


def _in_graph(definition: tf.compat.v1.GraphDef) -> Iterator[Constant]:
    for node in [*definition.node, *(node for f in definition.library.function for node in f.node_def)]:
        if node.op == "Const":
            value = node.attr["value"].tensor
            shape = [dim.size for dim in value.tensor_shape.dim]
            if _counts(tf.as_dtype(value.dtype), shape):
                content = value.SerializeToString(deterministic=True)
                yield _constant(node.name, tf.as_dtype(value.dtype), shape, content)


def _captured(graph: tf.Graph) -> Iterator[Constant]:
    """Yield the eager tensors that a function uses; TensorFlow passes larger ones as arguments."""
    for outside, inside in graph.captures:
        if hasattr(outside, "numpy") and _counts(outside.dtype, outside.shape):
            values = np.ascontiguousarray(outside.numpy())
            yield _constant(inside.op.name, outside.dtype, list(outside.shape), values.view(np.uint8).data)


def _counts(dtype: tf.DType, shape: tf.TensorShape | Sequence[int]) -> bool:
    return (dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex) and math.prod(
        shape
    ) >= _ELEMENTS


def _constant(name: str, dtype: tf.DType, shape: Sequence[int], content: bytes | memoryview) -> Constant:
    return Constant(name, f"{dtype.name}{list(shape)}", xxhash.xxh3_64(content).intdigest())
