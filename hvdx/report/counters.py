"""Counters of the costs of a run."""

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
        telemetry: costs of the exchanges, one record per optimiser; empty until `finish`.
    """

    size: int = 1
    steps: int = 0
    steps_before: int = 0
    seconds: float = 0.0
    telemetry: list[Any] = field(default_factory=list)
    _begin: float = field(default=0.0, repr=False)

    @property
    def exchange_seconds(self) -> float:
        """Seconds from local to combined gradients or updates, over all steps; waiting for other ranks included."""
        return sum((c.encoding + c.waiting + c.exchanging + c.decoding for c in self.telemetry), 0.0)

    @property
    def exchanges(self) -> int:
        """Number of exchanges: the highest count of any optimiser."""
        return max((cost.steps for cost in self.telemetry), default=0)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent."""
        return sum(cost.sent for cost in self.telemetry)

    @property
    def bytes_per_exchange(self) -> int:
        """Mean number of bytes that this rank sent per exchange."""
        return round(self.bytes_sent / self.exchanges) if self.exchanges else 0

    @property
    def steps_of_epoch(self) -> int:
        """Steps taken in the present epoch."""
        return self.steps - self.steps_before

    def begin_epoch(self) -> None:
        """Begin to count an epoch."""
        self.steps_before = self.steps

    def count(self, steps: int) -> None:
        """Count the steps of the present epoch: `steps` so far."""
        self.steps = self.steps_before + steps

    def start(self) -> None:
        """Start the clock."""
        self._begin = time.perf_counter()

    def finish(self, costs: Iterable[Any]) -> None:
        """Stop the clock and store the costs of each optimiser's exchanges."""
        self.seconds = time.perf_counter() - self._begin
        self.telemetry = list(costs)
