"""Outcome of a test on every rank."""

import os

import pytest

from hvdx import comm as world


def of_all_ranks(item: pytest.Item, report: pytest.TestReport, said: str = "") -> list[tuple[str, str, str]]:
    """Return the test, the outcome and a text of each rank; end the launch if the ranks are in different tests.

    Collective if this process has joined other ranks.

    Args:
        item: the test.
        report: report of its call on this rank.
        said: text of this rank.
    """
    joined, mine = world.current(), (item.nodeid, report.outcome, said)
    if joined is None or joined.size == 1:
        return [mine]
    everyone = joined.all_gather_object(mine, "outcome of a test")
    if any(not isinstance(other, tuple) or other[0] != item.nodeid for other in everyone):
        print(f"the ranks are in different tests: {everyone}\n{report.longreprtext}", flush=True)
        os._exit(3)
    return everyone
