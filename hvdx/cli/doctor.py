"""`hvdx doctor`: whether training on several workers would work here, and what to do where it would not."""

import argparse
import json
import os
import sys
import textwrap

from hvdx.cli import checks
from hvdx.cli.checks import Check
from hvdx.cli.mpi_tools import find_mpi
from hvdx.cli.probes import probe_all

NAME = "doctor"
HELP = "check TensorFlow, Keras, MPI, Horovod and this machine, with a remedy for each problem"
EXAMPLE = "hvdx doctor"
DETAILS = """\
Exit code 0: training would work (there may be warnings); 1: it would not.

"""

_COLOURS = {"ok": "\033[32m", "warning": "\033[33m", "problem": "\033[31m"}
_PLAIN = "\033[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run all checks and print them; 0 when training would work, 1 otherwise."""
    found = diagnose()
    ok = all(check.status != "problem" for check in found)
    if args.json:
        print(as_json(found))
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(as_table(found, colour))
    return 0 if ok else 1


def diagnose() -> list[Check]:
    """Run every check, in the order in which they are shown."""
    mpi = find_mpi()
    findings, (ranks, failure) = probe_all(mpi)
    frameworks, mpi4py = findings["frameworks"], findings["mpi4py"]
    return [
        *checks.software(frameworks, findings["numba"]),
        *checks.mpi4py(mpi4py),
        checks.mpirun(mpi, mpi4py),
        checks.two_ranks(ranks, failure),
        *checks.horovod(findings["horovod"], frameworks.facts.get("tensorflow", "")),
        checks.horovodrun(mpi),
        *checks.machine(frameworks),
    ]


def as_json(found: list[Check]) -> str:
    """All checks as one JSON document."""
    ok = all(check.status != "problem" for check in found)
    return json.dumps({"ok": ok, "checks": [check.as_dict() for check in found]}, indent=2)


def as_table(found: list[Check], colour: bool = False) -> str:
    """All checks as a table, each remedy below the line it belongs to, and a verdict."""
    width = max(len(check.name) for check in found)
    lines = []
    for check in found:
        status = f"{check.status:<8}"
        if colour:
            status = f"{_COLOURS[check.status]}{status}{_PLAIN}"
        lines.append(f"{status} {check.name:<{width}}  {check.value}")
        lines += textwrap.wrap(
            check.remedy, 100, initial_indent=" " * (width + 11) + "-> ", subsequent_indent=" " * (width + 14),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    problems = [check.name for check in found if check.status == "problem"]
    verdict = f"Training would not work yet: {', '.join(problems)}." if problems else "Ready to train."
    return "\n".join([*lines, "", verdict])
