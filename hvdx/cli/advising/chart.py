"""The chart for choosing a strategy, as in docs/scaling.md, and the line that is true of a training and a link."""

import textwrap

from hvdx.costs.model import Situation
from hvdx.report.table import WIDTH

#: Conditions and choices, in the order in which they are tried. *x* is the time to transfer the gradients once, divided
#: by the time of computing a step.
CHART = (
    ("one worker is done soon enough, or a larger batch does not save steps", "none: train on one worker"),
    (
        "some workers are often slower than others",
        'ParameterServer("colocated"), or Threshold(max_staleness="inf")',
    ),
    ("x < 0.1", "AllReduce()"),
    ("x < 0.3", 'AllReduce(compression="bf16")'),
    ("computing takes more than 3 ms for each million parameters", "Threshold()"),
    (
        "the link carries the weights and the optimiser's state in the time of 100 steps",
        "ParameterAveraging(16)",
    ),
    ("none of these", "none: train on one worker, or on workers that are nearer to each other"),
)
# Lines that no measurement of one worker decides.
_OPEN = 2


def relative_transfer(situation: Situation) -> float:
    """Return *x* of the chart for the link between hosts."""
    return 4 * situation.elements / bandwidth(situation) / situation.computing


def chosen(situation: Situation) -> int:
    """Return the number of the first line that is true, of those that measurements decide, counted from 1.

    Example:
        >>> from hvdx.costs.types import Link
        >>> chosen(Situation(2, (1_000_000,), 0.1, Link(1e-4, 12e6)))
        5
    """
    x = relative_transfer(situation)
    state = 4 * situation.elements * (1 + situation.slots)
    measured = (
        x < 0.1,
        x < 0.3,
        situation.computing > 3e-9 * situation.elements,
        state / bandwidth(situation) < 100 * situation.computing,
        True,
    )
    return 1 + _OPEN + measured.index(True)


def text(situation: Situation) -> str:
    """Return the chart for a terminal, with a mark at the line that is chosen."""
    number = chosen(situation)
    head = (
        f"Chart of docs/scaling.md: x = {relative_transfer(situation):.2g}, and computing takes "
        f"{1e9 * situation.computing / situation.elements:.2g} ms for each million parameters. The first line that is "
        "true decides; lines 1 and 2 are yours to answer."
    )
    lines = [textwrap.fill(head, WIDTH)]
    for line, (condition, choice) in enumerate(CHART, 1):
        mark = "*" if line == number else " "
        lines.append(textwrap.fill(f"{mark} {line}  {condition} -> {choice}", WIDTH, subsequent_indent=" " * 5))
    return "\n".join(lines)


def bandwidth(situation: Situation) -> float:
    """Return the bytes per second between hosts, no faster than TCP on this machine."""
    return min(situation.link.bandwidth, situation.machine.transport)
