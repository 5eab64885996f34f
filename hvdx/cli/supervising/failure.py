"""What ended a job: rank, host and reason, from the messages of hvdx and of the launchers."""

import re
from dataclasses import dataclass

from hvdx.cli.common.processes import exit_reason, key_line, signal_name

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
        code: exit code of the launcher.

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
        failure: the failure.
        code: exit code of the launcher.
        trained: whether the job has trained a step.
    """
    error = re.match(r"(?:\w+\.)*(\w+)(?::|$)", failure.reason)
    if error and error[1] in _FINAL_ERRORS:
        return f"a restart does not cure a {error[1]}"
    if code in _USAGE_CODES and not trained:
        return f"{exit_reason(code)} before the first step means a wrong command line"
    return ""
