"""Histograms for the terminal."""

from collections.abc import Mapping

_MAX_ROWS = 16


def bars(counts: Mapping[int, int], width: int = 40) -> str:
    """Draw a histogram of integers.

    Args:
        counts: number of occurrences of each integer. If they span more than 16, adjacent integers share a bar.
        width: length of the longest bar, in characters.

    Returns:
        One line for each bar: the integers, their count and the bar; "" for empty `counts`.

    Example:
        >>> print(bars({1: 2, 2: 8, 4: 4}, width=8))
        1  2  ##
        2  8  ########
        3  0
        4  4  ####
    """
    if not counts:
        return ""
    first, last = min(counts), max(counts)
    step = -(-(last - first + 1) // _MAX_ROWS)
    rows = []
    for low in range(first, last + 1, step):
        high = min(low + step - 1, last)
        rows.append((f"{low}" if high == low else f"{low}-{high}", sum(counts.get(n, 0) for n in range(low, high + 1))))
    most = max(count for _, count in rows)
    names, numbers = max(len(name) for name, _ in rows), max(len(f"{count}") for _, count in rows)
    lines = []
    for name, count in rows:
        bar = "#" * max(round(width * count / most), int(count > 0))
        lines.append(f"{name:<{names}}  {count:>{numbers}}  {bar}".rstrip())
    return "\n".join(lines)
