"""Timeline of a recorded fit in Chrome's trace event format, which Perfetto and `chrome://tracing` show.

A record has the begin and the end of each call, and the seconds of its parts. So the parts are drawn in their order,
and end with the call. Source: "Trace Event Format", Google, 2016; `ts` and `dur` are microseconds.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.report import report_file
from hvdx.report.lines import PARTS
from hvdx.report.records import RankRecord, Run

#: Threads of a process in the trace.
EPOCHS, STEPS = 1, 2

#: How a trace begins, and what the command calls it.
KIND = report_file.Kind("trace", "trace", b'{"otherData": {"made by": "hvdx trace"')

_SHOWN = ("sent", "received", "density", "staleness")
# Arguments of a step that belong to one of its parts.
_OF_PART = {"encoding": ("density",), "exchanging": ("sent", "received"), "decoding": ("received",)}
# Nanoseconds, 46 days; `ts` is a float of microseconds, which resolves nanoseconds until then.
_LATEST = 4e15

# Standard deviations: of an offset, relative to its largest error, and of the drift between two clocks of quartz.
# Without the latter, a line through comparisons that follow each other in a second would be steep by chance.
_DEVIATION, _DRIFT = 0.4, 2e-5


@dataclass(frozen=True)
class Slice:
    """Slice of the timeline.

    Attributes:
        begin, end: nanoseconds.
        args: what is shown if it is selected.
        inner: slices in it, in their order.
    """

    name: str
    begin: int
    end: int
    args: dict[str, Any] = field(default_factory=dict)
    inner: "list[Slice]" = field(default_factory=list)


def events(run: Run, steps: tuple[float, float] = (0, math.inf)) -> list[dict[str, Any]]:
    """Return the events of a fit: metadata, then slices in the order of their beginnings.

    Each rank is a process. Its thread "epochs" has the epochs, with flushes and evaluations in them; its thread "steps"
    has the calls of the training function, with their parts. The slices of a thread are nested or disjoint.

    Args:
        steps: first and last step of each rank that is drawn.

    Example:
        >>> from hvdx.report.lines import COLUMNS
        >>> record = RankRecord({"host": "here"}, {name: np.ones(1) for name in COLUMNS})
        >>> events(Run(Path("demo"), {0: record}))[4]["name"]
        'step 1'
    """
    clocks = {rank: _clock(run, rank) for rank in run.ranks}
    drawn: dict[tuple[int, int], list[Slice]] = {}
    for rank, record in run.ranks.items():
        drawn[rank, EPOCHS] = list(_epochs(record, clocks[rank]))
        drawn[rank, STEPS] = list(_steps(record, clocks[rank], steps))
    first = min((slices[0].begin for slices in drawn.values() if slices), default=0)
    found = [
        event
        for (rank, thread), slices in drawn.items()
        for event in _events(slices, {"ph": "X", "pid": rank, "tid": thread}, first, first)
    ]
    found.sort(key=lambda event: (event["ts"], -event["dur"]))
    return [*_names(run), *found]


def write(run: Run, path: Path, steps: tuple[float, float] = (0, math.inf), force: bool = False) -> None:
    """Write the trace of a fit to a file, all of it or nothing.

    Args:
        force: also overwrite a file that is not a trace.

    Raises:
        ConfigError: if the file cannot be written, or is not a trace.
    """
    error = clock_error(run)
    about = {"made by": "hvdx trace", "strategy": run.strategy, "id": run.header.get("id")}
    about["error of the clocks, us"] = None if error is None else round(1e6 * error, 1)
    lines = ",\n".join(json.dumps(event) for event in events(run, steps))
    text = json.dumps({"otherData": about, "displayTimeUnit": "ms"})[:-1] + f', "traceEvents": [\n{lines}\n]}}\n'
    report_file.write(text, path, KIND, force)


def clock_error(run: Run) -> float | None:
    """Return the largest error of a clock's offset in seconds; None if one of the offsets was not measured."""
    others = [record for rank, record in run.ranks.items() if rank != 0]
    if any(not record.clocks for record in others):
        return None
    return max((clock.error for record in others for clock in record.clocks), default=0.0)


def _clock(run: Run, rank: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from times of a rank, in seconds, to nanoseconds of the common clock."""
    record = run.ranks[rank]
    times, offsets = _offsets(record)
    if rank != 0 and not record.clocks:
        # Older records have the time of day alone.
        times = np.zeros(1)
        offsets = np.array([float(record.header.get("time", 0)) - float(run.header.get("time", 0))])

    def convert(seconds: np.ndarray) -> np.ndarray:
        local = np.nan_to_num(np.asarray(seconds, np.float64))
        shifted = local + np.interp(local, times, offsets) if times.size and rank != 0 else local
        return np.rint(np.clip(1e9 * shifted, -_LATEST, _LATEST)).astype(np.int64)

    return convert


def _offsets(record: RankRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the times of the comparisons of a rank's clock with rank 0's, and the offsets at these times.

    While a host is busy with other work, the bounds of a comparison are far apart, and their middle may be wrong by
    nearly as much. If they are more than twice as far apart as the closest ones, the offset is not their middle, but
    lies on a line through the other comparisons, or at the bound that is nearest to it.
    """
    rows = [(clock.time, clock.offset, max(clock.error, 1e-9)) for clock in record.clocks]
    times, offsets, errors = np.array(rows, np.float64).reshape(-1, 3).T
    close = errors <= 2 * errors.min(initial=np.inf)
    if close.all():
        return times, offsets
    weights = np.where(close, _DEVIATION * errors, np.inf) ** -2
    mean_time, mean_offset = np.average(times, weights=weights), np.average(offsets, weights=weights)
    around = times - mean_time
    slope = weights @ (around * (offsets - mean_offset)) / (weights @ around**2 + _DRIFT**-2)
    line = mean_offset + slope * around
    return times, np.where(close, offsets, np.clip(line, offsets - errors, offsets + errors))


def _epochs(record: RankRecord, clock: Callable[[np.ndarray], np.ndarray]) -> Iterator[Slice]:
    before = 0.0
    for epoch in record.epochs:
        begin, end = clock(np.array([before if epoch.begin is None else epoch.begin, epoch.time])).tolist()
        spans = [Slice(name, *clock(np.array(times)).tolist()) for name, *times in epoch.spans]
        yield Slice(f"epoch {epoch.epoch}", begin, end, dict(epoch.logs), spans)
        before = epoch.time


def _steps(
    record: RankRecord, clock: Callable[[np.ndarray], np.ndarray], steps: tuple[float, float]
) -> Iterator[Slice]:
    if not record.steps:
        return
    columns = {name: np.nan_to_num(values) for name, values in record.steps.items()}
    begins, ends = clock(columns["time"] - columns["seconds"]).tolist(), clock(columns["time"]).tolist()
    rows = {name: values.tolist() for name, values in columns.items()}
    rows |= {name: list(map(int, rows[name])) for name in ("sent", "received")}
    previous = 0
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        first, last = previous + 1, int(rows["step"][i])
        previous = last
        if last < steps[0] or first > steps[1]:
            continue
        args = {name: rows[name][i] for name in _SHOWN if rows[name][i]}
        if i in record.traced:
            args["compiles"] = True
        name = f"step {last}" if first >= last else f"steps {first} to {last}"
        yield Slice(name, begin, end, args, _parts({part: rows[part][i] for part in PARTS}, end, args))


def _parts(seconds: dict[str, float], end: int, args: dict[str, Any]) -> list[Slice]:
    """Return the parts of a call in their order, so that the last one ends with the call."""
    lengths = {name: round(1e9 * value) for name, value in seconds.items() if value > 0}
    found, begin = [], end - sum(lengths.values())
    for name, length in lengths.items():
        shown = {key: args[key] for key in _OF_PART.get(name, ()) if key in args}
        found.append(Slice(name, begin, begin + length, shown))
        begin += length
    return found


def _events(
    slices: Iterable[Slice], common: dict[str, Any], zero: int, first: float, last: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Return the events of slices, each cut so that it overlaps with no earlier one, and with nothing around it.

    Args:
        zero: nanoseconds from which times count.
        first, last: bounds of the slices, nanoseconds.
    """
    for each in slices:
        begin = min(max(each.begin, first), last)
        end = min(max(each.end, begin), last)
        times = {"ts": (begin - zero) / 1e3, "dur": (end - begin) / 1e3}
        yield {"name": each.name, "cat": each.name.split()[0], **common, **times, "args": each.args}
        yield from _events(each.inner, common, zero, begin, end)
        first = end


def _names(run: Run) -> Iterator[dict[str, Any]]:
    for rank, record in run.ranks.items():
        host = record.header.get("host")
        name = f"rank {rank} on {host}" if host else f"rank {rank}"
        for key, thread, value in (
            ("process_name", 0, {"name": name}),
            ("process_sort_index", 0, {"sort_index": rank}),
            ("thread_name", EPOCHS, {"name": "epochs"}),
            ("thread_name", STEPS, {"name": "steps"}),
        ):
            yield {"name": key, "ph": "M", "pid": rank, "tid": thread, "args": value}
