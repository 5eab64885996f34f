"""Sizes of messages."""

import math


def entropy(density: float) -> float:
    """Return the bits per entry of the positions and signs of independent entries of a given density: H(p) / p + 1.

    Args:
        density: the share p of elements that are entries, in (0, 1].

    Example:
        >>> round(entropy(0.01), 2)
        9.08
    """
    if density >= 1:
        return 1.0
    absent = 1 - density
    return -math.log2(density) - absent / density * math.log2(absent) + 1


def message_bytes(elements: int, density: float) -> float:
    """Return the bytes of a message of this density, by its entropy.

    Example:
        >>> round(message_bytes(1_000_000, 0.01))
        11349
    """
    return elements * density * entropy(density) / 8


def ring_bytes(payload: float, size: int) -> int:
    """Return the bytes that one rank sends in a ring all-reduce: 2 (N - 1) / N times the payload.

    Args:
        payload: bytes of the tensors.
        size: number of ranks.
    """
    return round(payload * 2 * (size - 1) / size)
