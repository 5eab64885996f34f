"""The verdict on recorded runs: which strategy is best by each criterion, and where noise leaves it open.

Runs are grouped by setting (workers and links) and by strategy; the runs of a group differ in their seeds. As in
MLPerf, the target is fixed before the runs, and a run that fails, diverges or does not reach the target counts as the
worst. docs/compare.md states the rules for users, and `significance` those for differences.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdx.report.overview import (
    METRICS,
    ONE_WORKER,
    Setting,
    Trouble,
    fault,
    lower_is_better,
    name_of,
    seed_of,
    setting_of,
)
from hvdx.report.records import Run
from hvdx.report.significance import RUNS, beats, mean, ranking, separated, unbeaten
from hvdx.report.table import render

Target = tuple[str, float]

FASTEST, BEST, IN_TIME, IN_EPOCHS, TO_TARGET = "fastest", "best", "in time", "in epochs", "to target"
_TIMES = (FASTEST, TO_TARGET)
# Criteria at a limit, without the number.
_LIMITS = {IN_TIME: "a given time", IN_EPOCHS: "a given number of epochs"}


class Row(NamedTuple):
    """A strategy by one criterion.

    Attributes:
        value: mean over the seeds.
        spread: lowest to highest value, and the runs that do not count as a value.
    """

    strategy: str
    value: str
    spread: str


@dataclass
class Criterion:
    """A criterion in one setting.

    Attributes:
        title: the criterion, with its setting if there are several.
        winner: the best strategy; "" unless `called`.
        margin: the winner's lead over the second; "" unless `called`.
        called: True if there is a winner.
        why: the reason in words.
        rows: the strategies, best first; one worker last.
        kind: FASTEST, BEST, IN_TIME, IN_EPOCHS or TO_TARGET.
        setting: workers and links.
    """

    title: str
    winner: str
    margin: str
    called: bool
    why: str
    rows: list[Row]
    kind: str = ""
    setting: Setting = field(default_factory=lambda: Setting(0))

    @property
    def sentence(self) -> str:
        """The criterion in one sentence."""
        return f"{self.title}: " + (f"{self.winner}, {self.margin}." if self.called else f"no winner; {self.why}.")


@dataclass
class Verdict:
    """The answer to a comparison.

    Attributes:
        sentences: the answer in words, the most important first.
        criteria: the criteria, setting by setting.
        metric: metric that the runs were judged by; "" if they have none.
    """

    sentences: list[str] = field(default_factory=list)
    criteria: list[Criterion] = field(default_factory=list)
    metric: str = ""

    def text(self) -> str:
        """Return the sentences, and a table for each criterion that has figures."""
        blocks = ["\n".join(self.sentences)]
        for criterion in self.criteria:
            table = render(criterion.rows, ("strategy", "mean", "lowest to highest")) if criterion.rows else ""
            blocks.append(f"{criterion.title}\n{table}".rstrip())
        return "\n\n".join(block for block in blocks if block)


def judge(runs: Sequence[Run], target: Target | None = None, troubles: Sequence[Trouble] = ()) -> Verdict:
    """Judge recorded runs.

    Args:
        target: metric and value to reach: at most this value for a metric that training lowers, at least for others.
        troubles: failed runs; those without a record count as the worst, too.
    """
    world = _World(list(runs), target, troubles)
    if not world.groups:
        return Verdict(["There are no runs to judge."])
    criteria = [criterion for setting in world.settings for criterion in _criteria(world, setting)]
    sentences = [
        *_warnings(world),
        *_distribution(world),
        *_interruptions(world),
        *_divisions(world),
        *_flips(criteria),
    ]
    for setting in world.settings:
        sentences += _answers(world, [criterion for criterion in criteria if criterion.setting == setting])
    sentences += _alone(world)
    return Verdict(sentences + _failures(world), criteria, world.metric)


# Most interruptions of a run that a sentence lists.
_LISTED = 3


def _interruptions(world: "_World") -> list[str]:
    """Return a sentence for each run that went on after failures."""
    found = []
    for run in world.runs:
        events = run.interruptions
        if not events:
            continue
        listed = [f"{event.what} at {_seconds(event.time)}" for event in events[:_LISTED]]
        more = len(events) - len(listed)
        seed = f", seed {seed_of(run, run.outcome)}" if seed_of(run, run.outcome) else ""
        found.append(
            f"{name_of(run)}, {setting_of(run)}{seed}: the goodput is {run.goodput:.2f}: "
            f"{_seconds(sum(event.seconds for event in events))} of {_seconds(run.seconds)} trained nothing that is in "
            f"the result ({'; '.join(listed)}{f'; and {more} more' if more else ''})."
        )
    return found


def _divisions(world: "_World") -> list[str]:
    """Return a sentence for each run whose rows were divided by the speeds of the workers."""
    found = []
    for run in world.runs:
        changes = run.first.divisions
        if changes:
            listed = ", ".join(map(str, changes[-1]))
            found.append(
                f"{name_of(run)}, {setting_of(run)}: the workers were of unequal speed, and took {listed} of the "
                f"{sum(changes[-1])} rows of a step in the end."
            )
    return found


class _World:
    """Runs by setting and strategy; None stands for a run without a record."""

    def __init__(self, runs: list[Run], target: Target | None, troubles: Sequence[Trouble]):
        self.target = target
        self.groups: dict[Setting, dict[str, list[Run | None]]] = {}
        for run in runs:
            self.groups.setdefault(setting_of(run), {}).setdefault(name_of(run), []).append(run)
        recorded = {(name_of(run), setting_of(run), seed_of(run, run.outcome)) for run in runs}
        for trouble in troubles:
            if (trouble.strategy, trouble.setting, trouble.seed) not in recorded and trouble.setting.workers:
                self.groups.setdefault(trouble.setting, {}).setdefault(trouble.strategy, []).append(None)
        self.runs = runs
        names = {name for run in runs for epoch in run.epochs for name in epoch.logs}
        self.metric = target[0] if target else next((name for name in METRICS if name in names), "")
        self.sign = 1.0 if lower_is_better(self.metric) else -1.0
        self.settings = sorted((s for s in self.groups if s.workers > 1), key=lambda s: s.order)
        self.alone = next((runs for s, found in self.groups.items() if s.workers == 1 for runs in found.values()), [])
        self.seedless = _seeds_change_nothing([runs for found in self.groups.values() for runs in found.values()])

    def title(self, text: str, setting: Setting) -> str:
        """Return a title, which names the setting if there are several."""
        return f"{text} ({setting})" if len(self.settings) > 1 else text


def _epochs(run: Run) -> list[tuple[int, float]]:
    return [(epoch.epoch, epoch.time) for epoch in run.epochs]


def _epoch_seconds(run: Run | None) -> float:
    """Return the seconds of an epoch, the first one left out because it includes compiling."""
    if run is None or fault(run) or not run.epochs:
        return math.inf
    (first, begin), (last, end) = _epochs(run)[0], _epochs(run)[-1]
    return (end - begin) / (last - first) if last > first else end / max(last, 1)


def _curve(run: Run | None, world: _World) -> list[tuple[int, float, float]]:
    """Return a metric over the epochs, lower is better: (epoch, seconds, value), infinite for NaN; [] if it failed."""
    if run is None or fault(run):
        return []
    return [(e, t, math.inf if v is None else world.sign * v) for e, t, v in run.curve(world.metric)]


def _at(run: Run | None, world: _World, column: int, limit: float) -> float:
    found = [point[2] for point in _curve(run, world) if point[column] <= limit]
    return found[-1] if found else math.inf


def _best(run: Run | None, world: _World) -> float:
    curve = _curve(run, world)
    # A run that ends in NaN has diverged, and its best epoch before that is no result.
    return min(value for *_, value in curve) if curve and math.isfinite(curve[-1][2]) else math.inf


def _seconds_to(run: Run | None, world: _World) -> float:
    assert world.target is not None
    goal = world.sign * world.target[1]
    return next((seconds for _, seconds, value in _curve(run, world) if value <= goal), math.inf)


def _limits(world: _World, setting: Setting) -> tuple[float, int]:
    """Return the time at which the first strategy has ended all its runs, and the epochs that all runs completed."""
    ends: list[float] = []
    counts: list[int] = []
    for runs in world.groups[setting].values():
        curves = [c for c in (_curve(run, world) for run in runs) if c and math.isfinite(c[-1][2])]
        ends += [max(curve[-1][1] for curve in curves)] if curves else []
        counts += [curve[-1][0] for curve in curves]
    return min(ends, default=0.0), min(counts, default=0)


def _criteria(world: _World, setting: Setting) -> list[Criterion]:
    def each(kind: str, title: str, score: Callable[[Run | None], float]) -> Criterion:
        values = {name: [score(run) for run in runs] for name, runs in world.groups[setting].items()}
        return _decide(world, setting, kind, title, values, [score(run) for run in world.alone])

    # One worker, which may be faster, is compared elsewhere.
    compared = "Fastest of several workers" if world.alone else "Fastest training"
    criteria = [each(FASTEST, f"{compared}, seconds an epoch", _epoch_seconds)]
    if not world.metric:
        return criteria
    name = world.metric
    extreme = "Lowest" if world.sign > 0 else "Highest"
    seconds, epochs = _limits(world, setting)
    criteria.append(each(BEST, f"{extreme} {name}, best epoch of a run", lambda run: _best(run, world)))
    if epochs:
        title = f"{extreme} {name} in {_seconds(seconds)}"
        criteria.append(each(IN_TIME, title, lambda run: _at(run, world, 1, seconds)))
        title = f"{extreme} {name} in {epochs} epoch{'s' * (epochs > 1)}"
        criteria.append(each(IN_EPOCHS, title, lambda run: _at(run, world, 0, epochs)))
    if world.target:
        title = f"Time to {name} {world.target[1]:g}"
        criteria.append(each(TO_TARGET, title, lambda run: _seconds_to(run, world)))
    return criteria


def _decide(
    world: _World, setting: Setting, kind: str, title: str, values: dict[str, list[float]], alone: list[float]
) -> Criterion:
    order = ranking(values)
    rows = [_row(world, kind, name, values[name]) for name in order]
    rows += [_row(world, kind, ONE_WORKER, alone)] if alone else []
    why, winner, margin = _open(world, kind, values), "", ""
    if not why:
        open_to = unbeaten(values)
        if len(open_to) > 1:
            why = _undecided(open_to, values, lambda name: _shown(world, kind, values[name]))
        else:
            winner, second = order[0], order[1]
            margin = _margin(world, kind, values[winner], second, values[second])
            why = f"the margin exceeds what noise explains over {min(map(len, values.values()))} seeds"
    return Criterion(world.title(title, setting), winner, margin, bool(winner), why, rows, kind, setting)


def _undecided(names: Sequence[str], values: dict[str, list[float]], shown: Callable[[str], str]) -> str:
    """Return why there is no winner among some strategies, best first: noise, or too few seeds.

    If each run of the best strategy is better than each run of another, that is no noise, however far the other's runs
    are apart.
    """
    best, *others = names
    behind = [name for name in others if separated(values[best], values[name])]
    alike = [best, *(name for name in others if name not in behind)]
    parts = []
    if len(alike) > 1:
        parts.append("noise can explain the differences between " + ", ".join(f"{n} ({shown(n)})" for n in alike))
    if behind:
        few = min(len(values[name]) for name in (best, *behind))
        than = ", ".join(f"{name} ({shown(name)})" for name in behind)
        parts.append(
            f"{few} seeds are too few, though every run of {best} ({shown(best)}) is better than every run of {than}. "
            f"Do: --seeds {few + 1}"
        )
    return "; ".join(parts)


def _open(world: _World, kind: str, values: dict[str, list[float]]) -> str:
    """Return why there can be no winner, before the values are compared; "" if there can be one."""
    if all(math.isinf(value) for found in values.values() for value in found):
        return "no run with several workers reached it" if kind == TO_TARGET else "no run has a result"
    if len(values) < 2:
        return f"only one strategy, {next(iter(values))}: {_shown(world, kind, next(iter(values.values())))}"
    few = {name: len(found) for name, found in values.items() if len(found) < RUNS}
    if few:
        name, count = min(few.items(), key=lambda item: item[1])
        return f"not enough runs: {RUNS} seeds are needed, {name} has {count}"
    if world.seedless and kind != FASTEST:
        return "not enough runs: the seeds had no effect, so the runs of a strategy are one run"
    return ""


def _margin(world: _World, kind: str, best: list[float], second: str, other: list[float]) -> str:
    text = _mean_text(world, kind, best)
    if math.isinf(mean(other)):
        missing = sum(math.isinf(value) for value in other)
        what = "did not reach it" if kind == TO_TARGET else "have no value"
        return f"{text}; {missing} of {len(other)} runs of {second} {what}"
    if kind in _TIMES:
        return f"{text}, {mean(other) / max(mean(best), 1e-9):.2f} times as fast as {second} ({_seconds(mean(other))})"
    return f"{text}, {mean(other) - mean(best):.4f} better than {second} ({_value(world, kind, mean(other))})"


def _mean_text(world: _World, kind: str, values: Sequence[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "not reached" if kind == TO_TARGET else "no value"
    return _value(world, kind, mean(finite))


def _shown(world: _World, kind: str, values: Sequence[float]) -> str:
    """Return the mean as text, with the number of runs that it is of if some have no value."""
    count = sum(map(math.isfinite, values))
    return _mean_text(world, kind, values) + (f" in {count} of {len(values)} runs" if 0 < count < len(values) else "")


def _value(world: _World, kind: str, value: float) -> str:
    return _seconds(value) if kind in _TIMES else f"{world.sign * value:.4f}"


def _row(world: _World, kind: str, name: str, values: list[float]) -> Row:
    finite = sorted(world.sign * v if kind not in _TIMES else v for v in values if math.isfinite(v))
    ends = [_seconds(v) if kind in _TIMES else f"{v:.4f}" for v in (finite[:1] + finite[-1:])]
    text = " to ".join(ends) if len(finite) > 1 else "one run" if finite else ""
    if len(finite) < len(values):
        what = "reached it" if kind == TO_TARGET else "have a value"
        text = ", ".join(filter(None, [text, f"{len(finite)} of {len(values)} {what}"]))
    return Row(name, _mean_text(world, kind, values), text)


def _seconds(value: float) -> str:
    if value >= 600:
        return f"{value / 60:.1f} min"
    return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 10 else f"{value:.3g} s"


def _answers(world: _World, criteria: Sequence[Criterion]) -> list[str]:
    """Return a sentence for each criterion of a setting; one for all if they are open for the same reason."""
    reasons = {criterion.why for criterion in criteria}
    if len(criteria) > 1 and len(reasons) == 1 and not any(criterion.called for criterion in criteria):
        return [f"{world.title('No winner by any criterion', criteria[0].setting)}: {criteria[0].why}."]
    return [criterion.sentence for criterion in criteria]


# What one worker does, if it is better than several and if it is as good; by the kind of comparison.
_LEARNS = "learns better", "learns as well, within the noise"
_ALONE = {
    TO_TARGET: ("reaches the target sooner", "reaches the target as soon, within the noise"),
    FASTEST: ("is faster", "is as fast, within the noise"),
}


def _distribution(world: _World) -> list[str]:
    """Say for each setting whether several workers are worth it."""
    sentences = []
    for setting in world.settings if world.alone else []:
        kind, what, alone, values = _against_one(world, setting)
        if not values or all(math.isinf(v) for found in [alone, *values.values()] for v in found):
            continue
        order = ranking(values)
        best = next((name for name in order if beats(values[name], alone)), order[0])
        reached = _shown(world, kind, values[best])
        shown = f"{what}: {_shown(world, kind, alone)} on one worker, {reached} with {best}"
        if min(len(alone), len(values[best])) < RUNS:
            sentences.append(f"Distribute or not, {setting}: not enough runs, {RUNS} seeds are needed ({shown}).")
        elif world.seedless and kind != FASTEST:
            sentences.append(f"Distribute or not, {setting}: open, because the seeds had no effect ({shown}).")
        elif beats(values[best], alone):
            sentences.append(f"Distribute, {setting}: {shown}.")
        elif separated(values[best], alone):
            few = min(len(alone), len(values[best]))
            sentences.append(f"Distribute or not, {setting}: {few} seeds are too few ({shown}). Do: --seeds {few + 1}.")
        else:
            better = beats(alone, values[best]) or separated(alone, values[best])
            how = _ALONE.get(kind, _LEARNS)[0 if better else 1]
            sentences.append(f"Do not distribute, {setting}: one worker {how} ({shown}).")
    return sentences


def _against_one(world: _World, setting: Setting) -> tuple[str, str, list[float], dict[str, list[float]]]:
    """Return kind, words and values by which one worker is compared: time to the target, else the metric in time."""
    groups = world.groups[setting]
    if world.target:
        reached = {name: [_seconds_to(run, world) for run in runs] for name, runs in groups.items()}
        alone = [_seconds_to(run, world) for run in world.alone]
        if any(math.isfinite(v) for found in [alone, *reached.values()] for v in found):
            return TO_TARGET, f"time to {world.metric} {world.target[1]:g}", alone, reached
    if not world.metric:
        return (
            FASTEST,
            "seconds an epoch",
            [_epoch_seconds(run) for run in world.alone],
            {name: [_epoch_seconds(run) for run in runs] for name, runs in groups.items()},
        )
    seconds, _ = _limits(world, setting)
    values = {name: [_at(run, world, 1, seconds) for run in runs] for name, runs in groups.items()}
    alone = [_at(run, world, 1, seconds) for run in world.alone]
    return IN_TIME, f"{world.metric} in {_seconds(seconds)}", alone, values


def _flips(criteria: Sequence[Criterion]) -> list[str]:
    """Say where the winner changes with the bandwidth or the number of workers."""
    sentences = []
    for kind in dict.fromkeys(criterion.kind for criterion in criteria):
        found = [criterion for criterion in criteria if criterion.kind == kind and criterion.called]
        for what, key, shown in (
            ("bandwidth", lambda s: s.workers, lambda s: s.link_text),
            ("number of workers", lambda s: s.link, lambda s: f"{s.workers} workers"),
        ):
            for fixed in dict.fromkeys(key(criterion.setting) for criterion in found):
                same = [criterion for criterion in found if key(criterion.setting) == fixed]
                if len({criterion.winner for criterion in same}) < 2:
                    continue
                where: dict[str, list[str]] = {}
                for criterion in same:
                    where.setdefault(criterion.winner, []).append(shown(criterion.setting))
                parts = "; ".join(f"{name} at {', '.join(places)}" for name, places in where.items())
                title = same[0].title.split(" (")[0]
                if kind in _LIMITS:  # The limit differs from setting to setting.
                    title = f"{title.split(' in ')[0]} in {_LIMITS[kind]}"
                at = f"{fixed} workers" if what == "bandwidth" else Setting(2, str(fixed)).link_text
                sentences.append(f"The {what} decides{f' ({at})' if at else ''}. {title}: {parts}.")
    return sentences


def _seeds_change_nothing(groups: Sequence[Sequence[Run | None]]) -> bool:
    """Return whether runs of a group have different seeds and the same metrics to the last bit."""
    for runs in groups:
        found = [run for run in runs if run is not None and run.epochs and not fault(run)]
        seeds = {seed_of(run, run.outcome) for run in found}
        # The loss has enough digits to tell two trainings apart; an accuracy may agree by chance.
        curves = {tuple((e.epoch, *sorted(e.logs.items())) for e in run.epochs) for run in found}
        told = all(any("loss" in name for name in e.logs) for run in found for e in run.epochs)
        if len(seeds) > 1 and len(seeds) == len(found) and len(curves) == 1 and told:
            return True
    return False


def _warnings(world: _World) -> list[str]:
    if not world.seedless:
        return []
    return [
        "The seeds had no effect: runs with different seeds have the same metrics to the last bit, so the spread over "
        "seeds is not known. Let the script call hvdx.init() before it makes the model: it reads HVDX_SEED. Or write "
        "{seed} in the command."
    ]


def _alone(world: _World) -> list[str]:
    if world.settings:
        return []
    return ["All runs have one worker, so there is nothing to compare."]


def _failures(world: _World) -> list[str]:
    """Say which runs failed, diverged or missed the target; they count as the worst."""
    sentences = []
    for setting in sorted(world.groups, key=lambda s: s.order):
        for name, runs in world.groups[setting].items():
            failed = [run for run in runs if run is None or fault(run)]
            nan = [r for r in runs if r not in failed and _curve(r, world) and math.isinf(_curve(r, world)[-1][2])]
            where = f"{name}, {setting}" if name != ONE_WORKER else name
            for what, count in (("failed", len(failed)), ("diverged (NaN)", len(nan))):
                if count:
                    sentences.append(f"{where}: {count} of {len(runs)} runs {what}, and count as the worst.")
            if world.target and not failed and not nan:
                missed = sum(math.isinf(_seconds_to(run, world)) for run in runs)
                if missed:
                    goal = f"{world.metric} {world.target[1]:g}"
                    sentences.append(f"{where}: {missed} of {len(runs)} runs did not reach {goal}.")
    return sentences
