"""Predictions of the cost model beside the measured steps of a comparison."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from hvdx.cli.advise import given_link
from hvdx.cli.advising import answer, machine, script
from hvdx.cli.comparing.plan import Plan, Single, write_whole
from hvdx.cli.run import parse_hosts
from hvdx.comm.launcher import usable_cores
from hvdx.costs.types import Link
from hvdx.errors import HvdxError
from hvdx.report.records import OUTCOME, read_outcome
from hvdx.strategies.registry import parse

# Seconds for the steps of the copies of the script.
_STEPS_SECONDS = 120.0


def add_predictions(plan: Plan, say: Callable[[str], None]) -> None:
    """Write the predicted seconds of a step into the outcome of each successful run with several workers.

    The script runs for some steps, as in `hvdx advise`: as many copies as share a machine, each alone. A failure is
    said, and leaves the outcomes as they are.

    Args:
        plan: the comparison, whose runs have ended.
        say: prints a line.
    """
    for workers in plan.workers:
        runs = [single for single in plan.runs() if single.workers == workers > 1 and _is_missing(plan, single)]
        if not runs:
            continue
        say(f"predicting the steps of {workers} workers, for the report\n")
        try:
            _add(plan, workers, runs)
        except (HvdxError, OSError) as error:
            say(f"no predictions: {error}\n")
            return


def _is_missing(plan: Plan, single: Single) -> bool:
    outcome = read_outcome(plan.folder(single))
    return outcome.get("exit_code") == 0 and "prediction" not in outcome


def _add(plan: Plan, workers: int, runs: list[Single]) -> None:
    hosts = parse_hosts(plan.hosts)
    # The hosts of the lab are on this machine, each with its own link.
    per_host = 1 if plan.bandwidths else -(-workers // len(hosts)) if hosts else workers
    copies = workers if plan.bandwidths else per_host
    with tempfile.TemporaryDirectory(prefix="hvdx-compare-") as folder:
        copied = script.run_copies(plan.program(0), Path(folder), copies, _STEPS_SECONDS)
    training = sorted(copied, key=lambda each: each.computing)[copies // 2]
    speeds = machine.measure(training.elements, copies)
    probed = machine.probe(list(hosts), training.elements) if len(hosts) > 1 else None
    for single in runs:
        link = given_link(single.bandwidth) if single.bandwidth else probed or Link(0.0, speeds.transport)
        situation = answer.situation_of(training, speeds, link, workers, per_host, usable_cores() / copies)
        predicted = parse(single.asked).predict(situation)
        found = None if predicted is None else {"ms": 1e3 * predicted.seconds, "terms": predicted.terms}
        place = plan.folder(single)
        write_whole(place / OUTCOME, read_outcome(place) | {"prediction": found})
