"""Child processes with a time limit. Crashes and timeouts are results; a timeout also kills all their children."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Silences TensorFlow's log and PMIx's warning about munge, which would hide the line that names a failure. A note about
# oneDNN remains: only TensorFlow without oneDNN, whose steps may take twice as long, does not write it.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "PMIX_MCA_psec": "native"}
# Makes sets of strings have the same order in all processes, and so on all ranks.
_ALIKE = {"PYTHONHASHSEED": "0"}
# Notes that TensorFlow writes whatever its level of logging is, and Open MPI when a rank has ended the job.
_NOTE = re.compile(r"WARNING: All log messages before absl|[IW]\d{4} |\s*Errorcode: ")


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a child process.

    Attributes:
        code: exit code; negative for a signal, None if the process could not start or reached its time limit.
        out, err: standard output and standard error.
        timed_out: True if the process was killed at its time limit.
    """

    code: int | None
    out: str = ""
    err: str = ""
    timed_out: bool = False

    @property
    def text(self) -> str:
        """Standard output followed by standard error."""
        return self.out + self.err

    def reason(self) -> str:
        """Say in one line why the process failed: its time limit, its signal, or the key line of its output."""
        if self.timed_out:
            return "no answer within the time limit"
        if self.code is None:
            return self.err.strip() or "could not be started"
        return ("" if self.code < 0 else key_line(self.text)) or exit_reason(self.code)


def run(
    command: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    merged: bool = False,
) -> Outcome:
    """Run a command to its end, or kill it and all its children at the time limit.

    A failure of the command raises nothing; the outcome describes it.

    Args:
        timeout: seconds.
        env, cwd, merged: see `start_group`.

    Example:
        >>> run(["echo", "hello"], timeout=5).out
        'hello\\n'
    """
    try:
        with process_group(command, env, cwd, merged) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                kill_group(process)
                out, err = process.communicate()
                return Outcome(None, out, err or "", timed_out=True)
    except OSError as error:
        return Outcome(None, err=str(error))
    return Outcome(process.returncode, out, err or "")


@contextmanager
def process_group(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None, merged: bool = False
) -> Iterator["subprocess.Popen[str]"]:
    """Start a process group for a `with` block, and kill it if the block raises. Arguments as in `start_group`."""
    with start_group(command, env, cwd, merged) as process:
        try:
            yield process
        except BaseException:
            kill_group(process)
            raise


def start_group(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None, merged: bool = False
) -> "subprocess.Popen[str]":
    """Start a command in a new session, so that `kill_group` also reaches its children, such as mpirun's ranks.

    Args:
        env: the environment; `child_environment()` by default.
        cwd: the working directory; that of this process by default.
        merged: True sends standard error to the pipe of standard output.

    Raises:
        OSError: if the command cannot be started.
    """
    return subprocess.Popen(
        command,
        env=dict(env) if env is not None else child_environment(),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def kill_group(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Kill a process that has a session of its own, as those of `start_group`, and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def parse_reports(text: str) -> list[Any]:
    """Return the JSON documents in an output, each after the word HVDX.

    A document need not begin a line, because launchers may join the lines of several ranks.

    Example:
        >>> parse_reports('noise HVDX {"rank": 0}HVDX {"rank": 1}')
        [{'rank': 0}, {'rank': 1}]
    """
    found = []
    for piece in text.split("HVDX ")[1:]:
        with suppress(ValueError):
            found.append(json.JSONDecoder().raw_decode(piece)[0])
    return found


def program_of(words: Sequence[str]) -> list[str]:
    """Return the words after a command's options, without a leading "--".

    Example:
        >>> program_of(["--", "python", "train.py"])
        ['python', 'train.py']
    """
    return list(words[1:] if words[:1] == ["--"] else words)


def search_path() -> str:
    """Return PATH, with this Python's bin folder in front if PATH lacks it.

    If a virtual environment's Python is called by its full path, its bin folder is not on PATH, though its mpirun and
    cmake are there.
    """
    path = os.environ.get("PATH", "")
    here = str(Path(sys.executable).parent)
    return path if here in path.split(os.pathsep) else os.pathsep.join(filter(None, (here, path)))


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment with `search_path()`, settings for quiet and equal ranks, and `more`."""
    return {**_QUIET, **_ALIKE, **os.environ, "PATH": search_path(), **more}


def key_line(text: str) -> str:
    """Return the line that names the failure: the last one with "Error" or "error:", else the last one.

    Example:
        >>> key_line("cannot open data\\nI0000 00:00:1795 port.cc:153] oneDNN custom operations are on.")
        'cannot open data'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip(" -*=\t") and not _NOTE.match(line)]
    named = [line for line in lines if "Error" in line or "error:" in line]
    chosen = (named or lines or [""])[-1]
    return chosen if len(chosen) <= 300 else chosen[:297] + "..."


def last_of(path: Path, size: int = 20_000) -> str:
    """Return the end of an output: `size` bytes of it at most."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read().decode(errors="replace")


def exit_reason(code: int) -> str:
    """Return an exit code in words. Shells and launchers return 128 + N for the signal N, Python -N.

    Example:
        >>> exit_reason(137), exit_reason(-9), exit_reason(3)
        ('exit code 137 (SIGKILL)', 'crashed with SIGKILL', 'exit code 3')
    """
    if code < 0:
        return f"crashed with {signal_name(-code)}"
    named = code > 128 and code - 128 in signal.valid_signals()
    return f"exit code {code}" + (f" ({signal_name(code - 128)})" if named else "")


def signal_name(number: int) -> str:
    """Return the name of a signal, such as "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
