"""What an exchange cost, counted while it runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields


def entropy(density: float) -> float:
    """Bits an entry of the positions and signs of entries that lie anywhere with this density: H(p) / p + 1.

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


@dataclass
class Telemetry:
    """Counts of one exchange since it was opened.

    Attributes:
        steps: steps taken, the skipped ones too.
        skipped: steps that all ranks skipped, since one of them had NaN or infinity.
        elements: float32 numbers in a step.
        entries: entries that this rank sent, all steps together.
        encoded: elements that they were chosen from: `elements` times the steps that encoded something.
        entry_bytes: bytes of the messages that held them.
        messages: bytes of all this rank's messages, each counted once.
        sent, received: bytes that this rank gave to the network, and got from it.
        computing: seconds from the end of one exchange to the beginning of the next.
        encoding, waiting, exchanging, decoding: seconds until the message was made, until all ranks had come, until all
            messages were there, until they were added.
        density, tau: of the last step; tau is 0 where none is used.
        residual: root mean square of what has not been sent, in tau; of the last look, which is not taken every step.

    Example:
        >>> Telemetry(steps=2, sent=10).live()
        {'density': 0.0, 'tau': 0.0, 'MB_sent': 1e-05}
    """

    steps: int = 0
    skipped: int = 0
    elements: int = 0
    entries: int = 0
    encoded: int = 0
    entry_bytes: int = 0
    messages: int = 0
    sent: int = 0
    received: int = 0
    computing: float = 0.0
    encoding: float = 0.0
    waiting: float = 0.0
    exchanging: float = 0.0
    decoding: float = 0.0
    density: float = 0.0
    tau: float = 0.0
    residual: float = 0.0

    @property
    def bits(self) -> float:
        """Bits an entry on the wire; 0 before there are any."""
        return 8 * self.entry_bytes / self.entries if self.entries else 0.0

    @property
    def entropy(self) -> float:
        """Bits an entry would take if all steps had had the mean density."""
        return entropy(self.entries / self.encoded) if self.entries else 0.0

    def live(self) -> dict[str, float]:
        """What a progress line has room for."""
        return {"density": self.density, "tau": self.tau, "MB_sent": self.sent / 1e6}

    def full(self) -> dict[str, float]:
        """Everything, for files and for the end of an epoch; seconds are a step's, on average."""
        steps = max(self.steps, 1)
        return self.live() | {
            "MB_received": self.received / 1e6,
            "bits_per_entry": self.bits,
            "entropy_per_entry": self.entropy,
            "residual_rms": self.residual,
            "skipped_steps": float(self.skipped),
            "ms_computing": 1e3 * self.computing / steps,
            "ms_encoding": 1e3 * self.encoding / steps,
            "ms_waiting": 1e3 * self.waiting / steps,
            "ms_exchanging": 1e3 * self.exchanging / steps,
            "ms_decoding": 1e3 * self.decoding / steps,
        }


@dataclass
class AveragingTelemetry(Telemetry):
    """Counts of one optimiser under parameter averaging; `steps` are those of the training.

    Attributes:
        averages: how often the weights were averaged.
        divergence: 2-norm of what the last average changed in this rank's weights, in units of their norm.
        excluded: averages that did without this rank, since its weights held NaN or infinity.

    Example:
        >>> AveragingTelemetry(averages=3, divergence=0.01).live()
        {'divergence': 0.01, 'MB_sent': 0.0}
    """

    averages: int = 0
    divergence: float = 0.0
    excluded: int = 0

    def live(self) -> dict[str, float]:
        """See `Telemetry.live`."""
        return {"divergence": self.divergence, "MB_sent": self.sent / 1e6}

    def full(self) -> dict[str, float]:
        """See `Telemetry.full`."""
        return self.live() | {
            "MB_received": self.received / 1e6,
            "averages": float(self.averages),
            "excluded": float(self.excluded),
            "ms_per_average": 1e3 * self.exchanging / max(self.averages, 1),
        }


class StalenessHistogram(dict[int, int]):
    """How often which staleness was seen: a histogram that can be added to.

    Example:
        >>> seen = StalenessHistogram()
        >>> for staleness in (1, 3, 3):
        ...     seen.add(staleness)
        >>> seen + seen, round(seen.mean, 2)
        ({1: 2, 3: 4}, 2.33)
    """

    def add(self, staleness: int, times: int = 1) -> None:
        """See one."""
        self[staleness] = self.get(staleness, 0) + times

    @property
    def mean(self) -> float:
        """Their mean; 0 of none."""
        return sum(s * n for s, n in self.items()) / max(sum(self.values()), 1)

    def __add__(self, other: "StalenessHistogram | int") -> "StalenessHistogram":
        total = StalenessHistogram(self)
        for staleness, times in other.items() if isinstance(other, StalenessHistogram) else ():
            total.add(staleness, times)
        return total

    __radd__ = __add__


@dataclass
class ServerTelemetry(Telemetry):
    """Counts of one worker of a parameter server; `skipped` are those of its updates that were refused.

    Attributes:
        staleness: of this worker's updates, at each server.
        ending: seconds that it waited for the others at ends of epochs.
        refused: updates of all workers that were refused, as the servers counted them until the last flush.
        servers: as the workers heard it at the last flush, for each part of the weights: the rank that serves it, its
            version, updates accepted and applied, updates refused, seconds of work on them, seconds since the flush
            before.

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
        """Updates a second that each server has applied since it was opened."""
        return [applied / max(seconds, 1e-9) for _, _, _, applied, _, _, seconds in self.servers]

    def live(self) -> dict[str, float]:
        """See `Telemetry.live`."""
        return {"staleness": self.staleness.mean, "MB_sent": self.sent / 1e6}

    def full(self) -> dict[str, float]:
        """See `Telemetry.full`."""
        steps, rates = max(self.steps, 1), self.updates_per_second
        return self.live() | {
            "MB_received": self.received / 1e6,
            "max_staleness": float(max(self.staleness, default=0)),
            # The servers tell of the other workers' at a flush, and this worker's own are known before.
            "refused_updates": float(max(self.refused, self.skipped)),
            "updates_per_second": sum(rates) / len(rates) if rates else 0.0,
            "ms_computing": 1e3 * self.computing / steps,
            "ms_encoding": 1e3 * self.encoding / steps,
            "ms_waiting": 1e3 * self.waiting / steps,
            "ms_exchanging": 1e3 * self.exchanging / steps,
            "s_ending": self.ending,
        }


def merged(costs: Sequence[Telemetry]) -> Telemetry:
    """The cost of several exchanges that take turns: counts added up, density and tau those of the largest.

    Example:
        >>> merged([Telemetry(steps=1, elements=5), Telemetry(steps=1, elements=1)])  # doctest: +ELLIPSIS
        Telemetry(steps=1, skipped=0, elements=6, ...)
    """
    if len(costs) == 1:
        return costs[0]
    largest = max(costs, key=lambda cost: cost.elements, default=Telemetry())
    added = [f.name for f in fields(largest) if f.name != "servers"]
    total = type(largest)(**{name: sum(getattr(cost, name) for cost in costs) for name in added})
    of_largest = {"steps", "density", "tau", "residual", "averages", "divergence", "excluded", "servers"}
    for name in of_largest & set(vars(total)):
        setattr(total, name, getattr(largest, name))
    return total


def followed(first: Telemetry, then: Telemetry) -> Telemetry:
    """The cost of one exchange and of the one that took its place.

    Example:
        >>> followed(Telemetry(steps=2, sent=5, tau=1.0), Telemetry(steps=3, sent=1, tau=2.0)).live()
        {'density': 0.0, 'tau': 2.0, 'MB_sent': 6e-06}
    """
    total = Telemetry(**{f.name: getattr(first, f.name) + getattr(then, f.name) for f in fields(Telemetry)})
    for name in ("density", "tau", "residual"):
        setattr(total, name, getattr(then, name))
    total.elements = then.elements or first.elements
    return total
