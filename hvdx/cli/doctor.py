"""`hvdx doctor`: check that training on several workers would work here, and print a remedy for each problem."""

import argparse
import json
import os
import sys
import textwrap
from dataclasses import replace

from hvdx.cli.batch.probe import Request, request_from, try_lsf, try_pbs, try_slurm
from hvdx.cli.batch.systems import SlurmSite, ask_slurm, find_batch_system, hosts_of_job, job_of
from hvdx.cli.common.mpi_tools import find_mpi
from hvdx.cli.diagnosis import checks
from hvdx.cli.diagnosis.checks import Check
from hvdx.cli.diagnosis.probes import probe_all
from hvdx.log import Log

_log = Log(__name__)

DETAILS = """\
Exit code 0: training would work (even if there are notes and warnings); 1: training would not work.

On the login node of a cluster, `hvdx doctor --batch` starts two tasks through Slurm, PBS or LSF and checks that they
see each other. Its jobs have a time limit of two minutes.

"""

_COLOURS = {"ok": "\033[32m", "note": "\033[36m", "warning": "\033[33m", "problem": "\033[31m"}
_PLAIN = "\033[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    defaults = Request()
    batch = parser.add_argument_group("check of a cluster's batch system")
    batch.add_argument(
        "--batch", action="store_true", help="check the batch system instead of this machine; submits short jobs"
    )
    batch.add_argument(
        "--batch-timeout", type=_seconds, default=defaults.timeout, metavar="SECONDS",
        help="time for all jobs, waiting in the queue included; then the job is cancelled (default: %(default).0f)",
    )  # fmt: skip
    batch.add_argument("--account", default="", metavar="NAME", help="account or project that is charged")
    batch.add_argument("--partition", default="", metavar="NAME", help="partition or queue")
    batch.add_argument(
        "--mpi", default="", metavar="NAME", help="plugin for srun --mpi (default: pmix, if srun has it)"
    )
    batch.add_argument(
        "--nodes", type=int, choices=(1, 2), default=defaults.nodes,
        help="number of nodes for the two tasks (default: %(default)s)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run all checks and print them. Return 0 if training would work, else 1."""
    if args.batch:
        request = Request(args.account, args.partition, args.mpi, args.nodes, args.batch_timeout)
        found = diagnose_batch(request)
    else:
        found = diagnose()
    ok = all(check.status != "problem" for check in found)
    if args.json:
        print(as_json(found))
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(as_table(found, colour))
    return 0 if ok else 1


def diagnose() -> list[Check]:
    """Run every check of this machine, in the order of the table."""
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


def diagnose_batch(request: Request) -> list[Check]:
    """Find the batch system, start two tasks through it, and return the checks in the order of the table.

    Args:
        request: the user's options; empty ones are filled from the environment and the site file.
    """
    system = find_batch_system()
    if system is None:
        return [checks.batch_system(None)]
    if system.failure:
        return [checks.batch_system(system)]
    request, mpi = request_from(os.environ, request, system.name.lower()), find_mpi()
    job = job_of(system.name)
    if job:
        request = replace(request, nodes=min(request.nodes, hosts_of_job(system.name)))
    found = [checks.batch_system(system), checks.allocation(system.name, job)]
    if system.name == "Slurm":
        site = ask_slurm()
        found += [checks.default_partition(site, request), checks.srun_plugins(site)]
        attempts = try_slurm(request, site, mpi, _say) if "srun" in system.commands else []
    else:
        site = SlurmSite()
        attempts = try_pbs(request, mpi, _say) if system.name == "PBS" else try_lsf(request, system, mpi, _say)
    return [*found, *checks.ways(attempts, request, site, mpi)]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text}")
    return seconds


def _say(line: str) -> None:
    _log.info(line, head="hvdx doctor: ")


def as_json(found: list[Check]) -> str:
    """Return all checks as one JSON document."""
    ok = all(check.status != "problem" for check in found)
    return json.dumps({"ok": ok, "checks": [check.as_dict() for check in found]}, indent=2)


def as_table(found: list[Check], colour: bool = False) -> str:
    """Return all checks as a table, with each remedy below its check, and a last line with the result."""
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
    result = f"Training would not work yet: {', '.join(problems)}." if problems else "Ready to train."
    return "\n".join([*lines, "", result])
