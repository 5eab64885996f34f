"""Comparison of networks before they are averaged: tensors, and architecture."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdx.averaging.network import Network, native
from hvdx.errors import AverageError

_OTHER = "Only networks of the same architecture have a mean."
# Mean and variance that `Normalization.adapt` has computed, in Keras' files; the third tensor is an integer.
_ADAPTED = re.compile(r"(?:^|/)(normalization(?:_\d+)?)/vars/[01]$")


def check_alike(networks: Sequence[Network]) -> None:
    """Check that all networks have the same tensors and the same architecture.

    Args:
        networks: open networks.

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
    """Return the names of Keras' `Normalization` layers whose statistics differ between networks.

    Args:
        networks: open networks that are alike.
    """
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
