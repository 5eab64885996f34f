"""Test jobs of two tasks, started through the batch system and cancelled at a time limit."""

import contextlib
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvdx.cli.batch import site as site_file
from hvdx.cli.batch.systems import BatchSystem, SlurmSite, job_of
from hvdx.cli.batch.template import shell_words
from hvdx.cli.common.mpi_tools import Mpi, host_options, mpirun_command
from hvdx.cli.common.mpi_traffic import HOSTFILE
from hvdx.cli.common.processes import Outcome, child_environment, parse_reports, run

_MINUTES = 2  # the job's own time limit, short enough for a gap between larger jobs
_CANCEL_TIMEOUT = 30.0  # seconds
_STEP_TIMEOUT = 60.0  # seconds for a launch inside a job

# Each task prints one line, at its end. A task that MPI aborts prints none; its other output says why.
_TASK = """
import json, os, socket
seen = {"host": socket.gethostname(), "rank": None, "size": None, "library": "", "failure": ""}
try:
    from mpi4py import MPI
    seen.update(rank=MPI.COMM_WORLD.Get_rank(), size=MPI.COMM_WORLD.Get_size(),
                library=" ".join([MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1]))]))
except Exception as error:
    seen["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
os.write(1, ("HVDX " + json.dumps(seen) + "\\n").encode())
"""


@dataclass(frozen=True)
class Request:
    """Options of the test jobs.

    Attributes:
        account: account that is charged; "" for the user's default.
        partition: partition or queue; "" for the default.
        mpi: plugin for `srun --mpi`; "" for the choice of `choose_plugin`.
        nodes: number of nodes for the two tasks, 1 or 2.
        timeout: seconds for the waits in the queue and the runs of all jobs together.
    """

    account: str = ""
    partition: str = ""
    mpi: str = ""
    nodes: int = 2
    timeout: float = 300.0


@dataclass(frozen=True)
class Task:
    """Report of one task.

    Attributes:
        host: host name.
        rank, size: rank and world size; None if MPI did not start.
        library: MPI vendor and version.
        failure: the exception of the import of mpi4py; "" if it succeeded.
    """

    host: str
    rank: int | None
    size: int | None
    library: str = ""
    failure: str = ""


@dataclass(frozen=True)
class Attempt:
    """Result of one way to start two tasks.

    Attributes:
        way: name of the way, such as "srun --mpi=pmix" or "mpirun in a job".
        tasks: reports of the tasks, by rank.
        failure: reason of a failure; "" for exit code 0.
        queued: state of the job at the time limit, such as "PENDING (Priority)"; "" if it ended before or its state is
            not known.
        left: command that the user must run to cancel the job, if hvdx could not; else "".
    """

    way: str
    tasks: tuple[Task, ...] = ()
    failure: str = ""
    queued: str = ""
    left: str = ""


def request_from(environ: Mapping[str, str], request: Request, system: str = "slurm") -> Request:
    """Fill the empty options of a request from the variables of Slurm's commands, then from the site file.

    Args:
        environ: environment variables.
        request: the user's options, which take precedence.
        system: "slurm", "pbs" or "lsf"; only "slurm" reads the variables.

    Raises:
        ConfigError: if the site file cannot be read or is wrong.

    Example:
        >>> request_from({"SBATCH_ACCOUNT": "physics", "HVDX_SITE": os.devnull}, Request()).account
        'physics'
    """
    here = site_file.settings(system, environ)
    variables = environ if system == "slurm" else {}

    def first(*names: str) -> str:
        return next((variables[name] for name in names if variables.get(name)), "")

    return replace(
        request,
        account=request.account
        or first("SBATCH_ACCOUNT", "SLURM_ACCOUNT", "SALLOC_ACCOUNT")
        or here.get("account", ""),
        partition=request.partition
        or first("SBATCH_PARTITION", "SLURM_PARTITION", "SALLOC_PARTITION")
        or here.get("partition" if system == "slurm" else "queue", ""),
        mpi=request.mpi or first("SLURM_MPI_TYPE") or here.get("mpi_plugin", ""),
    )


def choose_plugin(wanted: str, site: SlurmSite) -> str:
    """Return the plugin to try: the wanted one, else pmix if srun has it, else "" for Slurm's default."""
    return wanted or ("pmix" if "pmix" in site.plugins else "")


def try_slurm(request: Request, site: SlurmSite, mpi: Mpi, say: Callable[[str], None]) -> list[Attempt]:
    """Start two tasks with srun, then two with mpirun inside a job."""
    end = time.monotonic() + request.timeout
    plugin = choose_plugin(request.mpi, site)
    flag = [f"--mpi={plugin}"] if plugin else []
    way = shlex.join(["srun", *flag])
    if job_of("Slurm"):
        srun = _run_here(way, ["srun", *flag, "-n", "2", f"--nodes={request.nodes}", *_task()], request, say)
        return [srun, *_mpirun_here("Slurm", mpi, request, say)]
    name = _job_name()
    options = _slurm_options(request, name)
    srun = _attempt_slurm(way, ["srun", *options, *flag, *_task()], name, end, say)
    # No second job if the first has used up the time.
    if mpi.mpirun is None or shutil.which("sbatch") is None or time.monotonic() > end:
        return [srun]
    with _shared_folder() as folder:
        out, name = folder / "out.txt", _job_name()
        script = _script(folder, _mpirun(mpi, request))
        options = [*_slurm_options(request, name), f"--output={out}", f"--chdir={folder}"]
        command = ["sbatch", "--wait", *options, str(script)]
        return [srun, _attempt_slurm("mpirun in a job", command, name, end, say, out)]


def try_pbs(request: Request, mpi: Mpi, say: Callable[[str], None]) -> list[Attempt]:
    """Start two tasks with mpirun inside a PBS job. Arguments as in `try_slurm`."""
    if job_of("PBS"):
        return _mpirun_here("PBS", mpi, request, say)
    if mpi.mpirun is None:
        return []
    with _shared_folder() as folder:
        out, name = folder / "out.txt", _job_name()
        tasks_a_node = 2 // request.nodes
        command = [
            "qsub", "-W", "block=true", "-V", "-N", name, "-j", "oe", "-o", str(out),
            "-l", f"select={request.nodes}:ncpus={tasks_a_node}:mpiprocs={tasks_a_node}",
            "-l", "place=scatter", "-l", f"walltime=00:{_MINUTES:02}:00",
            *(["-A", request.account] if request.account else []),
            *(["-q", request.partition] if request.partition else []),
            str(_script(folder, _mpirun(mpi, request, f"${HOSTFILE['PBS']}"))),
        ]  # fmt: skip
        return [_attempt("mpirun in a job", command, request.timeout, say, _cancel_pbs(name), out)]


def try_lsf(request: Request, system: BatchSystem, mpi: Mpi, say: Callable[[str], None]) -> list[Attempt]:
    """Start two tasks inside an LSF job, with jsrun if it exists, else with mpirun. Arguments as in `try_slurm`."""
    jsrun = "jsrun" in system.commands
    if job_of("LSF") and not jsrun:
        return _mpirun_here("LSF", mpi, request, say)
    if mpi.mpirun is None and not jsrun:
        return []
    way = "jsrun" if jsrun else "mpirun"
    launch = ["jsrun", "-n", "2", "-a", "1", "-c", "1"]
    if job_of("LSF"):
        return [_run_here(way, [*launch, *_task()], request, say)]
    launch = [*launch, "-r", str(2 // request.nodes)] if jsrun else _mpirun(mpi, request, f"${HOSTFILE['LSF']}")
    with _shared_folder() as folder:
        out, name = folder / "out.txt", _job_name()
        # With jsrun, LSF allocates whole nodes, and the request names their number.
        size = ["-nnodes", str(request.nodes)] if jsrun else ["-n", "2", "-R", f"span[ptile={2 // request.nodes}]"]
        command = [
            "bsub", "-K", "-J", name, *size, "-W", str(_MINUTES), "-o", str(out),
            *(["-P", request.account] if request.account else []),
            *(["-q", request.partition] if request.partition else []),
            str(_script(folder, launch)),
        ]  # fmt: skip
        return [_attempt(f"{way} in a job", command, request.timeout, say, _cancel_lsf(name), out)]


# --- parts of a command


def _task() -> list[str]:
    return [sys.executable, "-c", _TASK]


def _job_name() -> str:
    # PBS allows 15 characters.
    return f"hvdx-{secrets.token_hex(5)}"


def _slurm_options(request: Request, name: str) -> list[str]:
    return [
        f"--nodes={request.nodes}",
        "--ntasks=2",
        f"--ntasks-per-node={2 // request.nodes}",
        f"--time={_MINUTES}",
        f"--job-name={name}",
        *([f"--account={request.account}"] if request.account else []),
        *([f"--partition={request.partition}"] if request.partition else []),
    ]


def _mpirun(mpi: Mpi, request: Request, hostfile: str = "") -> list[str]:
    return [*mpirun_command(2, mpi), *host_options(mpi, 2 // request.nodes, hostfile)]


def _script(folder: Path, launch: list[str]) -> Path:
    """Write the script of a job that starts the tasks; the job's shell expands `$NAME` in `launch`."""
    path = folder / "job.sh"
    path.write_text(f"#!/bin/sh\n{shell_words(launch)} {shlex.join(_task())}\n")
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    """Yield a temporary folder for a script and its output, below the home folder, which compute nodes can see."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdx"
    home.mkdir(parents=True, exist_ok=True)
    # Slurm may keep the output open for a moment after a job was cancelled.
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=home, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# --- attempts


def _mpirun_here(system: str, mpi: Mpi, request: Request, say: Callable[[str], None]) -> list[Attempt]:
    if mpi.mpirun is None:
        return []
    hostfile = os.environ.get(HOSTFILE.get(system, ""), "")
    return [_run_here("mpirun", [*_mpirun(mpi, request, hostfile), *_task()], request, say)]


def _run_here(way: str, command: list[str], request: Request, say: Callable[[str], None]) -> Attempt:
    """Start two tasks in the job that this process runs in."""
    say(f"{way}: starting two tasks in this job")
    # Otherwise Intel MPI follows the job's task layout, and puts both tasks on the first host.
    environment = child_environment() | {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0"}
    done = run(command, min(_STEP_TIMEOUT, request.timeout), environment)
    return Attempt(way, tasks_in(done.text), "" if done.code == 0 else done.reason())


def _attempt_slurm(
    way: str, command: list[str], name: str, end: float, say: Callable[[str], None], out: Path | None = None
) -> Attempt:
    def cancel(_: str) -> tuple[str, str]:
        # By name, since a killed srun may not have printed the job's id.
        states = run(["squeue", "-h", f"--name={name}", "-o", "%T (%r)"], _CANCEL_TIMEOUT).out.strip()
        done = run(["scancel", f"--name={name}"], _CANCEL_TIMEOUT)
        return states.partition("\n")[0], "" if done.code == 0 else f"scancel --name={name}"

    return _attempt(way, command, max(1.0, end - time.monotonic()), say, cancel, out)


def _attempt(
    way: str,
    command: list[str],
    timeout: float,
    say: Callable[[str], None],
    cancel: Callable[[str], tuple[str, str]],
    out: Path | None = None,
) -> Attempt:
    """Run a command that waits for its job; cancel the job at the time limit or on an interrupt.

    Args:
        timeout: seconds.
        cancel: cancels the job, given the command's output; returns the job's last state, and the command that the user
            must run if cancelling failed ("" if it did not).
        out: file of the job's output; None if the command prints the output itself.
    """
    say(f"{way}: waiting for the batch system, {timeout:.0f} s at the most")
    written = ""
    try:
        done = run(command, timeout, child_environment())
        written = done.text
    except BaseException:
        cancel(written)
        raise
    queued = left = ""
    if done.timed_out:
        queued, left = cancel(written)
    text = written + ("" if out is None or done.timed_out else _output(out))
    failure = "" if done.code == 0 else done.reason()
    if out is not None and failure and not done.timed_out:
        # The job's output explains more than that of the command that waited for it.
        failure = Outcome(done.code, text).reason()
    return Attempt(way, tasks_in(text), failure, queued, left)


def _cancel_pbs(name: str) -> Callable[[str], tuple[str, str]]:
    def cancel(written: str) -> tuple[str, str]:
        # qsub prints the id at once, and then waits. After an interrupt its output is lost, so search by name.
        found = re.search(r"^\d\S*", written, re.MULTILINE)
        job = found.group() if found else run(["qselect", "-N", name], _CANCEL_TIMEOUT).out.strip()
        done = run(["qdel", job], _CANCEL_TIMEOUT)
        return "", "" if done.code == 0 else f"qdel {job or 'ID'}"

    return cancel


def _cancel_lsf(name: str) -> Callable[[str], tuple[str, str]]:
    def cancel(_: str) -> tuple[str, str]:
        done = run(["bkill", "-J", name], _CANCEL_TIMEOUT)
        return "", "" if done.code == 0 else f"bkill -J {name}"

    return cancel


def _output(out: Path) -> str:
    """Return the content of a job's output file. Wait up to 5 s, since a network file system may show it late."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            text = out.read_text(errors="replace")
            if text:
                return text
        time.sleep(0.2)
    return ""


def tasks_in(text: str) -> tuple[Task, ...]:
    """Read the tasks' reports from a job's output, sorted by rank and host.

    Example:
        >>> tasks_in('noise HVDX {"host": "a", "rank": 0, "size": 1}')
        (Task(host='a', rank=0, size=1, library='', failure=''),)
    """
    tasks = []
    for seen in parse_reports(text):
        with contextlib.suppress(TypeError):
            tasks.append(Task(**seen))
    return tuple(sorted(tasks, key=lambda task: (-1 if task.rank is None else task.rank, task.host)))
