"""The restarts of a job after failures: when, on which hosts, and what the user is told."""

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdx.cli.common.processes import exit_reason, key_line, signal_name
from hvdx.cli.common.reachable import absent_hosts
from hvdx.cli.supervising.attempt import Attempt, Signals, code_after, run_attempt
from hvdx.comm import supervision
from hvdx.comm.preemption import REQUEUE_CODE
from hvdx.log import Log

_log = Log(__name__)

# Codes of a command line that was wrong (argparse, shells), or of a program that cannot be started.
_USAGE_CODES = (2, 126, 127)
_FINAL_ERRORS = ("ConfigError", "LaunchError", "KeyboardInterrupt")


@dataclass(frozen=True)
class Failure:
    """End of a job that failed.

    Attributes:
        reason: error, signal or exit code.
        rank, host: rank that failed and name of its host; "" if unknown.
    """

    reason: str
    rank: str = ""
    host: str = ""

    def __str__(self) -> str:
        who = f"rank {self.rank}" * bool(self.rank) + " on " * bool(self.rank and self.host) + self.host
        return f"{who}: {self.reason}" if who else self.reason

    def same_as(self, other: "Failure | None") -> bool:
        """Return whether the reasons differ in numbers only, such as those of processes."""
        return other is not None and re.sub(r"\d+", "#", self.reason) == re.sub(r"\d+", "#", other.reason)


# The first of these in an output says what happened; the others follow from it. Launchers break their messages into
# lines; those of hvdx are one line.
_PATTERNS = (
    # hvdx: comm/failure.py, comm/watchdog.py
    r"hvdx: rank (?P<rank>\d+) of \d+ on (?P<host>\S+) failed; (?:ending the job on all ranks|the others go on): "
    r"(?P<reason>.*)",
    r"hvdx: rank (?P<rank>\d+) of \d+ on (?P<host>\S+) ended(?:: (?P<reason>.*?))?, and the others cannot continue",
    r"hvdx: (?P<reason>\w+Error: .*)",
    # hvdx: cli/supervising/attempt.py
    r"hvdx: host (?P<host>\S+) is lost: (?P<reason>.*)",
    r"hvdx: rank (?P<rank>\d+) on (?P<host>\S+) died (?:after the last exchange|before it had joined the others): "
    r"(?P<reason>.*)",
    # Open MPI: help-prun.txt, help-errmgr-base.txt
    r"process\s+rank\s+(?P<rank>\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(?P<host>\S+)\s+exited\s+on\s+"
    r"signal\s+(?P<signal>\d+)",
    r"process\s+rank\s+(?P<rank>\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(?P<host>\S+)\s+exiting\s+improperly",
    r"Process name:\s+\[\S+,(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)",
    r"(?P<lost>lost communication with a remote daemon)\.(?:.*\n)*?\s*Remote daemon: .* on node (?P<host>\S+)",
    # MPICH and Intel MPI: Hydra
    r"BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\s+=\s+(?:RANK (?P<rank>\d+) )?PID \d+ RUNNING AT "
    r"(?P<host>\S+)\s+=\s+(?:KILLED BY SIGNAL: (?P<signal>\d+)|EXIT (?:CODE|STATUS): (?P<code>\d+))",
)


def find_failure(text: str, code: int) -> Failure | None:
    """Find what ended a job.

    Args:
        text: end of its output.

    Returns:
        The failure; None for a job that succeeded. Open MPI ends with 0 after it has lost a host; that is a failure.

    Example:
        >>> print(find_failure("hvdx: rank 1 of 2 on b failed; ending the job on all ranks: ValueError: no image", 1))
        rank 1 on b: ValueError: no image
    """
    matches = [match for match in (re.search(pattern, text) for pattern in _PATTERNS) if match]
    found = min(matches, key=lambda match: match.start(), default=None)
    values = {} if found is None else found.groupdict()
    if code == 0 and not any("lost" in match.groupdict() for match in matches):
        return None
    if found is None:
        line = "" if code < 0 else key_line(text)
        return Failure(line if "Error" in line or "error:" in line else exit_reason(code))
    reason = (values.get("reason") or "").strip().rstrip(".")
    if values.get("signal"):
        reason = f"killed by {signal_name(int(values['signal']))}"
    elif values.get("code"):
        reason = exit_reason(int(values["code"]))
    elif values.get("lost"):
        reason = "the launcher has lost the host"
    return Failure(reason or "ended without MPI_Finalize", values.get("rank") or "", values.get("host") or "")


def would_repeat(failure: Failure, code: int, trained: bool) -> str:
    """Return why a restart would fail in the same way, or "".

    Args:
        trained: whether the job has trained a step.
    """
    error = re.match(r"(?:\w+\.)*(\w+)(?::|$)", failure.reason)
    if error and error[1] in _FINAL_ERRORS:
        return f"a restart does not cure a {error[1]}"
    if code in _USAGE_CODES and not trained:
        return f"{exit_reason(code)} before the first step means a wrong command line"
    return ""


# Seconds before a restart: after each failure without a new checkpoint twice as many as before, from the first to the
# second number.
_PAUSES = 1.0, 60.0
# Seconds for which a job waits until enough hosts answer.
HOSTS_LIMIT = 600.0
# Seconds between two questions to them.
_ASK_AGAIN = 10.0
# Seconds between two looks for a signal in a pause.
_LOOK = 0.1


@dataclass(frozen=True)
class Job:
    """Job to supervise.

    Attributes:
        command: function from hosts, with their numbers of workers, and a number of workers to the launcher's words.
        workers: number of workers.
        hosts: hosts, each with its largest number of workers; empty for this machine.
        max_restarts: largest number of restarts.
        min_workers: least number of workers that a restart may have.
        begins_anew: whether a restart may train from the beginning if the folder of its checkpoints is gone.
    """

    command: Callable[[dict[str, int], int], list[str]]
    workers: int
    hosts: Mapping[str, int]
    max_restarts: int
    min_workers: int = 1
    begins_anew: bool = False


def supervise(
    job: Job,
    run: Callable[..., Attempt] = run_attempt,
    absent: Callable[[list[str]], dict[str, str]] = absent_hosts,
) -> int:
    """Run a job, and start it again after failures.

    Args:
        job: the job. Its hosts have been asked before.
        run, absent: functions that run one attempt, and that return the hosts that do not answer, with the reasons.

    Returns:
        The exit code of the last attempt; 1 if Open MPI ended with 0 although it had lost a host.

    Raises:
        OSError: if the launcher cannot be started.
    """
    with Signals() as signals:
        return _Supervisor(job, signals, run, absent).run()


class _Supervisor:
    def __init__(self, job: Job, signals: Signals, run: Callable[..., Attempt], absent: Callable[..., dict[str, str]]):
        self._job, self._signals, self._run, self._absent = job, signals, run, absent
        self._began, self._useful = time.monotonic(), 0.0
        # Failures in a row without a new checkpoint.
        self._idle = 0
        self._told = False
        # Folders with checkpoints of earlier attempts.
        self._folders: set[str] = set()

    def run(self) -> int:
        name, most = uuid.uuid4().hex[:8], self._job.max_restarts + 1
        hosts, workers = dict(self._job.hosts), self._job.workers
        before: Failure | None = None
        for number in range(1, most + 1):
            os.environ[supervision.VARIABLE] = f"{name}:{number}"
            attempt = self._run(self._job.command(hosts, workers), self._signals, list(hosts))
            failure = find_failure(attempt.text, attempt.code)
            if failure is None:
                self._end(number, attempt)
                return 0
            code = 128 - attempt.code if attempt.code < 0 else attempt.code or 1
            if code == REQUEUE_CODE or self._signals.received:
                return code_after(self._signals.received, code)
            if most == 1:
                return code
            head = f"attempt {number} of {most} failed: {failure}. {_lost(attempt)}"
            reason = would_repeat(failure, code, attempt.has_trained)
            if not attempt.has_trained and failure.same_as(before):
                reason = reason or "the same error came twice before the first step"
            if number == most:
                reason = reason or f"--max-restarts {self._job.max_restarts} is reached"
            if reason:
                _log.error(f"{head} No restart: {reason}.")
                return code
            self._folders |= attempt.folders
            if not self._job.begins_anew:
                os.environ[supervision.SAVED_VARIABLE] = json.dumps(sorted(self._folders))
            before = None if attempt.has_trained else failure
            self._useful += attempt.useful
            self._idle = self._idle + 1 if attempt.saved is None else 0
            found = self._find_hosts(head)
            if found is None:
                return code
            hosts, workers, remark = found
            pause = min(_PAUSES[0] * 2**self._idle, _PAUSES[1])
            _log.warning(f"{head} Attempt {number + 1} begins in {pause:g} s{remark}.{self._advice(attempt)}")
            if not self._pause(pause):
                return code
        raise AssertionError("the last attempt returns")

    def _find_hosts(self, head: str) -> tuple[dict[str, int], int, str] | None:
        """Find the hosts of the next attempt; wait if they are too few.

        Returns:
            Hosts, number of workers, and a remark for the user; None if the job is to end.
        """
        job, end, waits = self._job, time.monotonic() + HOSTS_LIMIT, False
        while True:
            absent = self._absent(list(job.hosts))
            hosts = {host: count for host, count in job.hosts.items() if host not in absent}
            workers = min(job.workers, sum(hosts.values())) if job.hosts else job.workers
            listed = "; ".join(f"{host}: {reason}" for host, reason in absent.items())
            if workers >= max(job.min_workers, 1):
                on = f", with {workers} of {job.workers} workers" * (workers < job.workers)
                return hosts, workers, on + f" (no answer from {listed})" * bool(absent)
            few = f"{workers} workers are left, and --min-workers is {job.min_workers} (no answer from {listed})"
            if time.monotonic() >= end:
                _log.error(f"No restart: {few}.")
                return None
            if not waits:
                _log.warning(f"{head} {few}: hvdx asks the hosts again for {HOSTS_LIMIT / 60:g} minutes.")
            waits = True
            if not self._pause(_ASK_AGAIN):
                return None

    def _pause(self, seconds: float) -> bool:
        """Sleep; return False at once if a signal asks the job to end."""
        end = time.monotonic() + seconds
        while not self._signals.received and time.monotonic() < end:
            time.sleep(min(_LOOK, seconds))
        return not self._signals.received

    def _advice(self, attempt: Attempt) -> str:
        if self._told or attempt.saves or attempt.trained is None:
            return ""
        self._told = True
        return " The training has no checkpoint, so each attempt begins anew. Do: hvdx run --checkpoint DIR"

    def _end(self, number: int, attempt: Attempt) -> None:
        if number == 1:
            return
        if attempt.trained is not None:
            self._useful += attempt.ended - attempt.trained
        total = time.monotonic() - self._began
        _log.info(
            f"attempt {number} has finished the job. {self._useful:.0f} of {total:.0f} s "
            f"({self._useful / max(total, 1e-9):.0%}) trained what is in the result."
        )


def _lost(attempt: Attempt) -> str:
    if not attempt.has_trained:
        return "It had not trained a step."
    since = f"all after {attempt.position}" if attempt.saved is not None else "all of this attempt"
    return f"Lost: {attempt.lost:.0f} s of training, {since}."
