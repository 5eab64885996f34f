"""What a run cost, counted while it runs."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Counts of one `fit`.

    Attributes:
        size: number of ranks.
        steps: training steps taken by this rank.
        steps_before: steps taken in earlier epochs.
        seconds: wall time of the fit.
        exchange_seconds: wall time between the last gradient and the last combined gradient, over all steps; waiting
            for slower ranks is part of it.
        exchanges: how often gradients or updates were combined.
        bytes_sent: bytes that this rank sent.
        telemetry: what the exchanges of each optimiser cost, in detail.
    """

    size: int = 1
    steps: int = 0
    steps_before: int = 0
    seconds: float = 0.0
    exchange_seconds: float = 0.0
    exchanges: int = 0
    bytes_sent: int = 0
    telemetry: list[Any] = field(default_factory=list)
    _begin: float = field(default=0.0, repr=False)

    @property
    def bytes_per_exchange(self) -> int:
        """Bytes that this rank sent each time, on average."""
        return round(self.bytes_sent / self.exchanges) if self.exchanges else 0

    def start(self) -> None:
        """Begin to count time."""
        self._begin = time.perf_counter()

    def finish(self, costs: Iterable[Any]) -> None:
        """Stop the time, and take in what the exchanges of each optimiser counted."""
        self.seconds = time.perf_counter() - self._begin
        self.telemetry = list(costs)
        for cost in self.telemetry:
            self.exchange_seconds += cost.encoding + cost.waiting + cost.exchanging + cost.decoding
            self.exchanges = max(self.exchanges, cost.steps)
            self.bytes_sent += cost.sent
