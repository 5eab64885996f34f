"""A report as text for the terminal."""

from collections.abc import Sequence

from hvdx.report.figures import duration, panel_of, results
from hvdx.report.overview import Overview
from hvdx.report.table import render

#: Character of each part of a step.
_CHARACTERS = {"computing": "#", "encoding": "e", "waiting": ".", "exchanging": "=", "decoding": "d", "other": "-"}
_WIDTH = 40
_LONGEST_NAME = 34


def text(overview: Overview, verdict: str) -> str:
    """Write a report as text.

    Returns:
        Lines without a trailing newline: the verdict, a table of the results, bars of the time of a step, and the runs
        that failed or are incomplete.
    """
    blocks = [verdict.strip()]
    if overview.groups:
        header, rows = results(overview)
        blocks.append(render(rows, header))
    for setting in overview.settings:
        found = panel_of(overview, setting)
        if found:
            legend = ", ".join(f"{mark} {part}" for part, mark in _CHARACTERS.items())
            blocks.append(f"time of a step, {setting} ({legend}):\n{stacked(found)}")
    if overview.troubles:
        lines = [
            f"  {t.strategy}, {t.setting}{f', seed {t.seed}' if t.seed else ''}: {t.reason}; see {t.log}"
            for t in overview.troubles
        ]
        blocks.append("\n".join(["failed or incomplete:", *lines]))
    return "\n\n".join(block for block in blocks if block)


def stacked(rows: Sequence[tuple[str, dict[str, float]]], width: int = _WIDTH) -> str:
    """Draw stacked bars of characters.

    Args:
        rows: name and parts of each bar; parts in seconds.
        width: length of the longest bar, in characters.

    Example:
        >>> print(stacked([("a", {"computing": 0.1, "waiting": 0.1}), ("b", {"computing": 0.05})], width=8))
        a  200 ms  ####....
        b   50 ms  ##
    """
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    cells = []
    for name, parts in rows:
        # Ends are rounded, not lengths, so that a bar is right as a whole.
        end, bar = 0.0, ""
        for part, seconds in parts.items():
            end += seconds
            bar += _CHARACTERS[part] * (round(width * end / longest) - len(bar))
        short = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
        cells.append((short, duration(sum(parts.values())), bar))
    names, times = max(len(name) for name, *_ in cells), max(len(time) for _, time, _ in cells)
    return "\n".join(f"{name:<{names}}  {time:>{times}}  {bar}".rstrip() for name, time, bar in cells)
