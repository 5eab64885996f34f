"""Measurement of the network between the ranks."""

from statistics import median

import numpy as np

from hvdx.comm.interfaces import Channel
from hvdx.costs.types import Link

# Messages of the probe grow from the first size until one takes longer than this time, or has the largest size.
_PROBE_SECONDS = 0.05
_FIRST_BYTES, _LARGEST_BYTES = 1 << 14, 1 << 22
_PINGS = 9


def probe(channel: Channel) -> Link:
    """Measure the link with messages of growing length, in a fraction of a second. Collective.

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
    return int(channel.exchange([round(1e9 * mine.seconds)]).headers[:, 0].max()) / 1e9
