"""Pictures of the documentation, drawn from the figures in docs/benchmarks.

python docs/make_pictures.py
"""

import json
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


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(seconds_to_85(json.loads((DOCS / "benchmarks" / "network.json").read_text())))
