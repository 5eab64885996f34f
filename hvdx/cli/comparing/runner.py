"""The runs of a comparison, one after the other; a run that has ended is not repeated."""

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hvdx.cli.advise import given_link
from hvdx.cli.advising import answer, machine, script
from hvdx.cli.common.options import parse_hosts
from hvdx.cli.common.processes import child_environment, exit_reason, key_line, kill_group, last_of
from hvdx.cli.comparing.plan import Plan, Single, write_whole
from hvdx.comm.launcher import usable_cores
from hvdx.costs.types import Link
from hvdx.errors import ConfigError, HvdxError, LaunchError
from hvdx.report.overview import METRICS, ONE_WORKER
from hvdx.report.records import OUTCOME, Run, read, read_outcome
from hvdx.strategies.registry import parse

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


# Seconds for the steps of the copies of the script.
_STEPS_SECONDS = 120.0


def add_predictions(plan: Plan, say: Callable[[str], None]) -> None:
    """Write the predicted seconds of a step into the outcome of each successful run with several workers.

    The script runs for some steps, as in `hvdx advise`: as many copies as share a machine, each alone. A failure is
    said, and leaves the outcomes as they are.
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
    probed = machine.probe(list(hosts), training.elements).link if len(hosts) > 1 else None
    for single in runs:
        link = given_link(single.bandwidth) if single.bandwidth else probed or Link(0.0, speeds.transport)
        situation = answer.situation_of(training, speeds, link, workers, per_host, usable_cores() / copies)
        predicted = parse(single.asked).predict(situation)
        found = None if predicted is None else {"ms": 1e3 * predicted.seconds, "terms": predicted.terms}
        place = plan.folder(single)
        write_whole(place / OUTCOME, read_outcome(place) | {"prediction": found})


_LOCK = ".lock"
_LOCK_SECONDS = 20.0
# Seconds until the records of all workers must be seen.
_SHARED_SECONDS = 20.0


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock the folder of a comparison; yield the lock's descriptor.

    A run that is ending after its comparison was killed holds the lock, so this waits some seconds.

    Raises:
        ConfigError: if another comparison runs in the folder, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise ConfigError(
            f"compare: --output: expected a folder that can be written, got {folder}: {error.strerror}. "
            "Do: choose another folder."
        ) from error
    try:
        end = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ConfigError(
                        f"compare: {folder}: expected a folder that no other comparison uses, got one that is in use. "
                        "Do: wait for its end, or choose another folder with --output."
                    ) from None
                time.sleep(0.2)
            except OSError as error:
                _say(f"hvdx compare: {folder} has no locks ({error.strerror}): start no other comparison there\n")
                break
        yield descriptor
    finally:
        os.close(descriptor)


def run_all(plan: Plan, made: dict[str, str], lock: int, retry: bool = False) -> int:
    """Run what has not ended yet.

    Args:
        made: for each strategy, the call that makes it.

    Returns:
        Number of runs that succeeded, earlier ones included.

    Raises:
        ConfigError: if the script does not record, names its own strategy, or lacks the metric of the target.
        LaunchError: if the script fails on one worker.
    """
    runs = plan.runs()
    todo = [single for single in runs if not _done(plan, single, retry)]
    good, seconds = len(runs) - len(todo), []
    good -= sum(bool(read_outcome(plan.folder(s)).get("exit_code")) for s in runs if s not in todo)
    if len(todo) < len(runs):
        _say(f"{len(runs) - len(todo)} of {len(runs)} runs have ended before; they are kept\n")
    for done, single in enumerate(todo, 1):
        head = f"{len(runs) - len(todo) + done} of {len(runs)}: {single} ... "
        _say(head if sys.stderr.isatty() else "")
        end = _run(plan, single, made, lock)
        seconds.append(end.seconds)
        left = sum(seconds) / len(seconds) * (len(todo) - done)
        text = f"failed: {end.reason}" if end.code else _metric(plan, single)
        rest = f"; about {_time(left)} left" if done < len(todo) else ""
        _say(f"{'' if sys.stderr.isatty() else head}{end.seconds:.0f} s, {text}{rest}\n")
        good += not end.code
    add_predictions(plan, _say)
    return good


def _done(plan: Plan, single: Single, retry: bool) -> bool:
    outcome = read_outcome(plan.folder(single))
    return bool(outcome) and not (retry and outcome.get("exit_code"))


def _run(plan: Plan, single: Single, made: dict[str, str], lock: int) -> End:
    folder = plan.folder(single)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        end = start(command(plan, single), environment(plan, single), folder, plan.timeout, lock)
    except OSError as error:
        raise LaunchError(f"compare: {folder}: {error}. Do: free space there, or choose another --output.") from error
    record = _record(folder)
    if end.code == 0:
        until = time.monotonic() + _SHARED_SECONDS
        while record and len(record.ranks) < record.size == single.workers and time.monotonic() < until:
            time.sleep(1)  # A network file system may show the files of other hosts late.
            record = _record(folder)
        _check_record(plan, single, record, made, folder)
    elif record is None and single.asked == ONE_WORKER and not any(folder.parent.glob(f"*/{OUTCOME}")):
        raise LaunchError(
            f"compare: expected the script to run on one worker, got: {end.reason} (exit code {end.code}). "
            f"Do: read {folder / LOG}; try the command alone."
        )
    outcome = {"asked": single.asked, "workers": single.workers, "bandwidth": single.bandwidth}
    outcome |= {"hosts": plan.hosts or None, "seed": single.seed, "exit_code": end.code, "reason": end.reason}
    write_whole(folder / OUTCOME, {**outcome, "seconds": end.seconds})
    return end


def _record(folder: Path) -> Run | None:
    try:
        return read(folder)[-1]
    except ConfigError:
        return None


def _check_record(plan: Plan, single: Single, record: Run | None, made: dict[str, str], folder: Path) -> None:
    if record is None:
        raise ConfigError(
            f"compare: {single}: expected a record of the training, got none: the script has no Distribute. "
            f"Do: add callbacks=[hvdx.keras.Distribute()] to model.fit(...). The script's output: {folder / LOG}"
        )
    if record.size != single.workers:
        raise ConfigError(
            f"compare: {single}: expected {single.workers} workers, got {record.size}. "
            "Do: compare without starting workers in the command itself; the launcher may belong to another MPI."
        )
    if len(record.ranks) < record.size:
        raise ConfigError(
            f"compare: {single}: expected records of {record.size} workers in {folder}, got {len(record.ranks)}. "
            "Do: --output in a folder that all hosts share."
        )
    found = str(record.header.get("strategy"))
    if single.workers > 1 and found != made[single.asked]:
        raise ConfigError(
            f"compare: {single}: expected the strategy {made[single.asked]}, got {found}: the script names its own. "
            "Do: write Distribute() without a strategy, so that HVDX_STRATEGY chooses it."
        )
    names = sorted({name for epoch in record.epochs for name in epoch.logs})
    if plan.target and plan.target[0] not in names:
        raise ConfigError(
            f"compare: --target: expected one of the metrics of the script ({', '.join(names) or 'it has none'}), "
            f"got {plan.target[0]}. Do: name one of them; those that begin with val_ need validation_data in fit."
        )


def _metric(plan: Plan, single: Single) -> str:
    record = _record(plan.folder(single))
    logs = record.epochs[-1].logs if record and record.epochs else {}
    wanted = [plan.target[0]] if plan.target else METRICS
    name = next((name for name in wanted if name in logs), None)
    if name is None:
        return "no metric"
    value = logs[name]
    return f"{name} {'nan' if value is None else f'{value:.4g}'}"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
