"""Start of one run: its command, its environment, and its end within a time limit."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdx.cli.common.processes import child_environment, exit_reason, key_line, kill_group, last_of
from hvdx.cli.comparing.plan import Plan, Single
from hvdx.cli.run import parse_hosts

#: Output of a run, in its folder.
LOG = "log.txt"
#: Figures of the lab, in the folder of a run.
LAB = "lab.json"
#: Exit code of a run that reached its time limit, as of timeout(1).
OUT_OF_TIME = 124

_GUARD = Path(__file__).with_name("guard.py")
# Seconds that a launcher has to end its ranks; the lab needs more than its own grace of 5 s.
_GRACE = 12.0


@dataclass(frozen=True)
class End:
    """End of a run.

    Attributes:
        code: exit code.
        seconds: wall time.
        reason: why it failed, in one line; "" if it did not.
    """

    code: int
    seconds: float
    reason: str


def command(plan: Plan, single: Single, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the command that starts all workers of a run.

    The lab, hosts and a launcher of the user are taken if they are asked for. Otherwise srun starts several workers in
    a Slurm job, and mpirun elsewhere; one worker starts without them, and without the lab.

    Args:
        plan: the comparison.
        single: the run.
        environ: environment variables; those of this process by default.
    """
    environ = os.environ if environ is None else environ
    program, hvdx = plan.program(single.seed), [sys.executable, "-m", "hvdx"]
    workers = str(single.workers)
    if single.workers == 1 and not plan.hosts and not plan.launcher:
        return program
    if single.bandwidth:
        lab = ["lab", "-n", workers, "--bandwidth", single.bandwidth, "--threads", str(plan.threads)]
        return [*hvdx, *lab, "--json", str(plan.folder(single) / LAB), "--", *program]
    if plan.hosts:
        return [*hvdx, "run", "--hosts", spread(plan.hosts, single.workers), "--", *program]
    if plan.launcher:
        return [*(word.replace("{n}", workers) for word in shlex.split(plan.launcher)), *program]
    if environ.get("SLURM_JOB_ID") and shutil.which("srun"):
        return ["srun", "--mpi=pmix", "--kill-on-bad-exit=1", "-n", workers, *program]
    return [*hvdx, "run", "-n", workers, "--", *program]


def spread(hosts: str, workers: int) -> str:
    """Return the hosts for some workers: as many hosts as possible, because the network is to be compared as well.

    Args:
        hosts: hosts with their room, as in --hosts.
        workers: number of workers, for whom there is room.

    Example:
        >>> spread("a:2,b:2", 2)
        'a:1,b:1'
    """
    room = parse_hosts(hosts)
    used = dict.fromkeys(room, 0)
    for _ in range(workers):
        used[min((host for host in room if used[host] < room[host]), key=lambda host: used[host])] += 1
    return ",".join(f"{host}:{count}" for host, count in used.items() if count)


def environment(plan: Plan, single: Single) -> dict[str, str]:
    """Return the environment of a run."""
    chosen = {"HVDX_RECORD": str(plan.folder(single)), "HVDX_SEED": str(single.seed)}
    if single.workers > 1:
        chosen["HVDX_STRATEGY"] = single.asked
    if plan.limit:
        chosen["HVDX_LIMIT"] = plan.limit
    if plan.bandwidths and single.workers == 1:
        # As many threads as a host of the lab has.
        names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        chosen |= dict.fromkeys(names, str(plan.threads))
    # SLURM_EXPORT_ENV would keep srun from passing these variables on.
    dropped = ("HVDX_RECORD", "HVDX_SEED", "HVDX_STRATEGY", "HVDX_LIMIT", "SLURM_EXPORT_ENV")
    return {k: v for k, v in child_environment(PYTHONUNBUFFERED="1").items() if k not in dropped} | chosen


def start(words: Sequence[str], env: Mapping[str, str], folder: Path, timeout: float, lock: int) -> End:
    """Run a command to its end, and end it at the time limit or if this process is interrupted or killed.

    Args:
        words: the command.
        env: its environment.
        folder: folder of the run, where its output becomes log.txt.
        timeout: seconds.
        lock: descriptor that stays open until the command has ended.
    """
    guard = [sys.executable, "-I", "-S", str(_GUARD), str(_GRACE), *words]
    began = time.monotonic()
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            guard,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )
        try:
            code, reason = process.wait(timeout), ""
        except subprocess.TimeoutExpired:
            code, reason = OUT_OF_TIME, f"it reached the time limit of {timeout:g} s"
        finally:
            _end(process)
    if code and not reason:
        reason = key_line(last_of(folder / LOG)) or exit_reason(code)
    return End(code, time.monotonic() - began, reason)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a guard that may be running, and with it the run."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_GRACE + 3)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # After a second Ctrl-C, too; and children that the command left behind.
        kill_group(process)
        process.wait()
