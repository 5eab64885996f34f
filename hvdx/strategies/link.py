"""Measurement of the network between the ranks, and sizes of messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from hvdx.comm import Channel
from hvdx.strategies.telemetry import entropy

# Messages of the probe grow from the first size until one takes longer than this time, or has the largest size.
_PROBE_SECONDS = 0.05
_FIRST_BYTES, _LARGEST_BYTES = 1 << 14, 1 << 22
_PINGS = 9


@dataclass(frozen=True)
class Link:
    """Network from one rank to all others, as the slowest rank measures it.

    Attributes:
        latency: seconds of an exchange of empty messages.
        bandwidth: bytes per second that one rank receives from all others together.
        reducing: share of the bandwidth that MPI's blocking all-reduce reaches; 1 if it was not measured.
    """

    latency: float
    bandwidth: float
    reducing: float = 1.0

    def __str__(self) -> str:
        return f"{8e-6 * self.bandwidth:,.0f} Mbit/s, {1e3 * self.latency:.2g} ms"


def probe(channel: Channel) -> Link:
    """Measure the link with messages of growing length, in a fraction of a second. Collective.

    Args:
        channel: channel between the ranks.

    Returns:
        The link, the same on every rank.
    """
    empty = np.zeros(0, np.uint8)
    pings = [_slowest(channel, empty) for _ in range(_PINGS)]
    latency = median(pings[1:])
    size = _FIRST_BYTES
    while True:
        message = np.zeros(size, np.uint8)
        seconds = min(_slowest(channel, message), _slowest(channel, message))
        if seconds > _PROBE_SECONDS or size >= _LARGEST_BYTES:
            break
        size *= 2
    others = max(channel.size - 1, 1)
    return Link(latency, others * size / max(seconds - latency, 1e-9))


def _slowest(channel: Channel, message: np.ndarray) -> float:
    """Return the seconds of an exchange on the rank where it took longest."""
    mine = channel.exchange([], message)
    return slowest(channel.exchange([round(1e9 * mine.seconds)]).headers[:, 0].tolist())


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


def slowest(nanoseconds: Sequence[int]) -> float:
    """Return the largest of some times in nanoseconds, converted to seconds."""
    return max(nanoseconds) / 1e9
