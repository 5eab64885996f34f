"""`hvdx run`: start a program on several ranks, with what its launcher needs to be told."""

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdx.cli.common.mpi_tools import HANDED_ON, HANDED_ON_PREFIXES, Mpi, find_mpi, mpirun_command
from hvdx.cli.common.processes import program_of, search_path
from hvdx.errors import LaunchError

NAME = "run"
HELP = "start a script on several workers"
EXAMPLE = "hvdx run -n 4 python train.py"
DETAILS = """\
It calls the mpirun beside this Python or on PATH, with the options for root, for more workers than cores and against
binding a worker to one core. Each worker gets its share of the cores and the variables HVDX_*. The exit code is that of
the job.

  hvdx run -n 4 python train.py                        on this machine
  hvdx run --hosts node1:2,node2:2 python train.py     two workers on each of two machines, which ssh reaches
  hvdx run -n 2 --dry-run python train.py              print the command, to change it or to learn from it
  HVDX_STRATEGY=threshold hvdx run -n 4 python train.py

What the first worker prints is shown, and what the others write to standard error; --all shows everything. On a
cluster with a batch system see `hvdx job`.

"""

_RANK = Path(__file__).with_name("common") / "rank.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("-n", type=int, metavar="N", help="workers; with --hosts by default as many as it names")
    parser.add_argument("--hosts", metavar="HOST:N,...", help="machines, and how many workers on each (1 by default)")
    parser.add_argument("--dry-run", action="store_true", help="print the command, and start nothing")
    parser.add_argument("--all", action="store_true", help="show what all workers print")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ...", help="the command of one worker")


def run(args: argparse.Namespace) -> int:
    """Start the ranks; the exit code of the job.

    Raises:
        LaunchError: no launcher, no program, or hosts that cannot be read.
    """
    words = program_of(args.program)
    if not words:
        raise LaunchError(f"run: expected a program after the options, got none. For example: {EXAMPLE}")
    hosts = _hosts(args.hosts)
    workers = args.n if args.n is not None else sum(hosts.values())
    if workers < 1:
        raise LaunchError(f"run: expected -n N, 1 worker or more, or --hosts. For example: {EXAMPLE}")
    if hosts and workers > sum(hosts.values()):
        raise LaunchError(f"run: -n {workers}: --hosts has room for {sum(hosts.values())}. Give each more, HOST:N.")
    mpi = find_mpi()
    rank = [sys.executable, "-I", "-S", str(_RANK), "all" if args.all else "first"]
    command = [*mpirun_command(workers, mpi), *_host_options(mpi, hosts), *rank, *_found(words)]
    if args.dry_run:
        print(shlex.join(command))
        return 0
    sys.stdout.flush()
    os.environ["PATH"] = search_path()
    # Signals, the terminal and the exit code are the launcher's from here on.
    return os.execv(command[0], command)


def _hosts(text: str | None) -> dict[str, int]:
    """ "a:2,b" as {"a": 2, "b": 1}."""
    hosts: dict[str, int] = {}
    for part in filter(None, (text or "").split(",")):
        match = re.fullmatch(r"([\w.-]+)(?::(\d+))?", part.strip())
        if match is None or match.group(2) == "0":
            raise LaunchError(f"run: --hosts: expected HOST:N,HOST:N with N of 1 or more, got {part.strip()!r}.")
        hosts[match.group(1)] = hosts.get(match.group(1), 0) + int(match.group(2) or 1)
    return hosts


def _host_options(mpi: Mpi, hosts: dict[str, int]) -> list[str]:
    if not hosts:
        return []
    listed = ",".join(f"{host}:{count}" for host, count in hosts.items())
    if mpi.launcher_vendor != "Open MPI":
        return ["-hosts", listed]
    handed_on = sorted(name for name in os.environ if name in HANDED_ON or name.startswith(HANDED_ON_PREFIXES))
    return ["--host", listed, *(word for name in handed_on for word in ("-x", name))]


def _found(words: Sequence[str]) -> list[str]:
    """The program by its path, since a name on this PATH, such as an environment's python, need not be on another."""
    path = shutil.which(words[0], path=search_path())
    if path is None:
        raise LaunchError(f"run: {words[0]}: not found. Is it spelt right, and executable?")
    return [path, *words[1:]]
