"""What a job of two tasks sees: started through the batch system, waited for so long, and cancelled after that."""

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
from hvdx.cli.batch.systems import HOSTFILE, BatchSystem, SlurmSite, job_of
from hvdx.cli.batch.template import shell_words
from hvdx.cli.common.mpi_tools import Mpi, host_options, mpirun_command
from hvdx.cli.common.processes import Outcome, child_environment, parse_reports, run

_MINUTES = 2  # the job's own time limit, short enough for a gap between larger jobs
_CANCEL_TIMEOUT = 30.0  # seconds
_STEP_TIMEOUT = 60.0  # seconds for a launch that has its nodes already

# One line a task, told at its end: a task that MPI ends tells nothing, and what it wrote says why.
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
    """What is asked of the batch system.

    Attributes:
        account: whom it is booked on; "" for the user's default.
        partition: partition or queue; "" for the default.
        mpi: the plugin for `srun --mpi`; "" chooses.
        nodes: over how many the two tasks are spread, 1 or 2.
        timeout: seconds for the wait in the queue and the run, all jobs together.
    """

    account: str = ""
    partition: str = ""
    mpi: str = ""
    nodes: int = 2
    timeout: float = 300.0


@dataclass(frozen=True)
class Task:
    """What one task saw.

    Attributes:
        host: its host name.
        rank, size: its rank and its world's size; None where MPI did not come up.
        library: MPI vendor and version.
        failure: why mpi4py did not import; "" where it did.
    """

    host: str
    rank: int | None
    size: int | None
    library: str = ""
    failure: str = ""


@dataclass(frozen=True)
class Attempt:
    """One way to start two tasks, and what came of it.

    Attributes:
        way: "srun --mpi=pmix", "mpirun in a job", ...
        tasks: what they told, by rank.
        failure: why it failed; "" for exit code 0.
        queued: the job's state when the time was over, such as "PENDING (Priority)"; "" when it was not.
        left: the command that cancels a job that could not be cancelled; "" where there is none.
    """

    way: str
    tasks: tuple[Task, ...] = ()
    failure: str = ""
    queued: str = ""
    left: str = ""


def request_from(environ: Mapping[str, str], request: Request, system: str = "slurm") -> Request:
    """Fill what a request leaves open from the variables that Slurm's commands read, then from the site file.

    Args:
        environ: the environment.
        request: what the user asked for, which comes first.
        system: "slurm", "pbs" or "lsf".

    Raises:
        ConfigError: the site file cannot be read.

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
    """The plugin to try: the wanted one, else pmix where srun has it, else "" for Slurm's default."""
    return wanted or ("pmix" if "pmix" in site.plugins else "")


def try_slurm(request: Request, site: SlurmSite, mpi: Mpi, say: Callable[[str], None]) -> list[Attempt]:
    """Start two tasks with srun, from here, and with mpirun inside a job.

    Args:
        request: account, partition, plugin, nodes, time.
        site: what `ask_slurm()` found.
        mpi: what `find_mpi()` found.
        say: told what is being waited for.
    """
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
    # No second wait in a queue that has taken all the time there is.
    if mpi.mpirun is None or shutil.which("sbatch") is None or time.monotonic() > end:
        return [srun]
    with _shared_folder() as folder:
        out, name = folder / "out.txt", _job_name()
        script = _script(folder, _mpirun(mpi, request))
        options = [*_slurm_options(request, name), f"--output={out}", f"--chdir={folder}"]
        command = ["sbatch", "--wait", *options, str(script)]
        return [srun, _attempt_slurm("mpirun in a job", command, name, end, say, out)]


def try_pbs(request: Request, mpi: Mpi, say: Callable[[str], None]) -> list[Attempt]:
    """Start two tasks with mpirun inside a PBS job; arguments as `try_slurm`."""
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
    """Start two tasks inside an LSF job, with jsrun where it is, else with mpirun; arguments as `try_slurm`."""
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
        # Where jsrun is, whole nodes are given out, and asked for by their number.
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
    # PBS takes 15 characters.
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
    """A job that starts the tasks; `$NAME` in `launch` is left for the job to fill in."""
    path = folder / "job.sh"
    path.write_text(f"#!/bin/sh\n{shell_words(launch)} {shlex.join(_task())}\n")
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    """A folder for a script and its output, below the home folder: on a cluster its nodes see that too."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdx"
    home.mkdir(parents=True, exist_ok=True)
    # Slurm may hold the output open for a moment after it has cancelled a job.
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=home, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# --- attempts


def _mpirun_here(system: str, mpi: Mpi, request: Request, say: Callable[[str], None]) -> list[Attempt]:
    if mpi.mpirun is None:
        return []
    hostfile = os.environ.get(HOSTFILE.get(system, ""), "")
    return [_run_here("mpirun", [*_mpirun(mpi, request, hostfile), *_task()], request, say)]


def _run_here(way: str, command: list[str], request: Request, say: Callable[[str], None]) -> Attempt:
    """Inside a job already: no queue."""
    say(f"{way}: starting two tasks in this job")
    # Intel MPI would follow the job's own tasks on each host, and put both on the first.
    environment = child_environment() | {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0"}
    done = run(command, min(_STEP_TIMEOUT, request.timeout), environment)
    return Attempt(way, tasks_in(done.text), "" if done.code == 0 else done.reason())


def _attempt_slurm(
    way: str, command: list[str], name: str, end: float, say: Callable[[str], None], out: Path | None = None
) -> Attempt:
    def cancel(_: str) -> tuple[str, str]:
        # By name: an srun that was killed may have told no id.
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
    """Run a command that waits for its job, and cancel the job when the time is over or the user has enough.

    Args:
        way: what to call it.
        command: the command.
        timeout: seconds.
        say: told what is being waited for.
        cancel: given what the command wrote, cancels the job; returns its state before, and the command that the user
            has to give where it failed ("" otherwise).
        out: the file that the job's output goes to; None where the command passes it on.
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
        # The job's own words say more than those of the command that waited for it.
        failure = Outcome(done.code, text).reason()
    return Attempt(way, tasks_in(text), failure, queued, left)


def _cancel_pbs(name: str) -> Callable[[str], tuple[str, str]]:
    def cancel(written: str) -> tuple[str, str]:
        # qsub writes the id at once, and then waits; what an interrupted one wrote is lost.
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
    """What a job wrote into its file, which a network file system may show a moment late."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            text = out.read_text(errors="replace")
            if text:
                return text
        time.sleep(0.2)
    return ""


def tasks_in(text: str) -> tuple[Task, ...]:
    """Collect what the tasks told out of a job's output, by rank and host.

    Example:
        >>> tasks_in('noise HVDX {"host": "a", "rank": 0, "size": 1}')
        (Task(host='a', rank=0, size=1, library='', failure=''),)
    """
    tasks = []
    for seen in parse_reports(text):
        with contextlib.suppress(TypeError):
            tasks.append(Task(**seen))
    return tuple(sorted(tasks, key=lambda task: (-1 if task.rank is None else task.rank, task.host)))
