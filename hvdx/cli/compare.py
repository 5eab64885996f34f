"""`hvdx compare`: the same script under several strategies, and a verdict."""

import argparse
import shlex
from importlib.util import find_spec
from pathlib import Path

from hvdx.cli.common.termination import TERMINATED, TerminatedError, sigterm_raises
from hvdx.errors import ConfigError, LaunchError
from hvdx.foreign import printable
from hvdx.log import Log

_log = Log(__name__)

DETAILS = """\
The script stays as it is; it needs the callback hvdx.keras.Distribute(), without a strategy. Each run has its record,
its log and its outcome in DIR/runs. At the end the command prints which strategy trains fastest, which one reaches the
highest accuracy, in a given time and in a given number of epochs, and whether one worker does as well. It names no
winner if noise explains the difference, and writes the page DIR/report.html.

  hvdx compare --bandwidth 10mbit,1gbit -n 1,2 -- python train.py     emulated hosts with slow and fast links
  hvdx compare --strategies "all_reduce;threshold:density=0.01" -- python train.py
                                                                      strategies of your choice
  hvdx compare --hosts node1:2,node2:2 -- python train.py             two machines that ssh reaches
  hvdx compare --epochs 2 --seeds 3 -- python train.py --seed {seed}  short runs; the seed as an argument

If the command is interrupted, the same command goes on after the last run that ended. Exit code 0: there is a verdict;
1: all runs failed; 2: an error. `hvdx advise` predicts times in two minutes, without training. See docs/compare.md.

"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "hvdx compare [options] -- COMMAND [ARGUMENT ...]"
    add = parser.add_argument
    add(
        "--strategies", metavar="A;B;...", help="strategies as in HVDX_STRATEGY, joined by ; (default: five usual ones)"
    )
    add("-n", dest="workers", metavar="N,N,...", help="numbers of workers (default: 1,2, or 1 and the sum of --hosts)")
    add("--bandwidth", metavar="RATE,...", help="run in `hvdx lab`, with links of these rates: 10mbit,100mbit,1gbit")
    add("--hosts", metavar="HOST:N,...", help="hosts with their numbers of workers, as for `hvdx run`")
    add("--launcher", metavar="TEXT", help="another launcher, such as 'srun --mpi=pmi2 -n {n}'")
    add(
        "--seeds",
        type=int,
        default=3,
        metavar="K",
        help="seeds of each strategy (default: 3, the fewest for a verdict)",
    )
    add("--target", metavar="METRIC=VALUE", help="also compare the time until a metric reaches a value")
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument("--epochs", type=int, metavar="E", help="end each training after E epochs")
    limits.add_argument(
        "--minutes", type=float, metavar="T", help="end each training at the first epoch after T minutes"
    )
    add("--threads", type=int, default=1, metavar="K", help="compute threads of each host of the lab (default: 1)")
    add("--timeout", type=float, default=3600.0, metavar="SECONDS", help="time limit of each run (default: 3600)")
    add("--output", type=Path, default=Path("comparison"), metavar="DIR", help="folder (default: comparison)")
    add("--retry", action="store_true", help="repeat the runs that failed")
    add("--dry-run", action="store_true", help="list the runs, and start nothing")
    add("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="command of every worker; {seed} is its seed")


def run(args: argparse.Namespace) -> int:
    """Run the script under each strategy, and print the verdict."""
    from hvdx.cli.comparing.plan import check, plan_of, store
    from hvdx.cli.comparing.runner import locked, run_all

    plan = plan_of(args)
    made = check(plan)
    if args.dry_run:
        print("\n".join(map(str, plan.runs())))
        return 0
    if plan.bandwidths:
        _check_lab()
    _announce_page()
    try:
        with sigterm_raises(), locked(plan.output) as lock:
            store(plan)
            good = run_all(plan, made, lock, args.retry)
    except (KeyboardInterrupt, TerminatedError) as cause:
        _log.error(f"interrupted; runs that ended are kept. To go on: {plan.words}", head="\nhvdx compare: ")
        return TERMINATED if isinstance(cause, TerminatedError) else 130
    _report(plan.output)
    return 0 if good else 1


def _check_lab() -> None:
    from hvdx.cli.emulation.namespaces import obstacle

    reason = obstacle()
    if reason:
        raise LaunchError(f"compare: --bandwidth: {reason}.")


def _announce_page() -> None:
    """Say before the first run that there will be no page, because the packages that draw it are missing."""
    from hvdx.report.charts import INSTALL, PACKAGES

    absent = [package for package in PACKAGES if find_spec(package) is None]
    if absent:
        _log.warning(
            f"the verdict will have no page, because {' and '.join(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} not installed. Do: {INSTALL}",
            head="hvdx compare: ",
        )


def _report(folder: Path) -> None:
    """Print the verdict; write the page if the libraries of charts are there."""
    from hvdx.report import page, report_file
    from hvdx.report.overview import load
    from hvdx.report.text import text
    from hvdx.report.verdict import judge

    overview = load([folder])
    verdict = judge(overview.runs, overview.target, overview.troubles)
    print(printable(text(overview, verdict.text())), flush=True)
    path = folder / "report.html"
    try:
        report_file.write(page.render(overview, verdict, folder.resolve().name), path, page.KIND)
    except ConfigError as error:
        _log.warning(f"no page: {error} Then: hvdx report {shlex.quote(str(folder))}", head="hvdx compare: ")
    else:
        print(f"\npage: {path}")
