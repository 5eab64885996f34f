"""Counters of an exchange."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from hvdx.costs.sizes import entropy


@dataclass
class Telemetry:
    """Counters of one exchange since it was opened.

    Attributes:
        steps: steps taken, including skipped ones.
        skipped: steps that all ranks skipped, because one of them had NaN or infinity.
        starved: steps in which this rank sent so few entries that the workers hardly learn from each other.
        elements: number of float32 elements in a step.
        entries: entries that this rank sent, in all steps.
        encoded: elements from which the entries were chosen: `elements` times the number of steps that encoded entries.
        entry_bytes: bytes of the messages with entries.
        messages: bytes of all messages of this rank, each counted once.
        sent, received: bytes that this rank gave to the network, and received from it.
        inside: bytes that this rank gave to other ranks of its host, by messages or in shared memory, where they are
            counted separately.
        computing: seconds from the end of one exchange to the beginning of the next.
        encoding: seconds spent on encoding messages.
        waiting: seconds until all ranks had begun the exchange.
        exchanging: seconds from then until all messages had arrived.
        decoding: seconds spent on adding up the messages, and after a period of several steps on writing the weights.
        density, tau: density and tau of the last step; tau is 0 if none is used.
        residual: root mean square of the residual in units of tau, from the last measurement, which is not taken in
            every step.
        period: number of steps from the last exchange to the next one.

    Example:
        >>> Telemetry(steps=2, sent=10).live()
        {'density': 0.0, 'tau': 0.0, 'MB_sent': 1e-05}
    """

    steps: int = 0
    skipped: int = 0
    starved: int = 0
    elements: int = 0
    entries: int = 0
    encoded: int = 0
    entry_bytes: int = 0
    messages: int = 0
    sent: int = 0
    received: int = 0
    inside: int = 0
    computing: float = 0.0
    encoding: float = 0.0
    waiting: float = 0.0
    exchanging: float = 0.0
    decoding: float = 0.0
    density: float = 0.0
    tau: float = 0.0
    residual: float = 0.0
    period: int = 1

    @property
    def bits(self) -> float:
        """Bits per entry on the wire; 0 before the first entry."""
        return 8 * self.entry_bytes / self.entries if self.entries else 0.0

    @property
    def entropy(self) -> float:
        """Bits per entry by the entropy, at the mean density of all steps."""
        return entropy(self.entries / self.encoded) if self.entries else 0.0

    def live(self) -> dict[str, float]:
        """Return the counters of the progress bar, three at most: an epoch's line has room for them."""
        return {"density": self.density, "tau": self.tau, "MB_sent": self.sent / 1e6}

    def full(self) -> dict[str, float]:
        """Return all counters, for the record of an epoch; times are means per step."""
        steps = max(self.steps, 1)
        return self.live() | {
            "MB_received": self.received / 1e6,
            "bits_per_entry": self.bits,
            "entropy_per_entry": self.entropy,
            "residual_rms": self.residual,
            "skipped_steps": float(self.skipped),
            "starved_steps": float(self.starved),
            "ms_computing": 1e3 * self.computing / steps,
            "ms_encoding": 1e3 * self.encoding / steps,
            "ms_waiting": 1e3 * self.waiting / steps,
            "ms_exchanging": 1e3 * self.exchanging / steps,
            "ms_decoding": 1e3 * self.decoding / steps,
        }


@dataclass
class AveragingTelemetry(Telemetry):
    """Counters of one optimiser under parameter averaging; `steps` counts its steps, not the averages.

    Attributes:
        averages: number of averages of the weights.
        divergence: 2-norm of the change that the last average made to this rank's weights, relative to their norm.
        excluded: averages without this rank, because its weights held NaN or infinity.

    Example:
        >>> AveragingTelemetry(averages=3, divergence=0.01).live()
        {'divergence': 0.01, 'MB_sent': 0.0}
    """

    averages: int = 0
    divergence: float = 0.0
    excluded: int = 0

    def live(self) -> dict[str, float]:
        return {"divergence": self.divergence, "MB_sent": self.sent / 1e6}

    def full(self) -> dict[str, float]:
        return self.live() | {
            "MB_received": self.received / 1e6,
            "averages": float(self.averages),
            "excluded": float(self.excluded),
            "ms_per_average": 1e3 * self.exchanging / max(self.averages, 1),
        }


class StalenessHistogram(dict[int, int]):
    """Number of updates by their staleness. Histograms can be added.

    Example:
        >>> seen = StalenessHistogram()
        >>> for staleness in (1, 3, 3):
        ...     seen.add(staleness)
        >>> seen + seen, round(seen.mean, 2)
        ({1: 2, 3: 4}, 2.33)
    """

    def add(self, staleness: int, times: int = 1) -> None:
        """Count updates of one staleness."""
        self[staleness] = self.get(staleness, 0) + times

    @property
    def mean(self) -> float:
        """Mean staleness; 0 if there are no updates."""
        return sum(s * n for s, n in self.items()) / max(sum(self.values()), 1)

    def __add__(self, other: "StalenessHistogram | int") -> "StalenessHistogram":
        total = StalenessHistogram(self)
        for staleness, times in other.items() if isinstance(other, StalenessHistogram) else ():
            total.add(staleness, times)
        return total

    __radd__ = __add__


@dataclass
class ServerTelemetry(Telemetry):
    """Counters of one worker under a parameter server; `skipped` counts its updates that were refused.

    Attributes:
        staleness: staleness of this worker's updates; an update is counted once for each part of the weights.
        waiting: seconds for which a server held answers back because of `max_staleness`.
        ending: seconds for which this worker waited for the others in flushes.
        refused: refused updates of all workers, as the servers counted them until the last flush.
        servers: report of the last flush, for each part of the weights: the rank that serves the part, its version,
            updates accepted, updates applied, updates refused, seconds of work on updates, seconds since the session
            was opened.

    Example:
        >>> ServerTelemetry(steps=2, sent=10, staleness=StalenessHistogram({4: 2})).live()
        {'staleness': 4.0, 'MB_sent': 1e-05}
    """

    staleness: StalenessHistogram = field(default_factory=StalenessHistogram)
    ending: float = 0.0
    refused: int = 0
    servers: tuple[tuple[float, ...], ...] = ()

    @property
    def updates_per_second(self) -> list[float]:
        """Updates per second that each server applied in the session that the last flush ended."""
        return [applied / max(seconds, 1e-9) for _, _, _, applied, _, _, seconds in self.servers]

    def live(self) -> dict[str, float]:
        return {"staleness": self.staleness.mean, "MB_sent": self.sent / 1e6}

    def full(self) -> dict[str, float]:
        steps, rates = max(self.steps, 1), self.updates_per_second
        return self.live() | {
            "MB_received": self.received / 1e6,
            "max_staleness": float(max(self.staleness, default=0)),
            # The servers report the refused updates of all workers in a flush; a worker knows its own earlier.
            "refused_updates": float(max(self.refused, self.skipped)),
            "updates_per_second": sum(rates) / len(rates) if rates else 0.0,
            "ms_computing": 1e3 * self.computing / steps,
            "ms_encoding": 1e3 * self.encoding / steps,
            "ms_waiting": 1e3 * self.waiting / steps,
            "ms_exchanging": 1e3 * self.exchanging / steps,
            "s_ending": self.ending,
        }


@dataclass
class StaleTelemetry(Telemetry):
    """Counters of one worker under `Threshold(max_staleness="inf")`; `skipped` counts its own skipped steps.

    Attributes:
        staleness: staleness of this worker's updates.
        waiting: seconds for which this worker waited for a worker that had many messages to apply.
        ending: seconds for which it waited for the others in flushes.

    Example:
        >>> StaleTelemetry(steps=2, sent=10, staleness=StalenessHistogram({4: 2})).live()
        {'density': 0.0, 'staleness': 4.0, 'MB_sent': 1e-05}
    """

    staleness: StalenessHistogram = field(default_factory=StalenessHistogram)
    ending: float = 0.0

    def live(self) -> dict[str, float]:
        return {"density": self.density, "staleness": self.staleness.mean, "MB_sent": self.sent / 1e6}

    def full(self) -> dict[str, float]:
        mine = {"tau": self.tau, "max_staleness": float(max(self.staleness, default=0)), "s_ending": self.ending}
        return super().full() | mine


def merged(costs: Sequence[Telemetry]) -> Telemetry:
    """Return the total cost of the exchanges of one training, such as those of several optimisers.

    Counts are added up; `steps`, `density` and other values that cannot be added are those of the largest exchange.

    Example:
        >>> merged([Telemetry(steps=1, elements=5), Telemetry(steps=1, elements=1)])  # doctest: +ELLIPSIS
        Telemetry(steps=1, skipped=0, starved=0, elements=6, ...)
    """
    if len(costs) == 1:
        return costs[0]
    largest = max(costs, key=lambda cost: cost.elements, default=Telemetry())
    # An optimiser that took no step, such as the default one of a model with two of its own, has the counters of no
    # strategy.
    costs = [cost for cost in costs if isinstance(cost, type(largest))]
    added = [f.name for f in fields(largest) if f.name != "servers"]
    total = type(largest)(**{name: sum(getattr(cost, name) for cost in costs) for name in added})
    of_largest = {"steps", "density", "tau", "residual", "period", "averages", "divergence", "excluded", "servers"}
    for name in of_largest & set(vars(total)):
        setattr(total, name, getattr(largest, name))
    return total


def concatenated(first: Telemetry, then: Telemetry) -> Telemetry:
    """Return the total cost of one exchange and of the exchange that replaced it.

    Example:
        >>> concatenated(Telemetry(steps=2, sent=5, tau=1.0), Telemetry(steps=3, sent=1, tau=2.0)).live()
        {'density': 0.0, 'tau': 2.0, 'MB_sent': 6e-06}
    """
    total = Telemetry(**{f.name: getattr(first, f.name) + getattr(then, f.name) for f in fields(Telemetry)})
    for name in ("density", "tau", "residual", "period"):
        setattr(total, name, getattr(then, name))
    total.elements = then.elements or first.elements
    return total
