"""The runs of a comparison, one after the other; a run that has ended is not repeated."""

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdx.cli.comparing.launch import LOG, End, command, environment, start
from hvdx.cli.comparing.plan import Plan, Single, write_whole
from hvdx.cli.comparing.predicting import add_predictions
from hvdx.errors import ConfigError, LaunchError
from hvdx.report.overview import METRICS, ONE_WORKER
from hvdx.report.records import OUTCOME, Run, read, read_outcome

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
        plan: the comparison.
        made: for each strategy, the call that makes it.
        lock: descriptor of the lock.
        retry: also repeat failed runs.

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
