"""Pictures of the documentation, drawn from the figures in docs/benchmarks and from formulas.

python docs/make_pictures.py
"""

import json
import math
from pathlib import Path

from hvdx.jobs.benchmarks import scaling

DOCS = Path(__file__).resolve().parent
SCALING_PICTURE = DOCS / "pictures" / "scaling.svg"
# Titles of the networks in scaling.json, and label and colour of each strategy.
TITLES = {
    "cnn": "CNN, SGD, to an accuracy of 84 %",
    "mlp": "MLP, SGD, to an accuracy of 84 %",
    "lm": "Transformer, AdamW, to a loss of 2.4",
}
BARS = {
    scaling.ALONE: ("one worker", "#1f2933"),
    "all-reduce": ("AllReduce()", "#9aa5b1"),
    "fp16": ("fp16", "#d2d6dc"),
    "averaging": ("averaging", "#1d4ed8"),
    "threshold": ("Threshold()", "#c2410c"),
}
# Milliseconds of computing in a step, and the height of a panel.
SCALING_COMPUTING, PANEL = 100, 230

SPLIT_PICTURE = DOCS / "pictures" / "split-bytes.svg"
# The layer and the ranks of the picture about split layers.
WIDTH, RANKS = 4096, 4
# Powers of 2 on the axis of batches, powers of 10 on the axis of bytes, and the frame that they fill.
BATCHES, BYTES = (0, 12), (4, 10)
FRAME = {"left": 90, "right": 520, "top": 70, "bottom": 330}

SCALE_PICTURE = DOCS / "pictures" / "bytes-by-workers.svg"
# Powers of 2 on the axis of workers, powers of 10 on the axis of received bytes, and the exchanges in scale.json.
WORKERS, RECEIVED = (2, 10), (5, 9)
EXCHANGES = (("all_gather", "all_gather", "#1d4ed8"), ("sharded", "sharded", "#c2410c"))


def seconds_to_target(rows: list[dict]) -> str:
    """Draw the seconds to the target over the number of workers, under each strategy, for each network.

    Args:
        rows: the rows of docs/benchmarks/scaling.json.

    Returns:
        The picture as SVG.
    """
    panels = [name for name in TITLES if any(row["model"] == name for row in rows)]
    height = 84 + PANEL * len(panels) + 30
    computing = f"computing {SCALING_COMPUTING} ms a step, links of 100 Mbit/s"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {height}" font-family="sans-serif" font-size="14"'
        ' role="img">',
        "<title>Seconds to a target, by number of workers and strategy</title>",
        f'<rect width="480" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="24" font-size="17" font-weight="bold" fill="#1f2933">'
        "Seconds to a target, by number of workers</text>",
        f'<text x="12" y="45" fill="#52606d">Emulated hosts: {computing}</text>',
    ]
    for i, (label, colour) in enumerate(BARS.values()):
        x = 12 + (0, 108, 214, 276, 364)[i]
        drawn += [
            f'<rect x="{x}" y="56" width="12" height="12" fill="{colour}"/>',
            f'<text x="{x + 16}" y="67" font-size="13" fill="#1f2933">{label}</text>',
        ]
    for number, name in enumerate(panels):
        shown = [row for row in scaling.summary(rows, name, "100mbit") if row["strategy"] in BARS]
        drawn += _panel(name, shown, 84 + PANEL * number)
    drawn += [
        f'<text x="12" y="{height - 12}" font-size="12" fill="#52606d">'
        "Mean and range, all run in full. Figures: docs/benchmarks/scaling.json</text>",
        "</svg>",
    ]
    return "\n".join(drawn) + "\n"


def _panel(name: str, rows: list[dict], top: int) -> list[str]:
    """Draw the bars of a network, with the least and the most seconds of its seeds as a line."""
    bottom, full = top + PANEL - 48, PANEL - 92
    longest = max(row["most"] for row in rows)
    seeds = max(row["seeds"] for row in rows)
    title = f"{TITLES[name]}, {seeds} seed{'s' * (seeds > 1)}"
    drawn = [f'<text x="12" y="{top + 18}" font-weight="bold" fill="#1f2933">{title}</text>']
    x = 24
    for hosts in dict.fromkeys(row["hosts"] for row in rows):
        begin = x
        for row in (row for row in rows if row["hosts"] == hosts):
            y, low, high = (bottom - round(full * row[key] / longest) for key in ("seconds", "least", "most"))
            drawn += [
                f'<rect x="{x}" y="{y}" width="26" height="{bottom - y}" fill="{BARS[row["strategy"]][1]}"/>',
                f'<path d="M{x + 13} {low}V{high}" stroke="#1f2933"/>',
                f'<text x="{x + 13}" y="{high - 4}" font-size="12" text-anchor="middle" fill="#1f2933">'
                f"{row['seconds']:.0f}</text>",
            ]
            x += 30
        workers = "1 worker" if hosts == 1 else f"{hosts} workers"
        drawn.append(
            f'<text x="{(begin + x - 4) // 2}" y="{bottom + 18}" text-anchor="middle" fill="#1f2933">{workers}</text>'
        )
        x += 20
    return [*drawn, f'<path d="M12 {bottom}H468" stroke="#9aa5b1"/>']


def split_bytes() -> str:
    """Draw the bytes that a rank sends in a step for a large dense layer, over the batch, split and whole.

    Returns:
        The picture as SVG.
    """
    weights, others = 4 * WIDTH * WIDTH, RANKS - 1
    lines = (
        ("whole: all-reduce of its gradients", "#52606d", lambda batch: 2 * others / RANKS * weights),
        ("split: one layer", "#c2410c", lambda batch: 4 * 2 * others * batch * (WIDTH + WIDTH // RANKS)),
        ("split: a layer of a pair", "#1d4ed8", lambda batch: 4 * 2 * others * batch * WIDTH),
    )
    drawn = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 390" font-family="sans-serif" font-size="14"'
        ' role="img">',
        "<title>Bytes that a rank sends in a step for a dense layer</title>",
        '<rect width="720" height="390" fill="#ffffff"/>',
        '<text x="16" y="28" font-size="17" font-weight="bold" fill="#1f2933">'
        "Bytes that a rank sends in a step for a dense layer</text>",
        f'<text x="16" y="50" fill="#52606d">{WIDTH} inputs and units, float32, {RANKS} ranks, forward and backward'
        "</text>",
    ]
    for power in range(BYTES[0], BYTES[1] + 1):
        y = _y(10**power)
        label = f"{10 ** (power % 3)} {('B', 'kB', 'MB', 'GB')[power // 3]}"
        drawn += [
            f'<path d="M{FRAME["left"]} {y}H{FRAME["right"]}" stroke="#e4e7eb"/>',
            f'<text x="{FRAME["left"] - 8}" y="{y + 5}" text-anchor="end" fill="#52606d">{label}</text>',
        ]
    for power in range(BATCHES[0], BATCHES[1] + 1, 2):
        x = _x(2**power)
        drawn.append(f'<text x="{x}" y="{FRAME["bottom"] + 20}" text-anchor="middle" fill="#52606d">{2**power}</text>')
    drawn.append(f'<rect x="{FRAME["left"] + 8}" y="{FRAME["top"] + 4}" width="290" height="76" fill="#ffffff"/>')
    middle = (FRAME["left"] + FRAME["right"]) // 2
    drawn.append(
        f'<text x="{middle}" y="{FRAME["bottom"] + 42}" text-anchor="middle" fill="#1f2933">samples in the batch of '
        "each rank</text>"
    )
    ends = (2 ** BATCHES[0], 2 ** BATCHES[1])
    for i, (label, colour, sent) in enumerate(lines):
        (x1, y1), (x2, y2) = ((_x(batch), _y(sent(batch))) for batch in ends)
        y = FRAME["top"] + 20 + 26 * i
        drawn += [
            f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{colour}" stroke-width="3"/>',
            f'<path d="M{FRAME["left"] + 16} {y - 5}h24" stroke="{colour}" stroke-width="3"/>',
            f'<text x="{FRAME["left"] + 48}" y="{y}" fill="#1f2933">{label}</text>',
        ]
    for i, batch in enumerate((WIDTH // (RANKS + 1), WIDTH // RANKS)):
        y = FRAME["top"] + 130 + 44 * i
        drawn.append(
            f'<text x="{FRAME["right"] + 16}" y="{y}" fill="{lines[i + 1][1]}">{"pair" if i else "one layer"}: less'
            f'</text><text x="{FRAME["right"] + 16}" y="{y + 18}" fill="{lines[i + 1][1]}">up to {batch} samples</text>'
        )
    return "\n".join([*drawn, "</svg>"]) + "\n"


def bytes_by_workers(scale: dict) -> str:
    """Draw the bytes that a worker receives in a step over the number of workers, for both exchanges of `Threshold`.

    Args:
        scale: the content of docs/benchmarks/scale.json.

    Returns:
        The picture as SVG.
    """
    rows = scale["rows"]
    elements, density = scale["elements"], scale["density"]
    drawn = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 390" font-family="sans-serif" font-size="14"'
        ' role="img">',
        "<title>Bytes that a worker receives in a step of Threshold</title>",
        '<rect width="720" height="390" fill="#ffffff"/>',
        '<text x="16" y="28" font-size="17" font-weight="bold" fill="#1f2933">'
        "Bytes that a worker receives in a step of Threshold</text>",
        f'<text x="16" y="50" fill="#52606d">{elements / 1e6:g} million parameters, density {density:g}; simulated. '
        "Figures: docs/benchmarks/scale.json</text>",
    ]
    for power in range(RECEIVED[0], RECEIVED[1] + 1):
        y = _at(10**power, 10, RECEIVED, ("bottom", "top"))
        label = f"{10 ** (power % 3)} {('B', 'kB', 'MB', 'GB')[power // 3]}"
        drawn += [
            f'<path d="M{FRAME["left"]} {y}H{FRAME["right"]}" stroke="#e4e7eb"/>',
            f'<text x="{FRAME["left"] - 8}" y="{y + 5}" text-anchor="end" fill="#52606d">{label}</text>',
        ]
    for power in range(WORKERS[0], WORKERS[1] + 1, 2):
        x = _at(2**power, 2, WORKERS, ("left", "right"))
        drawn.append(f'<text x="{x}" y="{FRAME["bottom"] + 20}" text-anchor="middle" fill="#52606d">{2**power}</text>')
    middle = (FRAME["left"] + FRAME["right"]) // 2
    drawn.append(f'<text x="{middle}" y="{FRAME["bottom"] + 42}" text-anchor="middle" fill="#1f2933">workers</text>')
    dense = [(2**power, 8 * elements * (1 - 2**-power)) for power in range(WORKERS[0], WORKERS[1] + 1)]
    lines = [("dense float32, ring", "#52606d", dense, 18)]
    for name, label, colour in EXCHANGES:
        points = [(row["workers"], row["received"]) for row in rows if row["exchange"] == name]
        lines.append((label, colour, points, 5))
    for label, colour, points, below in lines:
        at = [
            (_at(workers, 2, WORKERS, ("left", "right")), _at(size, 10, RECEIVED, ("bottom", "top")))
            for workers, size in points
        ]
        path = "L".join(f"{x} {y}" for x, y in at)
        drawn += [
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="3"/>',
            f'<text x="{FRAME["right"] + 8}" y="{at[-1][1] + below}" fill="{colour}">{label}</text>',
        ]
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _at(value: float, base: int, powers: tuple[int, int], ends: tuple[str, str]) -> int:
    """Return the position of a number on a logarithmic axis between two sides of the frame."""
    share = (math.log(value, base) - powers[0]) / (powers[1] - powers[0])
    begin, end = (FRAME[side] for side in ends)
    return round(begin + share * (end - begin))


def _x(batch: float) -> int:
    share = (math.log2(batch) - BATCHES[0]) / (BATCHES[1] - BATCHES[0])
    return round(FRAME["left"] + share * (FRAME["right"] - FRAME["left"]))


def _y(sent: float) -> int:
    share = (math.log10(sent) - BYTES[0]) / (BYTES[1] - BYTES[0])
    return round(FRAME["bottom"] - share * (FRAME["bottom"] - FRAME["top"]))


if __name__ == "__main__":
    SCALING_PICTURE.parent.mkdir(exist_ok=True)
    SCALING_PICTURE.write_text(
        seconds_to_target(json.loads((DOCS / "benchmarks" / "scaling.json").read_text())["rows"])
    )
    SPLIT_PICTURE.write_text(split_bytes())
    SCALE_PICTURE.write_text(bytes_by_workers(json.loads((DOCS / "benchmarks" / "scale.json").read_text())))
