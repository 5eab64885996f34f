"""What the network between the ranks bears, and the density that it affords."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from hvdx.comm import Channel
from hvdx.strategies.telemetry import entropy

#: The densities that are ever chosen. Above 1/8 an entry costs as much as in a bitmap; below 1e-4 residuals grow old.
LEAST, MOST = 1e-4, 1 / 8
# The probe: messages grow until one takes so long, or is so large.
_LONG_SECONDS = 0.05
_FIRST_BYTES, _LARGEST_BYTES = 1 << 14, 1 << 22
_PINGS = 9
# The running estimate: steps it looks back on, bytes below which a transfer tells of latency only.
_WINDOW = 33
_TELLING_BYTES = 4096


@dataclass(frozen=True)
class Link:
    """The way from one rank to all others, as the slowest rank finds it.

    Attributes:
        latency: seconds that an exchange takes that carries nothing.
        bandwidth: bytes a second that come in at one rank, from all others together.
    """

    latency: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{8e-6 * self.bandwidth:,.0f} Mbit/s, {1e3 * self.latency:.2g} ms"


def probe(channel: Channel) -> Link:
    """Measure the link with messages of growing length. Collective; takes a tenth of a second or so.

    Args:
        channel: between the ranks.

    Returns:
        The same on every rank.
    """
    nothing = np.zeros(0, np.uint8)
    pings = [_slowest(channel, nothing) for _ in range(_PINGS)]
    latency = median(pings[1:])
    size = _FIRST_BYTES
    while True:
        message = np.zeros(size, np.uint8)
        seconds = min(_slowest(channel, message), _slowest(channel, message))
        if seconds > _LONG_SECONDS or size >= _LARGEST_BYTES:
            break
        size *= 2
    others = max(channel.size - 1, 1)
    return Link(latency, others * size / max(seconds - latency, 1e-9))


def _slowest(channel: Channel, message: np.ndarray) -> float:
    """Seconds that an exchange took, on the rank where it took longest."""
    mine = channel.exchange([], message)
    return slowest(channel.exchange([round(1e9 * mine.seconds)]).headers[:, 0].tolist())


class Estimate:
    """Follows the link and the length of a step while both drift. What it is told must be alike on all ranks.

    Args:
        link: as `probe` found it.
    """

    def __init__(self, link: Link):
        self.link = link
        self._transfers: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._steps: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, computing: float, received: int, seconds: float) -> None:
        """Take in one step.

        Args:
            computing: seconds that the ranks computed.
            received: bytes that came in at a rank.
            seconds: that they took on the slowest rank.
        """
        self._steps.append(computing)
        if received >= _TELLING_BYTES:
            self._transfers.append((received, seconds))

    @property
    def computing(self) -> float | None:
        """Seconds that a step computes: the median; None before there are enough of them."""
        return median(self._steps) if len(self._steps) >= 4 else None

    def refresh(self) -> None:
        """Take the bandwidth from the steps that were seen, if they are enough to tell."""
        if len(self._transfers) < _WINDOW // 2:
            return
        rates = [n / max(s - self.link.latency, 0.1 * s, 1e-9) for n, s in self._transfers]
        self.link = Link(self.link.latency, median(rates))


def message_bytes(elements: int, density: float) -> float:
    """Bytes that a message of this density takes, by its entropy.

    Example:
        >>> round(message_bytes(1_000_000, 0.01))
        11349
    """
    return elements * density * entropy(density) / 8


def affordable_density(link: Link, size: int, elements: int, seconds: float) -> float:
    """The density whose messages all reach a rank within some time, in [LEAST, MOST].

    Args:
        link: between the ranks.
        size: number of ranks; a rank receives size - 1 messages.
        elements: of an update.
        seconds: the time there is.

    Example:
        >>> slow = Link(latency=0.0002, bandwidth=12.5e6)
        >>> round(affordable_density(slow, 2, 2_000_000, 0.002), 4)
        0.0099
    """
    room = link.bandwidth * max(seconds - link.latency, 0.0) / max(size - 1, 1)
    low, high = LEAST, MOST
    if message_bytes(elements, high) <= room:
        return high
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if message_bytes(elements, middle) <= room else (low, middle)
    return low


def slowest(headers: Sequence[int]) -> float:
    """The longest of some nanoseconds, in seconds."""
    return max(headers) / 1e9
