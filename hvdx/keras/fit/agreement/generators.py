"""First elements of the generators that feed a share, recorded while they pass."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import xxhash

from hvdx.keras.backend import tf
from hvdx.keras.fit.agreement import pipeline
from hvdx.keras.seams.pipelines import generator_states, wrap_generator
from hvdx.keras.types import Arrays, GeneratorState

# Elements of each generator that are recorded.
_ELEMENTS = 16
_MARK = "_hvdx_elements"
# Digests of the components of each recorded element.
Elements = list[tuple[int, ...]]


def record(end: object) -> None:
    """Record the first elements that the generators of a dataset yield; the generators are read no further for it.

    Args:
        end: a dataset, perhaps made by `Dataset.from_generator`.
    """
    for state in _states(end):
        if not hasattr(state, _MARK):
            elements: Elements = []
            setattr(state, _MARK, elements)
            wrap_generator(state, functools.partial(_recording, elements=elements))


def recorded(end: object) -> list[Elements]:
    """Return the recorded elements of each generator of a dataset, as far as they were read."""
    return [list(getattr(state, _MARK)) for state in _states(end) if hasattr(state, _MARK)]


def differing(everyone: Sequence[list[Elements]]) -> list[int]:
    """Compare the results of `recorded` on all ranks.

    Elements are in the same order if one component is, such as the labels: the others may hold random noise.

    Returns:
        The ranks whose generators yield other elements than rank 0's, or the same in another order.

    Example:
        >>> mine, noisy, other = [(1, 7), (2, 8)], [(1, 5), (2, 6)], [(2, 8), (1, 7)]
        >>> differing([[mine], [noisy], [other]])
        [2]
    """
    return [rank for rank, theirs in enumerate(everyone) if any(map(_differ, everyone[0], theirs))]


def _differ(first: Elements, other: Elements) -> bool:
    """Return whether two generators differ in every component that tells their elements apart."""
    count = min(len(first), len(other))
    if len({len(element) for element in (*first, *other)}) > 1:
        return False
    mine, theirs = list(zip(*first[:count], strict=True)), list(zip(*other[:count], strict=True))
    telling = [(a, b) for a, b in zip(mine, theirs, strict=True) if len({*a, *b}) > 1]
    return bool(telling) and all(a != b for a, b in telling)


def _recording(generator: Callable[..., Iterable[Arrays]], elements: Elements) -> Callable[..., Iterator[Arrays]]:
    def recording(*args: object) -> Iterator[Arrays]:
        iterator = iter(generator(*args))
        if not elements:
            for element in itertools.islice(iterator, _ELEMENTS):
                elements.append(tuple(map(_digest, _components(element))))
                yield element
        yield from iterator

    return recording


def _components(element: Arrays) -> list[Arrays]:
    """Return the components of an element; unlike in `tf.nest`, a list is one tensor, as in `from_generator`."""
    if isinstance(element, dict):
        return [part for key in sorted(element) for part in _components(element[key])]
    if isinstance(element, tuple):
        return [part for inner in element for part in _components(inner)]
    return tf.nest.flatten(element, expand_composites=True) if not isinstance(element, list) else [element]


def _digest(part: Arrays) -> int:
    try:
        array = np.asarray(part)
    except ValueError:  # lists of different lengths
        array = np.array(repr(part))
    content = repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes()
    return xxhash.xxh3_64(content).intdigest()


def _states(end: object) -> list[GeneratorState]:
    return generator_states(list(pipeline.datasets(end)))
