"""Groups of runs for a report: runs of one strategy in one setting, which differ in their seeds."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdx import foreign
from hvdx.errors import ConfigError
from hvdx.report.records import OUTCOME, Epoch, Interruption, RankRecord, Run, read, read_outcome


def join_attempts(runs: Sequence[Run]) -> list[Run]:
    """Join the fits of the attempts of each job that continue each other.

    `hvdx run --max-restarts` gives each attempt a number, and the record of a fit has the position at which it begins.
    What an attempt trained after that of the next one is not in the result.

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
    joined = replace(chain[-1].ranks[rank], steps={}, epochs=[], clocks=[], deaths=[], divisions=[], traced=[])
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
        joined.divisions += record.divisions
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


#: Settings of a whole comparison, beside the folder of its runs.
COMPARISON = "compare.json"
#: Output of a run, in its folder.
LOG = "log.txt"
#: Name of a run without distribution.
ONE_WORKER = "one worker"

_LOWER = re.compile(
    r"(^|_)(loss|error|err|mae|mse|rmse|mape|msle|perplexity|ppl|wer|cer|nll|bpc|hinge|huber|poisson|divergence|cosh"
    r"|logcosh|brier)(_|$)|cross_?entropy"
)
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)bit")
_PREFIXES = {"": ("", 1.0), "k": ("k", 1e3), "m": ("M", 1e6), "g": ("G", 1e9), "t": ("T", 1e12)}
#: Metrics by which runs are compared without a target: the first that a run has.
METRICS = ("val_accuracy", "val_acc", "accuracy", "acc", "val_loss", "loss")


@dataclass(frozen=True)
class Setting:
    """Workers and links of a run.

    Attributes:
        workers: number of workers.
        link: rate of the emulated links, such as "100mbit", or the text of `--hosts`; "" if unknown.

    Example:
        >>> print(Setting(2, "100mbit"))
        2 workers, 100 Mbit/s
    """

    workers: int
    link: str = ""

    def __str__(self) -> str:
        workers = ONE_WORKER if self.workers == 1 else f"{self.workers} workers"
        return f"{workers}, {self.link_text}" if self.link else workers

    @property
    def link_text(self) -> str:
        """The link in words; "" if unknown."""
        match = _RATE.fullmatch(self.link)
        return f"{match[1]} {_PREFIXES[match[2]][0]}bit/s" if match else self.link

    @property
    def order(self) -> tuple[int, float, str]:
        """Key that sorts settings by workers, then by the rate of the links."""
        match = _RATE.fullmatch(self.link)
        return self.workers, float(match[1]) * _PREFIXES[match[2]][1] if match else math.inf, self.link


@dataclass(frozen=True)
class Point:
    """A metric after some epochs, over the seeds.

    Attributes:
        epoch: number of completed epochs.
        seconds: mean seconds since the fits began.
        mean: mean value; NaN if a seed has NaN or infinity.
        low: lowest value; NaN as for `mean`.
        high: highest value; NaN as for `mean`.
    """

    epoch: int
    seconds: float
    mean: float
    low: float
    high: float


@dataclass
class Group:
    """Runs of one strategy in one setting.

    Attributes:
        strategy: the strategy, as it was asked for.
        setting: workers and links.
        runs: one run for each seed.
    """

    strategy: str
    setting: Setting
    runs: list[Run]

    @property
    def counted(self) -> list[Run]:
        """The runs without a fault; all runs if each has one."""
        return [run for run in self.runs if not fault(run)] or self.runs

    def curve(self, metric: str) -> list[Point]:
        """Return a metric over the epochs that all counted runs reached."""
        found = [{epoch: (seconds, value) for epoch, seconds, value in run.curve(metric)} for run in self.counted]
        found = [curve for curve in found if curve]
        points = []
        for epoch in sorted(set.intersection(*map(set, found))) if found else []:
            seconds = [curve[epoch][0] for curve in found]
            values = np.array([math.nan if curve[epoch][1] is None else curve[epoch][1] for curve in found], float)
            points.append(Point(epoch, float(np.mean(seconds)), values.mean(), values.min(), values.max()))
        return points

    def step_seconds(self) -> list[float]:
        """Return the median seconds of a step of each counted run."""
        return [run.step_seconds() for run in self.counted]

    def parts(self) -> dict[str, float]:
        """Return the mean seconds of each part of a step."""
        rows = [run.parts() for run in self.counted]
        return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}

    def bytes_per_step(self) -> float:
        """Return the mean bytes that a worker sends in a step."""
        return float(np.mean([run.bytes_per_step() for run in self.counted]))

    def seconds(self) -> float:
        """Return the mean seconds of a fit."""
        return float(np.mean([run.seconds for run in self.counted]))

    def predicted_seconds(self) -> float | None:
        """Return the seconds of a step that the cost model predicted; None if there is no prediction."""
        for run in self.runs:
            found = run.outcome.get("prediction")
            found = found.get("ms") if isinstance(found, dict) else None
            if isinstance(found, int | float):
                return found / 1000
        return None


@dataclass(frozen=True)
class Trouble:
    """A run that failed or is incomplete.

    Attributes:
        strategy: the strategy, as it was asked for.
        setting: workers and links.
        seed: its seed; "" if unknown.
        reason: one line.
        log: its output, or its folder if there is none.
    """

    strategy: str
    setting: Setting
    seed: str
    reason: str
    log: Path


@dataclass
class Overview:
    """Runs of one report.

    Attributes:
        folders: the folders that were read.
        runs: the runs that have a record.
        troubles: the runs that failed or are incomplete, with or without a record.
        comparison: content of compare.json; empty without it.
        target: metric and value to reach; None without one.
    """

    folders: list[Path]
    runs: list[Run]
    troubles: list[Trouble] = field(default_factory=list)
    comparison: dict[str, Any] = field(default_factory=dict)
    target: tuple[str, float] | None = None

    def __post_init__(self) -> None:
        found: dict[tuple[str, Setting], list[Run]] = {}
        for run in self.runs:
            found.setdefault((name_of(run), setting_of(run)), []).append(run)
        self.groups = [Group(name, setting, runs) for (name, setting), runs in found.items()]
        self.metric = self._metric()
        self.rising = not lower_is_better(self.metric)
        self.strategies = self._ranked()
        self.groups.sort(key=lambda g: (g.setting.order, self.strategies.index(g.strategy)))

    @property
    def settings(self) -> list[Setting]:
        """The settings with several workers, by workers and links; the others if there are none."""
        several = {g.setting for g in self.groups if g.setting.workers > 1} or {g.setting for g in self.groups}
        return sorted(several, key=lambda setting: setting.order)

    def within(self, setting: Setting) -> list[Group]:
        """Return the groups of a setting by rank, with one worker alone, to which they are compared."""
        found = [g for g in self.groups if g.setting == setting or g.setting.workers == 1]
        return sorted(found, key=lambda g: self.strategies.index(g.strategy))

    def _metric(self) -> str:
        """Return the metric of the charts: that of the target, or the first usual one that a run has; or ""."""
        names: dict[str, None] = {}
        for run in self.runs:
            for epoch in run.epochs:
                names.update(dict.fromkeys(epoch.logs))
        if self.target:
            return self.target[0]
        return next((name for name in (*METRICS, *names) if name in names), "")

    def _ranked(self) -> list[str]:
        """Return the strategies, best first: by their mean rank in the settings."""
        places: dict[str, list[int]] = {group.strategy: [] for group in self.groups}
        for setting in {group.setting for group in self.groups}:
            inside = [group for group in self.groups if group.setting == setting]
            for place, group in enumerate(sorted(inside, key=self._badness)):
                places[group.strategy].append(place)
        return sorted(places, key=lambda name: (float(np.mean(places[name])), name))

    def _badness(self, group: Group) -> tuple[float, float]:
        values = [point.mean for point in group.curve(self.metric) if math.isfinite(point.mean)]
        value = (-max(values) if self.rising else min(values)) if values else math.inf
        return value, float(np.mean(group.step_seconds()))


def lower_is_better(metric: str) -> bool:
    """Return whether training lowers a metric, by its name.

    Example:
        >>> lower_is_better("val_loss"), lower_is_better("val_accuracy")
        (True, False)
    """
    return _LOWER.search(metric.lower()) is not None


def load(folders: Sequence[str | os.PathLike[str]], target: tuple[str, float] | None = None) -> Overview:
    """Read the runs in some folders.

    Args:
        folders: folders of runs or of comparisons.
        target: metric and value to reach; that of the comparison by default.

    Raises:
        ConfigError: if a folder has neither a record nor the outcome of a run.
    """
    runs: list[Run] = []
    troubles: list[Trouble] = []
    comparison: dict[str, Any] = {}
    seen: set[Path] = set()
    paths = list(dict.fromkeys(Path(folder) for folder in folders))
    for path in paths:
        outcomes = sorted(file.parent for file in path.rglob(OUTCOME))
        try:
            found = join_attempts(read(path))
        except ConfigError:
            if not outcomes or any(path.rglob("rank-*.jsonl")):
                raise
            found = []
        # A run of a comparison that has no outcome has not ended, and is neither a result nor a failure.
        running = [run for run in found if not run.outcome and (run.folder.parent.parent / COMPARISON).is_file()]
        # A script may fit several times; then its last fit counts, and the others are not runs with other seeds.
        last = {run.folder: run for run in found}
        found = [run for run in found if run not in running and (not run.outcome or last[run.folder] is run)]
        # A folder may be given twice, or together with one that contains it.
        recorded = {run.folder for run in [*found, *running]}
        bare = [folder for folder in outcomes if folder not in recorded and folder.resolve() not in seen]
        troubles += [_trouble(folder, read_outcome(folder), "") for folder in bare]
        troubles += [
            Trouble(name_of(run), Setting(0), seed_of(run, {}), "it has not ended", run.folder)
            for run in running
            if run is last[run.folder] and run.folder.resolve() not in seen
        ]
        runs += [run for run in found if run.folder.resolve() not in seen]
        seen |= {folder.resolve() for folder in (*recorded, *bare)}
        comparison = comparison or _comparison(path)
    troubles += [_trouble(run.folder, run.outcome, fault(run), run) for run in runs if fault(run)]
    wanted = comparison.get("target")
    if target is None and isinstance(wanted, dict) and {"metric", "value"} <= wanted.keys():
        target = str(wanted["metric"]), float(wanted["value"])
    return Overview(paths, runs, troubles, comparison, target)


def _comparison(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(foreign.read(folder / COMPARISON))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _trouble(folder: Path, outcome: dict[str, Any], reason: str, run: Run | None = None) -> Trouble:
    name = name_of(run) if run else str(outcome.get("asked") or folder.name)
    setting = setting_of(run) if run else _setting(outcome, 0)
    log = folder / LOG
    reason = reason or _reason(outcome) or "it wrote no record"
    return Trouble(name, setting, seed_of(run, outcome), reason, log if log.exists() else folder)


def _reason(outcome: dict[str, Any]) -> str:
    code = outcome.get("exit_code")
    if code in (None, 0):
        return str(outcome.get("reason") or "")
    return str(outcome.get("reason") or "it failed") + f" (exit code {code})"


def fault(run: Run) -> str:
    """Return why a run does not count, in one line; "" for a run that ended well.

    Example:
        >>> from hvdx.report.records import RankRecord
        >>> fault(Run(Path("demo"), {0: RankRecord({"size": 2})}))
        'incomplete: 1 of 2 ranks have a record and the record ends before the fit does (epochs completed: 0)'
    """
    reason = _reason(run.outcome)
    if reason:
        return reason
    if run.complete:
        return ""
    found = []
    if len(run.ranks) != run.size:
        found.append(f"{len(run.ranks)} of {run.size} ranks have a record")
    if any(rank.end is None for rank in run.ranks.values()):
        found.append(f"the record ends before the fit does (epochs completed: {len(run.epochs)})")
    return "incomplete: " + " and ".join(found)


def name_of(run: Run) -> str:
    """Return the name of a run's strategy: as it was asked for, or as the call that makes it."""
    alone = ONE_WORKER if run.size == 1 else ""
    return str(run.outcome.get("asked") or alone or run.header.get("spelling") or run.strategy or "unknown strategy")


def setting_of(run: Run) -> Setting:
    """Return the workers and links of a run."""
    return _setting(run.outcome, run.size)


def _setting(outcome: dict[str, Any], size: int) -> Setting:
    workers = outcome.get("workers") or size
    link = "" if workers == 1 else str(outcome.get("bandwidth") or outcome.get("hosts") or "")
    return Setting(int(workers), link)


def seed_of(run: Run | None, outcome: dict[str, Any]) -> str:
    """Return the seed of a run; "" if unknown."""
    seed = outcome.get("seed")
    seed = run.header.get("seed") if seed is None and run else seed
    return "" if seed is None else str(seed)


def distinct(values: Iterable[Any]) -> str:
    """Join the different values of a property over the runs.

    Example:
        >>> distinct(["3.11", None, "3.11", "3.12"])
        '3.11; 3.12'
    """
    return "; ".join(dict.fromkeys(str(value) for value in values if value not in (None, "", [], {})))
