"""Predictions for a training, their tables, and the chart for choosing a strategy, as in docs/scaling.md."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hvdx.cli.advising.script import Training
from hvdx.comm.launcher import usable_cores
from hvdx.costs.model import Situation, one_worker, split_layers
from hvdx.costs.speeds import Speed, divided, slowest
from hvdx.costs.types import TERMS, Link, Machine, Prediction
from hvdx.report.table import WIDTH, fitted, quantity
from hvdx.strategies import names, parse
from hvdx.strategies.auto import WORTH_WORKERS

#: Spelling of "one worker" in the answers.
ALONE = "one worker"
#: Row of the split layers, which are no strategy.
SPLIT = "split layers"
#: Fewest batches of an epoch for each worker, at which numbers of workers that nobody asked for end.
FEWEST_BATCHES = 4
#: Largest numbers of workers for which predicted steps were compared with emulated hosts, and with `hvdx simulate`.
MEASURED, SIMULATED = 4, 1024
# Ratio of the times of two hosts from which they are of unequal speed.
_UNEQUAL = 1.2
# Strategies with options that are predicted beside those of `names()` with their defaults.
_VARIANTS = ("all_reduce", "all_reduce:compression=fp16", "parameter_server:servers=colocated")


class Memory(NamedTuple):
    """Memory that a worker takes alone, and that there is for it.

    Attributes:
        peak: peak resident bytes of a worker alone; 0 if unknown.
        room: bytes of a host for each of its workers; 0 if unknown.
    """

    peak: float
    room: float


#: Memory of a worker of which nothing is known.
UNKNOWN = Memory(0.0, 0.0)


@dataclass(frozen=True)
class Answer:
    """Predictions for one link and one number of workers.

    Attributes:
        workers: number of workers.
        bandwidth: spelling of the link's bandwidth.
        predictions: prediction of each strategy, by its spelling in `HVDX_STRATEGY`; the fastest first.
        alone: prediction of one worker.
        memory: peak memory of one worker, and the memory that a host has for each.
    """

    workers: int
    bandwidth: str
    predictions: dict[str, Prediction]
    alone: Prediction
    memory: Memory = UNKNOWN

    @property
    def best(self) -> str:
        """Spelling of the strategy with the most samples per second; `ALONE` if none is worth its workers.

        Split layers are left out, because they need a change of the script, and starved strategies, and those whose
        memory a host does not have.
        """
        fastest = self.fastest_able
        return fastest if self.workers > 1 and self.speedup(fastest) >= WORTH_WORKERS else ALONE

    @property
    def fastest_able(self) -> str:
        """Spelling of the fastest strategy that `best` may be, worth its workers or not; `ALONE` if there is none."""
        able = (s for s, p in self.predictions.items() if s != SPLIT and not p.starved and self.fits(s))
        return next(able, ALONE)

    def peak(self, spelling: str) -> float:
        """Return the peak resident bytes of a worker under a strategy; 0 if unknown."""
        more = sum(self.predictions[spelling].memory.values()) - sum(self.alone.memory.values())
        return self.memory.peak and self.memory.peak + more

    def fits(self, spelling: str) -> bool:
        """Return False if a host has not the memory for its workers under a strategy."""
        return not self.memory.room or self.peak(spelling) <= self.memory.room

    @property
    def shortage(self) -> str:
        """Sentence about the strategies that do not fit; "" if all do."""
        lacking = [f"{s} takes {quantity(self.peak(s), 'B')}" for s in self.predictions if not self.fits(s)]
        room = f"a host has {quantity(self.memory.room, 'B')} of memory for each of its workers"
        return f"Left out, since {room}: {', '.join(lacking)}." if lacking else ""

    @property
    def fastest(self) -> Prediction:
        """Prediction of `best`."""
        return self.predictions.get(self.best, self.alone)

    def speedup(self, spelling: str) -> float:
        """Return the samples per second of a strategy, relative to those of one worker."""
        return self.predictions.get(spelling, self.alone).samples / self.alone.samples

    def speedup_of_whole_batch(self, spelling: str) -> float:
        """Return the same if all workers together take the batch of one: at best, their computing is one N-th."""
        step = self.predictions.get(spelling, self.alone)
        computing = step.terms.get("computing", 0.0)
        return self.alone.seconds / max(step.seconds - computing * (1 - 1 / self.workers), 1e-12)

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for JSON."""
        rows = [
            {
                "strategy": spelling,
                "seconds": p.seconds,
                "terms": p.terms,
                "bytes": p.sent,
                "memory": sum(p.memory.values()),
                "peak": self.peak(spelling),
                "fits": self.fits(spelling),
                "samples_per_second": p.samples,
                "speedup": self.speedup(spelling),
                "note": p.note,
                "starved": p.starved,
                "basis": basis(self.workers, spelling),
            }
            for spelling, p in self.predictions.items()
        ]
        return {"workers": self.workers, "bandwidth": self.bandwidth, "best": self.best, "strategies": rows}


def situation_of(
    training: Training, machine: Machine, link: Link, workers: int, per_host: int, cores: float | None = None
) -> Situation:
    """Return the situation of a training on some workers.

    Args:
        training: training on one worker.
        cores: cores of each worker; by default its share of this machine's.
    """
    return Situation(
        workers=workers,
        tensors=training.tensors,
        computing=training.computing,
        link=link,
        machine=machine,
        # Samples per second are compared, so any batch will do if it is unknown.
        batch=training.batch or 1,
        slots=training.slots,
        spread=training.spread,
        layers=training.layers,
        tables=training.tables,
        per_host=per_host,
        cores=usable_cores() / per_host if cores is None else cores,
    )


def spellings() -> list[str]:
    """Return the spellings of the strategies that are predicted, those of other packages included."""
    plain = [name for name in names() if not any(v.partition(":")[0] == name for v in _VARIANTS)]
    return [*_VARIANTS, *plain]


def answer(situation: Situation, bandwidth: str, alone: Prediction | None = None, memory: Memory = UNKNOWN) -> Answer:
    """Predict all strategies for one number of workers.

    Args:
        bandwidth: spelling of the link's bandwidth.
        alone: prediction of one worker, if it does not share its host; by default that of `situation`.
    """
    found: dict[str, Prediction] = {}
    if situation.workers > 1:
        for spelling in spellings():
            predicted = parse(spelling).predict(situation)
            if predicted is not None:
                found[spelling] = predicted
        split = split_layers(situation)
        if split is not None:
            found[SPLIT] = split
    ordered = dict(sorted(found.items(), key=lambda item: -item[1].samples))
    return Answer(situation.workers, bandwidth, ordered, alone or one_worker(situation), memory)


def line_of_workers(
    situation: Situation, counts: Sequence[int], bandwidth: str, alone: Prediction, memory: Memory
) -> list[Answer]:
    """Return the answers for several numbers of workers on one link."""
    return [answer(replace(situation, workers=count), bandwidth, alone, memory) for count in counts]


def table(found: Answer) -> str:
    """Return the table of all strategies for one number of workers."""
    shown = [t for t in TERMS if any(p.terms.get(t, 0.0) > 5e-6 for p in found.predictions.values())]
    rows = [
        [
            spelling,
            _ms(p.seconds),
            *(_ms(p.terms.get(term, 0.0)) for term in shown),
            quantity(p.sent, "B"),
            quantity(sum(p.memory.values()), "B"),
            f"{p.samples:,.0f}",
            f"{found.speedup(spelling):.2f}",
        ]
        for spelling, p in {**found.predictions, ALONE: found.alone}.items()
    ]
    header = ["strategy", "ms a step", *shown, "sent", "memory", "samples/s", "speedup"]
    notes = [f"{spelling}: {p.note}" for spelling, p in found.predictions.items() if p.note]
    notes += [found.shortage] if found.shortage else []
    return "\n".join([fitted(rows, header), *map(wrapped, notes)])


def wrapped(text: str) -> str:
    """Break a sentence into lines of a terminal."""
    return textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def best_table(answers: Sequence[Answer]) -> str:
    """Return a table with the best strategy for each number of workers."""
    rows = [
        [
            f"{a.workers}",
            a.best,
            _ms(a.fastest.seconds),
            f"{a.fastest.samples:,.0f}",
            f"{a.speedup(a.best):.2f}",
            a.fastest.bottleneck,
        ]
        for a in answers
    ]
    notes = [f"{a.workers} workers: {a.fastest.note}" for a in answers if a.fastest.note]
    table = fitted(rows, ["workers", "best", "ms a step", "samples/s", "speedup", "largest term"])
    return "\n".join([table, *map(wrapped, notes)])


def basis(workers: int, spelling: str) -> str:
    """Return what predictions of a strategy were compared with; "formulas" if with nothing.

    Example:
        >>> basis(4, "all_reduce"), basis(1024, "threshold"), basis(2048, "threshold"), basis(8, "all_reduce")
        ('emulated hosts', 'simulation', 'formulas', 'formulas')
    """
    if workers <= MEASURED:
        return "emulated hosts"
    return "simulation" if spelling == "threshold" and workers <= SIMULATED else "formulas"


def basis_text(answers: Sequence[Answer]) -> str:
    """Return the sentences about figures that rest on no measured network; "" if all rest on one."""
    most = max(a.workers for a in answers)
    if most <= MEASURED:
        return ""
    return (
        f"No network with more than {MEASURED} workers was measured. Figures for more come from formulas, which for "
        f"Threshold were compared with its exchanges on up to {SIMULATED} virtual workers (hvdx simulate)."
    )


def data_text(training: Training, counts: Sequence[int]) -> str:
    """Return a sentence if some numbers of workers have few batches of an epoch each; "" if none has.

    Args:
        counts: numbers of workers, those of the table of up to 1024 workers included.
    """
    most = most_workers(training)
    if most is None or max(counts) <= most:
        return ""
    samples = f" of {training.batch} samples" if training.batch else ""
    return (
        f"An epoch of this script has {training.batches:,} batches{samples}. With more than {most:,} "
        f"worker{'s' * (most != 1)}, a worker has fewer than {FEWEST_BATCHES} of them; those numbers are left out, "
        "whatever their samples per second."
    )


def speeds_text(seconds: Sequence[tuple[str, float]], batch: int) -> str:
    """Return a sentence about hosts of unequal speed; "" if there are none.

    Args:
        seconds: name of each host, and its seconds of the same arithmetic.
        batch: rows of a step of one worker; 0 if they are unknown.
    """
    speeds = [Speed(0.0, time) for _, time in seconds]
    fastest = min((time for _, time in seconds), default=0.0)
    slow = [f"{host} is {time / fastest:.1f} times slower" for host, time in seconds if time > _UNEQUAL * fastest]
    if not slow:
        return ""
    even, total = batch or 1, (batch or 1) * len(seconds)
    rows = divided(total, speeds)
    share = slowest(speeds, rows) / slowest(speeds, [even] * len(seconds))
    return (
        f"The hosts are of unequal speed: {', '.join(slow)} than the fastest. In step, the others wait for it. With "
        f"hvdx.shard(..., global_batch_size={total}) a worker on each takes {', '.join(map(str, rows))} rows of a "
        f"step, whose computing takes {share:.2f} of the time with even rows (docs/unequal-workers.md)."
    )


def most_workers(training: Training) -> int | None:
    """Return the largest number of workers with enough batches of an epoch each; None if these are unknown."""
    return max(1, training.batches // FEWEST_BATCHES) if training.batches else None


def advice(answers: Sequence[Answer], command: str, hosts: str = "") -> str:
    """Return the sentences that say what to run.

    Args:
        answers: answers for the numbers of workers that can be used, on one link; one at least.
        hosts: option that names the hosts, or "".
    """
    worth = [a for a in answers if a.best != ALONE]
    if not worth:
        most = max(answers, key=lambda a: a.workers)
        least_bad, why = most.fastest_able, ""
        if least_bad != ALONE:
            p = most.predictions[least_bad]
            why = (
                f" With {most.workers} workers the fastest strategy ({least_bad}) takes "
                f"{most.speedup(least_bad):.2f} times the samples per second of one; its largest term is "
                f"{p.bottleneck}."
            )
        elif most.shortage:
            return wrapped(f"Do not distribute. {most.shortage}") + f"\nRun: {command}"
        return wrapped(f"Do not distribute: one worker learns as fast.{why}") + f"\nRun: {command}"
    best = max(worth, key=lambda a: a.fastest.samples)
    note = f" ({best.fastest.note})" if best.fastest.note else ""
    lines = [
        f"{best.best} on {best.workers} workers{note} takes {best.speedup(best.best):.2f} times the samples per second "
        f"of one worker. The largest term of a step is {best.fastest.bottleneck}.",
        f"This counts a batch of one worker on each: a step has {best.workers} times the samples, and an epoch fewer "
        f"steps. If the script keeps its batch (global_batch_size=), the same strategy takes at most "
        f"{best.speedup_of_whole_batch(best.best):.2f} times the samples per second.",
    ]
    declined = [str(a.workers) for a in answers if a.best == ALONE and a.workers > 1]
    if declined:
        lines.append(f"With {', '.join(declined)} workers, one worker alone would be as fast.")
    lines += [best.shortage] if best.shortage else []
    split = best.predictions.get(SPLIT)
    if split is not None and split.samples > best.fastest.samples:
        lines.append(
            f"Split layers would take {best.speedup(SPLIT):.2f} times: replace the dense layers that the table names "
            "by hvdx.keras.layers.SplitDense (docs/split-layers.md)."
        )
    lines = [wrapped(line) for line in lines]
    lines.append(f"Run: HVDX_STRATEGY={best.best} hvdx run{hosts} -n {best.workers} {command}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


#: Conditions and choices, in the order in which they are tried. *x* is the time to transfer the gradients once, divided
#: by the time of computing a step.
CHART = (
    ("one worker is done soon enough, or a larger batch does not save steps", "none: train on one worker"),
    (
        "workers are much slower in some steps, each in others",
        'ParameterServer("colocated"), or Threshold(max_staleness="inf")',
    ),
    ("x < 0.1", "AllReduce()"),
    ("x < 0.3", 'AllReduce(compression="bf16")'),
    ("computing takes more than 3 ms for each million parameters", "Threshold()"),
    (
        "the link carries the weights and the optimiser's state in the time of 100 steps",
        "ParameterAveraging(16)",
    ),
    ("none of these", "none: train on one worker, or on workers that are nearer to each other"),
)
# Lines that no measurement of one worker decides.
_OPEN = 2


def relative_transfer(situation: Situation) -> float:
    """Return *x* of the chart for the link between hosts."""
    return 4 * situation.elements / bytes_per_second(situation) / situation.computing


def chart_line(situation: Situation) -> int:
    """Return the number of the first line that is true, of those that measurements decide, counted from 1.

    Example:
        >>> from hvdx.costs.types import Link
        >>> chart_line(Situation(2, (1_000_000,), 0.1, Link(1e-4, 12e6)))
        5
    """
    x = relative_transfer(situation)
    state = 4 * situation.elements * (1 + situation.slots)
    measured = (
        x < 0.1,
        x < 0.3,
        situation.computing > 3e-9 * situation.elements,
        state / bytes_per_second(situation) < 100 * situation.computing,
        True,
    )
    return 1 + _OPEN + measured.index(True)


def chart_text(situation: Situation) -> str:
    """Return the chart for a terminal, with a mark at the line that is chosen."""
    number = chart_line(situation)
    head = (
        f"Chart of docs/scaling.md: x = {relative_transfer(situation):.2g}, and computing takes "
        f"{1e9 * situation.computing / situation.elements:.2g} ms for each million parameters. The first line that is "
        "true decides; lines 1 and 2 are yours to answer."
    )
    lines = [textwrap.fill(head, WIDTH)]
    for line, (condition, choice) in enumerate(CHART, 1):
        mark = "*" if line == number else " "
        lines.append(textwrap.fill(f"{mark} {line}  {condition} -> {choice}", WIDTH, subsequent_indent=" " * 5))
    return "\n".join(lines)


def bytes_per_second(situation: Situation) -> float:
    """Return the bytes per second between hosts, no faster than TCP on this machine."""
    return min(situation.link.bandwidth, situation.machine.transport)
