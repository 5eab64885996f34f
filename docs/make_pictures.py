"""Pictures of the documentation, drawn from the figures in docs/benchmarks and from formulas.

python docs/make_pictures.py
"""

import json
import math
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PICTURE = DOCS / "pictures" / "seconds-to-85.svg"
# (name in network.json, label, colour) of each bar.
BARS = (
    ("Horovod fp32", "AllReduce(), float32", "#9aa5b1"),
    ("Horovod fp16", 'AllReduce(compression="fp16")', "#9aa5b1"),
    ("threshold", "Threshold()", "#c2410c"),
)
LEFT, FULL, ROW = 300, 330, 44

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


def seconds_to_85(network: dict) -> str:
    """Draw the seconds until a network has learnt Fashion-MNIST to 85 % on a link of 100 Mbit/s.

    Args:
        network: the content of docs/benchmarks/network.json.

    Returns:
        The picture as SVG.
    """
    rows = {row["strategy"]: row for row in network["rows"] if row["bandwidth"] == "100mbit"}
    longest = max(rows[name]["seconds_to_target"] for name, _, _ in BARS)
    height = 72 + ROW * len(BARS) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="sans-serif" font-size="14"'
        ' role="img">',
        "<title>Seconds to 85 % test accuracy at 100 Mbit/s</title>",
        f'<rect width="720" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="28" font-size="17" font-weight="bold" fill="#1f2933">'
        "Seconds to 85 % test accuracy at 100 Mbit/s</text>",
        '<text x="16" y="50" fill="#52606d">'
        "Two emulated hosts, MLP of 1.86 million parameters, Fashion-MNIST, one seed</text>",
    ]
    for i, (name, label, colour) in enumerate(BARS):
        seconds, y = rows[name]["seconds_to_target"], 72 + ROW * i
        shown = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"
        star = "*" if rows[name].get("extrapolated") else ""
        width = max(2, round(FULL * seconds / longest))
        lines += [
            f'<text x="{LEFT - 12}" y="{y + 20}" text-anchor="end" fill="#1f2933">{label}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width}" height="30" fill="{colour}"/>',
            f'<text x="{LEFT + width + 8}" y="{y + 20}" font-weight="bold" fill="#1f2933">{shown} s{star}</text>',
        ]
    lines += [
        f'<text x="16" y="{height - 12}" font-size="12" fill="#52606d">'
        "* steps to 85 % times milliseconds a step. Figures: docs/benchmarks/network.json</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


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
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(seconds_to_85(json.loads((DOCS / "benchmarks" / "network.json").read_text())))
    SPLIT_PICTURE.write_text(split_bytes())
    SCALE_PICTURE.write_text(bytes_by_workers(json.loads((DOCS / "benchmarks" / "scale.json").read_text())))
