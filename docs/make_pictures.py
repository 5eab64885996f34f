"""Pictures of the documentation, drawn from the figures in docs/benchmarks, from formulas and from `hvdx advise`.

Each picture has a narrow form, NAME-narrow, which the site shows on a phone (docs/hooks.py).

python docs/make_pictures.py
"""

import html
import json
import math
import textwrap
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from hvdx.cli.advising.answer import CHART
from hvdx.jobs.benchmarks import scaling

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "pictures"
# Ends of the names of the two forms, with their widths in pixels.
FORMS = {"": 720, "-narrow": 360}
INK, GREY, PALE = "#1f2933", "#52606d", "#e4e7eb"
ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    f'orient="auto"><path d="M0 0L8 4L0 8Z" fill="{GREY}"/></marker></defs>'
)

# Titles of the networks in scaling.json, and label and colour of each strategy.
TITLES = {
    "cnn": "CNN, SGD, to an accuracy of 84 %",
    "mlp": "MLP, SGD, to an accuracy of 84 %",
    "lm": "Transformer, AdamW, to a loss of 2.4",
}
BARS = {
    scaling.ALONE: ("one worker", INK),
    "all-reduce": ("AllReduce()", "#9aa5b1"),
    "fp16": ("fp16", "#d2d6dc"),
    "averaging": ("averaging", "#1d4ed8"),
    "threshold": ("Threshold()", "#c2410c"),
}
# Milliseconds of computing in a step, and the height of a panel.
SCALING_COMPUTING, PANEL = 100, 230

# The layer and the ranks of the picture about split layers.
WIDTH, RANKS = 4096, 4
# Powers of 2 on the axes of batches and of workers, powers of 10 on the axes of bytes.
BATCHES, SPLIT_BYTES = (0, 12), (4, 10)
WORKERS, RECEIVED = (2, 10), (5, 9)
# Left end, top end and height of a frame of two axes; its right end is as far from the picture's.
LEFT, HEIGHT, RIGHT = 70, 260, 20


class Axis(NamedTuple):
    """A logarithmic axis: its title, the base of its scale, its first and last power, and its ends in pixels."""

    title: str
    base: int
    powers: tuple[int, int]
    ends: tuple[int, int]

    def at(self, value: float) -> int:
        """Return the position of a value, in pixels."""
        share = (math.log(value, self.base) - self.powers[0]) / (self.powers[1] - self.powers[0])
        return round(self.ends[0] + share * (self.ends[1] - self.ends[0]))


class Line(NamedTuple):
    """A line of a chart: its label, its colour and its points."""

    label: str
    colour: str
    points: list[tuple[float, float]]


def pictures() -> dict[str, str]:
    """Return the content of each picture in SVG, by the name of its file."""
    rows = json.loads((DOCS / "benchmarks" / "scaling.json").read_text())["rows"]
    scale = json.loads((DOCS / "benchmarks" / "scale.json").read_text())
    drawn = {}
    for form, width in FORMS.items():
        drawn[f"scaling{form}.svg"] = seconds_to_target(rows, min(width, 480))
        drawn[f"split-bytes{form}.svg"] = split_bytes(width)
        drawn[f"bytes-by-workers{form}.svg"] = bytes_by_workers(scale, width)
        drawn[f"which-strategy{form}.svg"] = which_strategy(width)
    return drawn


def stacked(picture: Image.Image) -> Image.Image:
    """Return the right half of a picture below its left half."""
    half = picture.width // 2
    below = picture.copy().resize((half, 2 * picture.height))
    for i in range(2):
        below.paste(picture.crop((half * i, 0, half * (i + 1), picture.height)), (0, picture.height * i))
    return below


def seconds_to_target(rows: list[dict], width: int) -> str:
    """Draw the seconds to the target over the number of workers, under each strategy, for each network.

    Args:
        rows: the rows of docs/benchmarks/scaling.json.
        width: of the picture, in pixels.

    Returns:
        The picture as SVG.
    """
    panels = [name for name in TITLES if any(row["model"] == name for row in rows)]
    title = "Seconds to a target, by number of workers"
    computing = f"Emulated hosts: computing {SCALING_COMPUTING} ms a step, links of 100 Mbit/s"
    drawn, y = _heading(title, computing, width)
    x = 12
    for label, colour in BARS.values():
        if x + 16 + 7 * len(label) > width:
            x, y = 12, y + 20
        drawn += [
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>',
            _text(x + 16, y + 11, label, size=13),
        ]
        x += 30 + 7 * len(label)
    y += 28
    for name in panels:
        shown = [row for row in scaling.summary(rows, name, "100mbit") if row["strategy"] in BARS]
        drawn += _panel(name, shown, y, width)
        y += PANEL
    below, y = _wrapped("Mean and range, all run in full. Figures: docs/benchmarks/scaling.json", y + 18, width, 12)
    return _svg(title, width, y, drawn + below)


def _panel(name: str, rows: list[dict], top: int, width: int) -> list[str]:
    """Draw the bars of a network, with the least and the most seconds of its seeds as a line."""
    bottom, full = top + PANEL - 48, PANEL - 92
    longest = max(row["most"] for row in rows)
    seeds = max(row["seeds"] for row in rows)
    drawn = [_text(12, top + 18, f"{TITLES[name]}, {seeds} seed{'s' * (seeds > 1)}", bold=True)]
    groups = list(dict.fromkeys(row["hosts"] for row in rows))
    # Between two groups there are two thirds of a bar.
    pitch = int((width - 36) / (len(rows) + (len(groups) - 1) * 2 / 3))
    x = 24
    for hosts in groups:
        begin = x
        for row in (row for row in rows if row["hosts"] == hosts):
            y, low, high = (bottom - round(full * row[key] / longest) for key in ("seconds", "least", "most"))
            middle = x + (pitch - 4) // 2
            drawn += [
                f'<rect x="{x}" y="{y}" width="{pitch - 4}" height="{bottom - y}" fill="{BARS[row["strategy"]][1]}"/>',
                f'<path d="M{middle} {low}V{high}" stroke="{INK}"/>',
                _text(middle, high - 4, f"{row['seconds']:.0f}", size=12, anchor="middle"),
            ]
            x += pitch
        workers = "1 worker" if hosts == 1 else f"{hosts} workers"
        drawn.append(_text((begin + x - 4) // 2, bottom + 18, workers, size=13, anchor="middle"))
        x += pitch * 2 // 3
    return [*drawn, f'<path d="M12 {bottom}H{width - 12}" stroke="#9aa5b1"/>']


def split_bytes(width: int) -> str:
    """Draw the bytes that a rank sends in a step for a large dense layer, over the batch, split and whole.

    Args:
        width: of the picture, in pixels.

    Returns:
        The picture as SVG.
    """
    weights, others = 4 * WIDTH * WIDTH, RANKS - 1
    ends = (2 ** BATCHES[0], 2 ** BATCHES[1])
    sent = (
        ("whole: all-reduce of its gradients", GREY, lambda batch: 2 * others / RANKS * weights),
        (
            f"split, one layer: fewer up to a batch of {WIDTH // (RANKS + 1)}",
            "#c2410c",
            lambda batch: 4 * 2 * others * batch * (WIDTH + WIDTH // RANKS),
        ),
        (
            f"split, layer of a pair: fewer up to {WIDTH // RANKS}",
            "#1d4ed8",
            lambda batch: 4 * 2 * others * batch * WIDTH,
        ),
    )
    lines = [Line(label, colour, [(batch, size(batch)) for batch in ends]) for label, colour, size in sent]
    return _chart(
        "Bytes that a rank sends in a step for a dense layer",
        f"{WIDTH} inputs and units, float32, {RANKS} ranks, forward and backward",
        lines,
        ("samples in the batch of each rank", BATCHES, SPLIT_BYTES),
        width,
    )


def bytes_by_workers(scale: dict, width: int) -> str:
    """Draw the bytes that a worker receives in a step over the number of workers, for both exchanges of `Threshold`.

    Args:
        scale: the content of docs/benchmarks/scale.json.
        width: of the picture, in pixels.

    Returns:
        The picture as SVG.
    """
    elements = scale["elements"]
    dense = [(2**power, 8 * elements * (1 - 2**-power)) for power in range(WORKERS[0], WORKERS[1] + 1)]
    lines = [Line("dense float32, ring", GREY, dense)]
    for exchange, colour in (("all_gather", "#1d4ed8"), ("sharded", "#c2410c")):
        points = [(row["workers"], row["received"]) for row in scale["rows"] if row["exchange"] == exchange]
        lines.append(Line(f"Threshold, {exchange}", colour, points))
    return _chart(
        "Bytes that a worker receives in a step of Threshold",
        f"{elements / 1e6:g} million parameters, density {scale['density']:g}; simulated. "
        "Figures: docs/benchmarks/scale.json",
        lines,
        ("workers", WORKERS, RECEIVED),
        width,
    )


def which_strategy(width: int) -> str:
    """Draw the chart of `hvdx advise` for choosing a strategy: questions below each other, and what a yes leads to.

    Args:
        width: of the picture, in pixels.

    Returns:
        The picture as SVG.
    """
    title = "Which strategy for me"
    x = "x: seconds to transfer the gradients once, divided by the seconds of computing a step"
    drawn, y = _heading(title, x, width)
    beside = width > 500
    # Left and right ends of the questions, and of the answers.
    asked, answered = ((12, 380), (450, width - 12)) if beside else ((12, width - 12), (64, width - 12))
    questions = [(f"{number}. {condition}?", choice) for number, (condition, choice) in enumerate(CHART[:-1], 1)]
    for question, choice in questions:
        box, end = _box(question, asked, y, GREY, "#ffffff")
        if beside:
            yes = [_arrow(f"M{asked[1]} {y + 18}H{answered[0]}"), _text(400, y + 12, "yes", colour=GREY)]
        else:
            yes = [_arrow(f"M90 {end}V{end + 26}"), _text(98, end + 18, "yes", colour=GREY)]
        answer, after = _box(choice, answered, y if beside else end + 26, *_of_choice(choice))
        y = max(end, after) + 26
        no = [_arrow(f"M40 {end}V{y}"), _text(34, y - 8, "no", anchor="end", colour=GREY)]
        drawn += [*box, *yes, *answer, *no]
    last, y = _box(CHART[-1][1], asked, y, *_of_choice(CHART[-1][1]))
    return _svg(title, width, y + 12, drawn + last)


def _of_choice(choice: str) -> tuple[str, str]:
    """Return the colours of the frame and of the inside of a choice."""
    return (INK, PALE) if choice.startswith("none") else ("#c2410c", "#fff7ed")


def _box(text: str, ends: tuple[int, int], y: int, frame: str, inside: str) -> tuple[list[str], int]:
    """Return the lines of a text in a box, and where the box ends."""
    lines, end = _wrapped(text, y + 24, ends[1] - ends[0], 14, x=ends[0] + 12, colour=INK)
    height = end - y - 8
    size = f'x="{ends[0]}" y="{y}" width="{ends[1] - ends[0]}" height="{height}"'
    return [f'<rect {size} rx="6" fill="{inside}" stroke="{frame}"/>', *lines], y + height


def _arrow(path: str) -> str:
    return f'<path d="{path}" stroke="{GREY}" marker-end="url(#arrow)"/>'


def _chart(title: str, subtitle: str, lines: list[Line], axes: tuple, width: int) -> str:
    """Draw lines over powers of 2, in bytes; `axes` has the title of the first axis, and the powers of both."""
    drawn, y = _heading(title, subtitle, width)
    for line in lines:
        drawn += [
            f'<path d="M12 {y + 7}h24" stroke="{line.colour}" stroke-width="3"/>',
            _text(44, y + 12, line.label),
        ]
        y += 22
    bottom = y + 12 + HEIGHT
    below = Axis(axes[0], 2, axes[1], (LEFT, width - RIGHT))
    beside = Axis("bytes", 10, axes[2], (bottom, y + 12))
    for power in range(beside.powers[0], beside.powers[1] + 1):
        at = beside.at(10**power)
        label = f"{10 ** (power % 3)} {('B', 'kB', 'MB', 'GB')[power // 3]}"
        drawn += [
            f'<path d="M{LEFT} {at}H{width - RIGHT}" stroke="{PALE}"/>',
            _text(LEFT - 8, at + 5, label, anchor="end", colour=GREY),
        ]
    for power in range(below.powers[0], below.powers[1] + 1, 2):
        drawn.append(_text(below.at(2**power), bottom + 20, f"{2**power}", anchor="middle", colour=GREY))
    drawn.append(_text(sum(below.ends) // 2, bottom + 42, below.title, anchor="middle"))
    for line in lines:
        path = "L".join(f"{below.at(x)} {beside.at(y)}" for x, y in line.points)
        drawn.append(f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="3"/>')
    return _svg(title, width, bottom + 56, drawn)


def _heading(title: str, subtitle: str, width: int) -> tuple[list[str], int]:
    """Return the lines of a title and of what is below it, and where the picture goes on."""
    above, y = _wrapped(title, 24, width, 17, bold=True)
    below, y = _wrapped(subtitle, y, width, 14)
    return above + below, y - 10


def _wrapped(
    text: str, y: int, width: int, size: int, bold: bool = False, x: int = 12, colour: str = ""
) -> tuple[list[str], int]:
    """Return the lines of a text that is too wide for one, and where the next line begins."""
    # A letter is about half as wide as it is high.
    lines = textwrap.wrap(text, int((width - 24) / (0.53 * size)))
    colour = colour or (INK if bold else GREY)
    drawn = [_text(x, y + (size + 6) * i, line, size, bold, colour=colour) for i, line in enumerate(lines)]
    return drawn, y + (size + 6) * len(lines)


def _text(
    x: int, y: int, text: str, size: int = 14, bold: bool = False, anchor: str = "start", colour: str = INK
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    look = f'font-size="{size}"{weight} text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x}" y="{y}" {look}>{html.escape(text, quote=False)}</text>'


def _svg(title: str, width: int, height: int, drawn: list[str]) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    if any("#arrow" in line for line in drawn):
        head.append(ARROW)
    return "\n".join([*head, *drawn, "</svg>"]) + "\n"


if __name__ == "__main__":
    for name, content in pictures().items():
        (PICTURES / name).write_text(content)
    stacked(Image.open(PICTURES / "comparison.png")).save(PICTURES / "comparison-narrow.png", optimize=True)
