"""Attempts of a job that was started again after failures, joined to one run.

`hvdx run --max-restarts` gives each attempt a number, and the record of a fit has the position at which it begins. What
an attempt trained after that of the next one is not in the result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdx.report.records import Epoch, Interruption, RankRecord, Run


def join_attempts(runs: Sequence[Run]) -> list[Run]:
    """Join the fits of the attempts of each job that continue each other.

    Args:
        runs: fits, as `records.read` returns them.

    Returns:
        The runs, in the order of their last fits. A script may have several fits: those that have ended before a
        failure stay runs of their own.

    Example:
        >>> from pathlib import Path
        >>> first, second = (
        ...     Run(Path("demo"), {0: RankRecord({"attempt": ["3f2a", str(n)], "time": 10.0 * n, "size": 1})})
        ...     for n in (1, 2)
        ... )
        >>> joined, = join_attempts([first, second])
        >>> joined.restarts[0].what
        'attempt 1 failed'
    """
    found: list[list[Run]] = []
    for run in runs:
        chain = next((chain for chain in found if _continues(chain[-1], run)), None)
        if chain is None:
            found.append([run])
        else:
            found.remove(chain)
            found.append([*chain, run])
    return [_join(chain) for chain in found]


def _continues(run: Run, later: Run) -> bool:
    """Return whether a fit is that of a later attempt of the same job."""
    if run.complete or run.folder != later.folder or not (_attempt(run) and _attempt(later)):
        return False
    (name, number), (later_name, later_number) = _attempt(run), _attempt(later)
    return name == later_name and int(number) < int(later_number) and _task(run) == _task(later)


def _attempt(run: Run) -> tuple[str, ...]:
    found = run.header.get("attempt")
    return tuple(map(str, found)) if isinstance(found, list) and len(found) == 2 and str(found[1]).isdigit() else ()


def _task(run: Run) -> list[object]:
    """Return what does not change from one attempt to the next; the number of workers may."""
    model = run.header.get("model")
    return [run.header.get("epochs"), model.get("tensors") if isinstance(model, Mapping) else None]


@dataclass(frozen=True)
class _Kept:
    """Part of an attempt that is in the result, on one rank.

    Attributes:
        calls: number of calls of the training function.
        steps: number of steps.
        epochs: the epochs.
        seconds: time at which it ends, in seconds of the fit.
    """

    calls: int
    steps: int
    epochs: list[Epoch]
    seconds: float


def _kept(record: RankRecord, until: tuple[int, int] | None) -> _Kept:
    """Return the part before a position (epochs, and steps of the next one); all of it if that is None."""
    steps = record.steps["step"] if record.steps else np.zeros(0)
    epochs = record.epochs if until is None else [epoch for epoch in record.epochs if epoch.epoch <= until[0]]
    if until is None:
        last = int(steps[-1]) if steps.size else 0
    else:
        first_epoch, first_step = _begin(record)
        before = epochs[-1].step if epochs else -first_step if until[0] == first_epoch else 0
        last = max(before + until[1], 0)
    calls = int(np.searchsorted(steps, last, side="right"))
    times = [record.steps["time"][calls - 1]] if calls else []
    times += [epoch.time for epoch in epochs[-1:]]
    return _Kept(calls, int(steps[calls - 1]) if calls else 0, epochs, max(times, default=0.0))


def _begin(record: RankRecord) -> tuple[int, int]:
    found = record.header.get("begin")
    return (int(found[0]), int(found[1])) if isinstance(found, list) and len(found) == 2 else (0, 0)


def _join(chain: Sequence[Run]) -> Run:
    if len(chain) == 1:
        return chain[0]
    last = chain[-1]
    began = [float(run.header.get("time", 0.0)) - float(chain[0].header.get("time", 0.0)) for run in chain]
    until = [_begin(run.first) for run in chain[1:]]
    ranks = {rank: _join_rank(chain, rank, began, until) for rank in last.ranks}
    restarts = [
        Interruption(begin + run.seconds, following - begin - _kept(run.first, position).seconds, _failed(run))
        for run, begin, following, position in zip(chain, began, began[1:], until, strict=False)
    ]
    return replace(last, ranks=ranks, restarts=restarts)


def _failed(run: Run) -> str:
    return f"attempt {_attempt(run)[1]} failed"


def _join_rank(chain: Sequence[Run], rank: int, began: list[float], until: list[tuple[int, int]]) -> RankRecord:
    """Join the records of a rank; an attempt with fewer workers may not have it."""
    joined = replace(chain[-1].ranks[rank], steps={}, epochs=[], clocks=[], deaths=[], traced=[])
    steps = calls = 0
    columns: dict[str, list[np.ndarray]] = {}
    for run, begin, position in zip(chain, began, [*until, None], strict=True):
        record = run.ranks.get(rank)
        if record is None:
            continue
        kept = _kept(record, position)
        for name, column in record.steps.items():
            shift = {"step": float(steps), "time": begin}.get(name, 0.0)
            columns.setdefault(name, []).append(column[: kept.calls] + shift)
        joined.epochs += [_moved(epoch, steps, begin) for epoch in kept.epochs]
        joined.deaths += [replace(deaths, time=deaths.time + begin) for deaths in record.deaths]
        joined.traced += [calls + first for first in record.traced if first < kept.calls]
        steps, calls = steps + kept.steps, calls + kept.calls
    joined.steps = {name: np.concatenate(parts) for name, parts in columns.items()}
    if joined.end is not None:
        joined.end = {**joined.end, "time": float(joined.end["time"]) + began[-1]}
    return joined


def _moved(epoch: Epoch, steps: int, seconds: float) -> Epoch:
    begin = None if epoch.begin is None else epoch.begin + seconds
    spans = [(name, start + seconds, end + seconds) for name, start, end in epoch.spans]
    return replace(epoch, step=epoch.step + steps, time=epoch.time + seconds, begin=begin, spans=spans)
