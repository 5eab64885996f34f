"""Charts as SVG for a page: lines with bands, and stacked bars.

A chart is 400 units wide, which a phone shows at nearly their size in pixels; a wide page shows charts side by side.
Colours are variables of CSS (`--s0` ...), so that the page has a light and a dark mode. Nothing in a chart is told by
its colour alone: a line has a letter at its end and a pattern of dashes, and a part of a bar has a hatch.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hvdx.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

#: Packages of the extra `report`, and the command that installs them.
PACKAGES = ("matplotlib", "jinja2")
INSTALL = "pip install " + " ".join(PACKAGES)
#: Number of strategies that a chart names; the others are thin grey lines.
NAMED = 6
#: Dashes of the named lines, as lengths in pixels; () is a solid line.
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 2), (2, 2), (8, 2, 2, 2), (4, 4), (10, 3))
#: Hatches of the parts of a step, as paths in a square of 6 by 6.
HATCHES = {
    "computing": "",
    "encoding": "M0 6L6 0M-1 1L1 -1M5 7L7 5",
    "waiting": "M3 2V4",
    "exchanging": "M0 0L6 6M-1 5L1 7M5 -1L7 1",
    "decoding": "M0 0L6 6M0 6L6 0",
    "other": "M0 3H6",
}

_WIDTH = 400
_FONT = 12
_MARKERS = "os^Dvp"
# Matplotlib writes colours as numbers; these stand for variables of CSS, and are replaced in the SVG.
_VARIABLES = {
    **{f"#0000{i:02x}": f"--s{i}" for i in range(1, NAMED + 1)},
    "#000010": "--ink",
    "#000011": "--muted",
    "#000012": "--grid",
    "#000013": "--rest",
    "#000014": "--paper",
    **{f"#0000{i + 0x20:02x}": f"--{name}" for i, name in enumerate(HATCHES)},
}
_COLOURS = {variable: colour for colour, variable in _VARIABLES.items()}


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        x: abscissas, float[n].
        y: values, float[n]; NaN makes a gap.
        low: lower edge of the band, float[n].
        high: upper edge of the band, float[n].
        style: 1 to 6 for a named line, 0 for one worker, None for a thin grey line.
        letter: the letter at its end.
        marks: abscissas that crosses mark on the line.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    style: int | None = None
    letter: str = ""
    marks: Sequence[float] = ()


@dataclass(frozen=True)
class Bar:
    """A bar of a chart.

    Attributes:
        parts: lengths of its parts, from the left.
        text: its length, in words.
        mark: a second value, drawn as a diamond, such as a prediction; None for none.
    """

    name: str
    parts: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    mark: float | None = None


def lines(found: Sequence[Line], labels: tuple[str, str], summary: str, target: float | None = None) -> str:
    """Draw lines, those with a style above the others.

    Args:
        summary: description for screen readers.
        target: value that a horizontal line marks.

    Raises:
        ConfigError: without Matplotlib.
    """
    with _figure(258, summary) as (figure, answer):
        axes = figure.add_axes((0.13, 0.155, 0.81, 0.755))
        _frame(axes, labels)
        for line in sorted(found, key=lambda line: (line.style is not None, -(line.style or 0))):
            _draw(axes, line)
        if target is not None:
            axes.axhline(target, color=_COLOURS["--muted"], linewidth=1, dashes=(1, 3))
        axes.margins(x=0.02, y=0.08)
        figure.canvas.draw()
        low, high = axes.get_xlim()
        start = min(low, 0.0) if labels[0] == "seconds" else low
        axes.set_xlim(start, high + 0.06 * (high - start))
        _label_ends(axes, [line for line in found if line.letter])
    return answer[0]


def bars(found: Sequence[Bar], summary: str, hatched: bool = False) -> str:
    """Draw horizontal bars, each with its name above it.

    Args:
        summary: description for screen readers.
        hatched: whether the parts are those of a step, with a legend; otherwise bars are of one colour.

    Raises:
        ConfigError: without Matplotlib.
    """
    row, legend = 36, 44 if hatched else 4
    height = legend + row * max(len(found), 1) + 4
    longest = max((max(sum(bar.parts.values()), bar.mark or 0.0) for bar in found), default=0.0) or 1.0
    with _figure(height, summary) as (figure, answer):
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, _WIDTH)
        axes.set_ylim(height, 0)
        for i, bar in enumerate(found):
            top = legend + row * i
            axes.text(2, top + 12, shortened(bar.name, bar.text), color=_COLOURS["--ink"])
            axes.text(_WIDTH - 2, top + 12, bar.text, color=_COLOURS["--ink"], ha="right", weight="bold")
            left = 2.0
            for name, value in bar.parts.items():
                wide = (_WIDTH - 12) * value / longest
                _box(axes, (left, top + 17), wide, _COLOURS[f"--{name}" if hatched else "--s1"])
                left += wide
            if bar.mark is not None:
                axes.plot(
                    2 + (_WIDTH - 12) * bar.mark / longest,
                    top + 23,
                    marker="D",
                    markersize=8,
                    color=_COLOURS["--s2"],
                    markeredgecolor=_COLOURS["--paper"],
                )
        if hatched:
            _legend(axes)
    return answer[0]


def shortened(name: str, beside: str = "") -> str:
    """Cut a name that would not fit on a line of a chart, and end it in an ellipsis.

    Args:
        beside: text in bold on the same line.

    Example:
        >>> shortened("Threshold()", "23.4 ms"), len(shortened("x" * 100, "23.4 ms"))
        ('Threshold()', 43)
    """
    longest = int((_WIDTH - 12 - 8.3 * len(beside)) / 7.5)
    return name if len(name) <= longest else name[: longest - 1] + "…"


def patterns() -> str:
    """Return an element `svg` with the hatches, which a page with bars needs once."""
    found = "".join(
        f'<pattern id="part-{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" style="fill: var(--{name})"/>'
        f'<path d="{path}" style="fill: none; stroke: var(--paper); stroke-width: 1.4"/></pattern>'
        for name, path in HATCHES.items()
    )
    return f'<svg class="patterns" width="0" height="0" aria-hidden="true"><defs>{found}</defs></svg>'


def _box(axes: "Axes", corner: tuple[float, float], width: float, colour: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(corner, width, 12, facecolor=colour, linewidth=0))


def _legend(axes: "Axes") -> None:
    for i, part in enumerate(HATCHES):
        left, top = 2 + 132 * (i % 3), 4 + 18 * (i // 3)
        _box(axes, (left, top), 22, _COLOURS[f"--{part}"])
        axes.text(left + 28, top + 10, part, color=_COLOURS["--ink"])


def _frame(axes: "Axes", labels: tuple[str, str]) -> None:
    axes.patch.set_visible(False)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_COLOURS["--muted"])
    axes.grid(True, color=_COLOURS["--grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_COLOURS["--muted"], length=3)
    axes.locator_params(nbins=6)
    axes.set_xlabel(labels[0], color=_COLOURS["--ink"])
    # Beside the axis, a name would be rotated and take width. It is above the label of a tick at the top end.
    axes.set_title(labels[1], color=_COLOURS["--ink"], fontsize=_FONT, loc="left", x=-0.13, pad=10)
    cast("MaxNLocator", axes.xaxis.get_major_locator()).set_params(integer=labels[0].startswith("epoch"))


def _draw(axes: "Axes", line: Line) -> None:
    colour = _COLOURS["--rest" if line.style is None else "--ink" if line.style == 0 else f"--s{line.style}"]
    x, low, high = (np.asarray(values, float) for values in (line.x, line.low, line.high))
    options: dict[str, Any] = {"linewidth": 0.8, "zorder": 2}
    if line.style is not None:
        dashes = DASHES[line.style - 1] if line.style else ()
        options = {
            "linewidth": 1.8,
            "zorder": 3,
            "marker": _MARKERS[line.style - 1] if line.style else "x",
            "markersize": 4 if len(x) <= 20 else 0,
            **({"dashes": [length / 1.8 for length in dashes]} if dashes else {}),
        }
        if np.nanmax(high - low, initial=0) > 0:
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0, zorder=1)
    elif len(x) == 1:
        options["marker"] = "."
    y = np.asarray(line.y, float)
    axes.plot(x, y, color=colour, **options)
    if line.marks:
        axes.plot(line.marks, np.interp(line.marks, x, y), "x", color=_COLOURS["--ink"], markersize=8, zorder=4)


def _label_ends(axes: "Axes", named: Sequence[Line]) -> None:
    """Write the letters at the ends of the lines, moved apart where they would overlap."""
    ends = []
    for line in named:
        known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
        if known:
            ends.append((*axes.transData.transform(known[-1]).tolist(), line))
    ends.sort(key=lambda end: end[1])
    heights = _apart([end[0] for end in ends], [end[1] for end in ends], axes.bbox.y0 + 6, axes.bbox.y1)
    for (x, _, line), y in zip(ends, heights, strict=True):
        colour = _COLOURS[f"--s{line.style}" if line.style else "--ink"]
        axes.text(x + 7, y, line.letter, transform=None, color=colour, weight="bold", va="center")


def _apart(xs: list[float], ys: list[float], low: float, high: float) -> list[float]:
    """Return heights near `ys`, sorted, such that labels that are close in x do not overlap.

    Example:
        >>> _apart([5.0, 5.0, 90.0], [50.0, 51.0, 52.0], 0.0, 100.0)
        [44.0, 57.0, 52.0]
    """
    found, height = list(ys), 13.0
    pairs = [(i, j) for i in range(len(xs)) for j in range(i + 1, len(xs)) if abs(xs[i] - xs[j]) < 14]
    for _ in range(200):
        moved = False
        for i, j in pairs:
            short = height - (found[j] - found[i])
            if short > 1e-6:
                moved = True
                found[i] = max(low, found[i] - short / 2)
                found[j] = min(high, max(found[j] + short / 2, found[i] + height))
        if not moved:
            break
    return found


@contextmanager
def _figure(height: int, summary: str) -> Iterator[tuple["Figure", list[str]]]:
    """Yield a figure of Matplotlib, and a list that receives the SVG at the end."""
    try:
        import matplotlib
        from matplotlib import style
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("matplotlib") from error
    answer: list[str] = []
    settings = {"font.size": _FONT, "font.family": "sans-serif", "text.parse_math": False}
    # The salt makes the identifiers of clip paths and markers equal in each run, and different in each chart.
    with style.context(["default", settings]), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": summary}):
        figure = Figure(figsize=(_WIDTH / 72, height / 72), dpi=72)
        figure.patch.set_visible(False)
        FigureCanvasSVG(figure)
        yield figure, answer
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    answer.append(_inline(text.getvalue(), height, summary))


def missing(package: str) -> ConfigError:
    """Return the error for a package of the extra `report` that is not installed."""
    return ConfigError(
        f"report: expected the package {package}, which draws the page, got none. "
        f"Do: {INSTALL}, or leave out the page: hvdx report DIR --text"
    )


def _paint(colour: str) -> str:
    variable = _VARIABLES.get(colour)
    if variable is None:
        return colour
    return f"url(#part-{variable[2:]})" if variable[2:] in HATCHES else f"var({variable})"


def _short_tag(tag: str) -> str:
    """Return a tag with variables for colours, without identifiers that nobody refers to, and without a font."""
    tag = re.sub(r'^<g id="[^"]*"', "<g", tag).replace("xlink:href", "href")
    # The page chooses the font.
    tag = re.sub(r"font: (bold )?[\d.]+px [^;\"]*", lambda match: "font-weight: 700" if match[1] else "", tag)
    tag = re.sub(r"font-(size|family): [^;\"]*; ?| transform=\"rotate\(-0 [^\"]*\"", "", tag)
    tag = re.sub(r"#0000[0-9a-f]{2}\b", lambda match: _paint(match[0]), tag)
    return re.sub(r"(\d\.\d)\d+", r"\1", re.sub(r"\s+", " ", tag))


def _inline(svg: str, height: int, summary: str) -> str:
    """Return the SVG of Matplotlib as an element of a page, without references and with variables for colours."""
    body = svg[svg.index("<svg") :]
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    # Only inside tags: the text of a chart is that of its data.
    body = re.sub(r"<[^>]*>", lambda match: _short_tag(match[0]), body)
    head = f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(summary)}">'
    return head + re.sub(r">\s+<", "><", body.strip())
