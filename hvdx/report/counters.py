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
        exchanges: how often gradients were combined.
        bytes_per_exchange: bytes that this rank sent each time.
    """

    size: int = 1
    steps: int = 0
    steps_before: int = 0
    seconds: float = 0.0
    exchange_seconds: float = 0.0
    exchanges: int = 0
    bytes_per_exchange: int = 0
    _begin: float = field(default=0.0, repr=False)

    def start(self) -> None:
        """Begin to count time."""
        self._begin = time.perf_counter()

    def finish(self, bindings: Iterable[Any]) -> None:
        """Stop the time, and collect what the exchanges counted."""
        self.seconds = time.perf_counter() - self._begin
        for binding in bindings:
            self.exchange_seconds += float(binding.seconds.numpy())
            self.exchanges = max(self.exchanges, int(binding.exchanges.numpy()))
            self.bytes_per_exchange += binding.strategy.bytes_per_step(binding.specs, self.size)
