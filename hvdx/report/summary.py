"""The table that a training job prints at its end."""

from collections.abc import Sequence
from typing import Any

import hvdx
from hvdx.report.bars import bars
from hvdx.report.table import quantity, render

Row = tuple[str, str]


def summary(results: Sequence[Row], distribute: Any, seconds: float, speed: Row) -> str:
    """Return the table of a run: its results, its speed, and the cost of the exchanges.

    Args:
        results: rows about the trained model.
        distribute: the callback `Distribute` of the run.
        seconds: duration of the run.
        speed: row about the speed.
    """
    counters = distribute.counters
    steps = max(counters.exchanges, 1)
    share = counters.exchange_seconds / counters.seconds if counters.seconds else 0.0
    rows = [
        ("workers", str(hvdx.size())),
        ("strategy", repr(distribute.strategy) if hvdx.size() > 1 else "none (one process)"),
        *results,
        ("seconds", f"{seconds:.1f}"),
        speed,
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


def costs(counters: Any) -> list[Row]:
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
            ("bits an entry, and their entropy", f"{cost.bits:.2f}, {cost.entropy:.2f}"),
            ("residual, in tau", f"{cost.residual:.2f}"),
            ("float32 bytes / message bytes", f"{4 * cost.elements * steps / max(cost.messages, 1):,.0f}"),
            ("steps skipped", str(cost.skipped)),
            ("ms " + ", ".join(phases), ", ".join(f"{1e3 * getattr(cost, phase) / steps:.1f}" for phase in phases)),
        ]
    return rows
