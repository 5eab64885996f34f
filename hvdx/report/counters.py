"""Counters of the costs of a fit, and the table of them, which `Distribute` prints at its end."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdx.report.table import quantity, render


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


_MAX_ROWS = 16


def bars(counts: Mapping[int, int], width: int = 40) -> str:
    """Draw a histogram of integers.

    Args:
        counts: number of occurrences of each integer. If they span more than 16, adjacent integers share a bar.
        width: length of the longest bar, in characters.

    Returns:
        One line for each bar: the integers, their count and the bar; "" for empty `counts`.

    Example:
        >>> print(bars({1: 2, 2: 8, 4: 4}, width=8))
        1  2  ##
        2  8  ########
        3  0
        4  4  ####
    """
    if not counts:
        return ""
    first, last = min(counts), max(counts)
    step = -(-(last - first + 1) // _MAX_ROWS)
    rows = []
    for low in range(first, last + 1, step):
        high = min(low + step - 1, last)
        rows.append((f"{low}" if high == low else f"{low}-{high}", sum(counts.get(n, 0) for n in range(low, high + 1))))
    most = max(count for _, count in rows)
    names, numbers = max(len(name) for name, _ in rows), max(len(f"{count}") for _, count in rows)
    lines = []
    for name, count in rows:
        bar = "#" * max(round(width * count / most), int(count > 0))
        lines.append(f"{name:<{names}}  {count:>{numbers}}  {bar}".rstrip())
    return "\n".join(lines)


_Row = tuple[str, str]


def summary(strategy: str, counters: Counters) -> str:
    """Return the table of a fit: its steps and seconds, and the cost of the exchanges.

    Args:
        strategy: the strategy, as the call that makes it.
        counters: counters of the fit, after its end.

    Example:
        >>> print(summary("AllReduce()", Counters(size=2, steps=10, seconds=4.0)))
        workers                                                 2
        strategy                                      AllReduce()
        steps of this worker                                   10
        seconds                                               4.0
        bytes sent a step, each worker                        0 B
        time in communication           0.0 s, 0 %, 0.0 ms a step
    """
    steps = max(counters.exchanges, 1)
    share = counters.exchange_seconds / counters.seconds if counters.seconds else 0.0
    rows = [
        ("workers", str(counters.size)),
        ("strategy", strategy if counters.size > 1 else "none (one process)"),
        ("steps of this worker", str(counters.steps)),
        ("seconds", f"{counters.seconds:.1f}"),
        ("bytes sent a step, each worker", quantity(counters.bytes_per_exchange, "B")),
        (
            "time in communication",
            f"{counters.exchange_seconds:.1f} s, {100 * share:.0f} %, "
            f"{1000 * counters.exchange_seconds / steps:.1f} ms a step",
        ),
        *costs(counters),
    ]
    drawn = [bars(cost.staleness) for cost in counters.telemetry if getattr(cost, "staleness", None)]
    return "\n\n".join([render(rows), *(f"staleness of this worker's updates\n{picture}" for picture in drawn)])


def costs(counters: Counters) -> list[_Row]:
    """Return rows about compressed updates, averages and servers, if there were any."""
    rows = []
    for cost in counters.telemetry:
        averages = getattr(cost, "averages", 0)
        if averages:
            rows += [
                ("averages of the weights", f"{averages}, {1e3 * cost.exchanging / averages:.0f} ms each"),
                ("divergence before the last average", f"{100 * cost.divergence:.2g} %"),
            ]
        if getattr(cost, "staleness", None):
            rows += [
                ("mean staleness, this worker", f"{cost.staleness.mean:.2f}"),
                ("seconds waiting at ends of epochs", f"{cost.ending:.1f}"),
            ]
        if getattr(cost, "servers", None):
            parts = ("computing", "encoding", "waiting", "exchanging")
            rows += [
                ("updates a second, each server", f"{sum(cost.updates_per_second) / len(cost.servers):.1f}"),
                ("updates refused", str(cost.skipped)),
                (
                    "ms " + ", ".join(parts),
                    ", ".join(f"{1e3 * getattr(cost, part) / cost.steps:.1f}" for part in parts),
                ),
            ]
        if not cost.entries:
            continue
        steps, phases = cost.steps, ("computing", "encoding", "waiting", "exchanging", "decoding")
        rows += [
            ("density, tau, at the end", f"{cost.density:.2g}, {cost.tau:.3g}"),
            *([("steps from one exchange to the next, at the end", str(cost.period))] if cost.period > 1 else []),
            ("bits an entry, and their entropy", f"{cost.bits:.2f}, {cost.entropy:.2f}"),
            ("residual, in tau", f"{cost.residual:.2f}"),
            ("float32 bytes / message bytes", f"{4 * cost.elements * steps / max(cost.messages, 1):,.0f}"),
            ("steps skipped", str(cost.skipped)),
            ("ms " + ", ".join(phases), ", ".join(f"{1e3 * getattr(cost, phase) / steps:.1f}" for phase in phases)),
        ]
    return rows
