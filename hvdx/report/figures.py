"""Figures of a report: charts with the tables of their numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdx.report.charts import DASHES, NAMED, Bar, Line, bars, lines
from hvdx.report.overview import ONE_WORKER, Group, Overview, Point, Setting, fault
from hvdx.report.table import quantity

#: Most epochs in a table of a metric; the others are in the chart only.
EPOCHS = 12


@dataclass(frozen=True)
class Key:
    """Entry in the key of a chart.

    Attributes:
        letter: letter at the end of the line; "" for the thin grey lines.
        name: name of the strategy, or a text about the thin grey lines.
        colour: variable of CSS.
        dashes: lengths of dashes, separated by blanks; "" for a solid line.
    """

    letter: str
    name: str
    colour: str
    dashes: str = ""


@dataclass(frozen=True)
class Figure:
    """A chart for each setting, and one table.

    Attributes:
        title: heading.
        caption: how to read the chart.
        panels: (setting in words, element `svg`) of each chart.
        header: titles of the columns.
        rows: cells, row by row; the first is the strategy.
        keys: entries of the key; empty if the charts need none.
    """

    title: str
    caption: str
    panels: list[tuple[str, str]]
    header: list[str]
    rows: list[list[str]]
    keys: list[Key] = field(default_factory=list)


def draw(overview: Overview) -> list[Figure]:
    """Draw the figures for which there are numbers.

    Raises:
        ConfigError: without Matplotlib.
    """
    found = []
    if any(group.curve(overview.metric) for group in overview.groups):
        found += [_metric(overview, timed=True), _metric(overview, timed=False)]
    if any(_step(group) for group in overview.groups):
        found += [_parts(overview), _bytes(overview)]
        if any(group.predicted_seconds() is not None for group in overview.groups):
            found.append(_prediction(overview))
    return found


def duration(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> duration(0.01234), duration(75.4), duration(4000)
        ('12.3 ms', '75.4 s', '66.7 min')
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.3g} min"


def number(value: float) -> str:
    """Format a value of a metric.

    Example:
        >>> number(0.81234), number(float("nan"))
        ('0.8123', 'NaN')
    """
    return f"{value:.4g}" if math.isfinite(value) else "NaN"


def spread(point: Point) -> str:
    """Format the mean of a metric with its lowest and highest value, if they differ.

    Example:
        >>> spread(Point(1, 2.0, 0.5, 0.4, 0.6))
        '0.5 (0.4 to 0.6)'
    """
    if point.low == point.high or not math.isfinite(point.mean):
        return number(point.mean)
    return f"{number(point.mean)} ({number(point.low)} to {number(point.high)})"


def _step(group: Group) -> float:
    return float(np.mean(group.step_seconds()))


def _styles(overview: Overview) -> dict[str, tuple[int, str]]:
    """Return {strategy: (style, letter)} of the strategies that the charts name."""
    several = [name for name in overview.strategies if name != ONE_WORKER]
    found = {name: (place + 1, "ABCDEF"[place]) for place, name in enumerate(several[:NAMED])}
    return found | ({ONE_WORKER: (0, "1")} if ONE_WORKER in overview.strategies else {})


def _keys(overview: Overview) -> list[Key]:
    found = []
    for name, (style, letter) in _styles(overview).items():
        dashes = " ".join(map(str, DASHES[style - 1])) if style else ""
        found.append(Key(letter, name, f"--s{style}" if style else "--ink", dashes))
    others = len(overview.strategies) - len(found)
    if others:
        found.append(Key("", f"{others} other {'strategy' if others == 1 else 'strategies'} (in the table)", "--rest"))
    if overview.target:
        found.append(Key("", f"target: {overview.metric} {number(overview.target[1])}", "--muted", "1 3"))
    return found


def _metric(overview: Overview, timed: bool) -> Figure:
    styles, metric = _styles(overview), overview.metric
    panels = []
    for setting in overview.settings:
        drawn, ends = [], []
        for group in overview.within(setting):
            points = group.curve(metric)
            if not points:
                continue
            style, letter = styles.get(group.strategy, (None, ""))
            xs = [point.seconds if timed else point.epoch for point in points]
            means, lows, highs = ([getattr(p, name) for p in points] for name in ("mean", "low", "high"))
            marks = [event.time for run in group.counted for event in run.interruptions] if timed else []
            drawn.append(Line(group.strategy, xs, means, lows, highs, style, letter, marks))
            ends.append(f"{group.strategy} ends at {number(points[-1].mean)}")
        over = "seconds" if timed else "epochs"
        summary = f"{metric} over {over}, {setting}. {_first(ends)}"
        target = overview.target[1] if overview.target else None
        panels.append((str(setting), lines(drawn, ("seconds" if timed else "epoch", metric), summary, target)))
    seeds = max(len(group.counted) for group in overview.groups)
    band = f" A line is the mean over {seeds} seeds, the band reaches from the lowest to the highest." * (seeds > 1)
    crosses = any(run.interruptions for group in overview.groups for run in group.counted)
    band += " A cross marks a failure after which the training went on." * (timed and crosses)
    what = "wall time since the fit began" if timed else "number of completed epochs"
    return Figure(
        f"{metric} over {'time' if timed else 'epochs'}",
        f"{metric} against the {what}.{band} {'Higher' if overview.rising else 'Lower'} is better.",
        panels,
        *_metric_table(overview, timed),
        _keys(overview),
    )


def _metric_table(overview: Overview, timed: bool) -> tuple[list[str], list[list[str]]]:
    curves = [(group, {point.epoch: point for point in group.curve(overview.metric)}) for group in overview.groups]
    epochs = sorted({epoch for _, curve in curves for epoch in curve})
    if len(epochs) > EPOCHS:
        places = np.linspace(0, len(epochs) - 1, EPOCHS).round().astype(int)
        epochs = [epochs[place] for place in places]
    rows = []
    for group, curve in curves:
        cells = []
        for epoch in epochs:
            point = curve.get(epoch)
            text = spread(point) if point else ""
            cells.append(f"{text} at {duration(point.seconds)}" if timed and point else text)
        rows.append([*_head(group), *cells])
    return ["strategy", "setting", *(f"epoch {epoch}" for epoch in epochs)], rows


def _head(group: Group) -> list[str]:
    return [group.strategy, str(group.setting)]


def _first(texts: Sequence[str], count: int = 4) -> str:
    more = f"; {len(texts) - count} more in the table" if len(texts) > count else ""
    return "; ".join(texts[:count]) + more + "."


def _panels(
    overview: Overview, title: str, bar: Callable[[Group], Bar], hatched: bool = False
) -> list[tuple[str, str]]:
    """Draw bars for each setting, the shortest first."""
    panels = []
    for setting in overview.settings:
        found = [bar(group) for group in overview.within(setting) if _step(group)]
        found.sort(key=lambda each: sum(each.parts.values()))
        summary = f"{title}, {setting}. {_first([f'{each.name}: {each.text}' for each in found])}"
        panels.append((str(setting), bars(found, summary, hatched)))
    return panels


def _parts(overview: Overview) -> Figure:
    title = "Time of a step"
    rows = []
    for group in overview.groups:
        parts = group.parts()
        rows.append(
            [*_head(group), duration(sum(parts.values())), *(f"{1000 * value:.3g}" for value in parts.values())]
        )
    return Figure(
        title,
        "Mean time of a step on a worker and its parts, without the first step, which compiles. Shorter is better.",
        _panels(overview, title, lambda g: Bar(g.strategy, g.parts(), duration(sum(g.parts().values()))), hatched=True),
        ["strategy", "setting", "step", *(f"{name}, ms" for name in overview.groups[0].parts())],
        rows,
    )


def _bytes(overview: Overview) -> Figure:
    title = "Bytes of a step"

    def bar(group: Group) -> Bar:
        sent = group.bytes_per_step()
        return Bar(group.strategy, {"sent": sent}, quantity(sent, "B"))

    return Figure(
        title,
        "Mean bytes that a worker sends in a step. Fewer bytes matter where the network is slow.",
        _panels(overview, title, bar),
        ["strategy", "setting", "sent per step"],
        [[*_head(group), quantity(group.bytes_per_step(), "B")] for group in overview.groups],
    )


def _prediction(overview: Overview) -> Figure:
    title = "Predicted and measured time of a step"

    def text(group: Group) -> str:
        predicted = group.predicted_seconds()
        return "no prediction" if predicted is None else duration(predicted)

    return Figure(
        title,
        "The bar is the measured median; the diamond is the prediction of the cost model.",
        _panels(
            overview,
            title,
            lambda g: Bar(g.strategy, {"step": _step(g)}, f"{duration(_step(g))}, ◆ {text(g)}", g.predicted_seconds()),
        ),
        ["strategy", "setting", "measured", "predicted"],
        [[*_head(group), duration(_step(group)), text(group)] for group in overview.groups],
    )


def results(overview: Overview) -> tuple[list[str], list[list[str]]]:
    """Return the table of all groups: its header and its rows."""
    metric = overview.metric
    header = ["strategy", "setting", "seeds", *([f"{metric}, last", f"{metric}, best"] if metric else [])]
    rows = []
    for group in overview.groups:
        points = group.curve(metric) if metric else []
        known = [point for point in points if math.isfinite(point.mean)]
        best = (max if overview.rising else min)(known, key=lambda point: point.mean, default=None)
        values = [spread(points[-1]) if points else "none", spread(best) if best else "none"] if metric else []
        step = _step(group)
        rows.append(
            [
                *_head(group),
                f"{len(group.counted)}{', incomplete' if any(map(fault, group.counted)) else ''}",
                *values,
                duration(group.seconds()),
                duration(step) if step else "unknown",
                quantity(group.bytes_per_step(), "B"),
            ]
        )
    return [*header, "time of the fit", "median step", "sent per step"], rows


def panel_of(overview: Overview, setting: Setting) -> list[tuple[str, dict[str, float]]]:
    """Return the parts of a step of each strategy in a setting, the shortest step first.

    Returns:
        (strategy, seconds of each part).
    """
    found = [(group.strategy, group.parts()) for group in overview.within(setting) if _step(group)]
    return sorted(found, key=lambda row: sum(row[1].values()))
