"""Tables for the terminal."""

from collections.abc import Sequence

from hvdx.foreign import printable

#: Columns of a terminal.
WIDTH = 80


def render(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Lay out cells in columns.

    Args:
        rows: cells, row by row; all rows have the same length.
        header: column titles; none by default.

    Returns:
        Lines without a trailing newline. The first column is aligned left, the others right.

    Example:
        >>> print(render([["a", "1"], ["bc", "20"]]))
        a    1
        bc  20
    """
    lines = [list(map(printable, line)) for line in [*[header] * bool(header), *rows]]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    if header:
        text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def fitted(rows: Sequence[Sequence[str]], header: Sequence[str], width: int = WIDTH) -> str:
    """Lay out cells in columns; if they are too wide together, in several tables with the first column repeated.

    Args:
        rows: cells, row by row.
        header: column titles.
        width: largest length of a line; a table of two columns may be longer.

    Example:
        >>> print(fitted([["a", "1", "2"]], ["name", "one", "two"], width=10))
        name  one
        ----  ---
        a       1
        <BLANKLINE>
        name  two
        ----  ---
        a       2
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    tables, used = [[0]], widths[0]
    for column in range(1, len(widths)):
        if len(tables[-1]) > 1 and used + 2 + widths[column] > width:
            tables.append([0])
            used = widths[0]
        tables[-1].append(column)
        used += 2 + widths[column]
    return "\n\n".join(render([[row[i] for i in t] for row in rows], [header[i] for i in t]) for t in tables)


def quantity(value: float, unit: str) -> str:
    """Format a number with a decimal prefix.

    Example:
        >>> quantity(7_470_000, "B")
        '7.47 MB'
    """
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
