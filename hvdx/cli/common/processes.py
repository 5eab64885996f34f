"""Child processes whose crash or hang is an answer: output, exit code, time limit, an end for all their children."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# TensorFlow's start-up notes and PMIx's complaint about munge would bury the line that matters.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "PMIX_MCA_psec": "native"}


@dataclass(frozen=True)
class Outcome:
    """How a child process ended.

    Attributes:
        code: its exit code; negative for a signal, None when it could not start or ran out of time.
        out, err: its standard output and standard error.
        timed_out: True when the time limit ended it.
    """

    code: int | None
    out: str = ""
    err: str = ""
    timed_out: bool = False

    @property
    def text(self) -> str:
        """Both outputs, the normal one first."""
        return self.out + self.err

    def reason(self) -> str:
        """Say in one line why the process failed: its time limit, its signal, or the key line it wrote."""
        if self.timed_out:
            return "no answer within the time limit"
        if self.code is None:
            return self.err.strip() or "could not be started"
        if self.code < 0:
            return f"crashed with {_signal_name(-self.code)}"
        return key_line(self.text) or f"exit code {self.code}"


def run(
    command: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    merged: bool = False,
) -> Outcome:
    """Run a command to its end, or kill it and all its children at the time limit.

    Args:
        command: the program and its arguments.
        timeout: seconds.
        env, cwd, merged: as in `start_group`.

    Returns:
        What it wrote and how it ended; never raises for what the command does.

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
    """Start a process group for a block; an exception in the block kills all of it. Arguments as in `start_group`."""
    with start_group(command, env, cwd, merged) as process:
        try:
            yield process
        except BaseException:
            kill_group(process)
            raise


def start_group(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None, merged: bool = False
) -> "subprocess.Popen[str]":
    """Start a command in a session of its own, so that `kill_group` reaches its children: mpirun's ranks.

    Args:
        command: the program and its arguments.
        env: the environment; `child_environment()` by default.
        cwd: the working directory; that of this process by default.
        merged: whether standard error goes to the pipe of standard output.

    Raises:
        OSError: it cannot be started.
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


def kill_group(process: "subprocess.Popen[str]") -> None:
    """Kill a process of `start_group` and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def parse_reports(text: str) -> list[Any]:
    """Collect the JSON documents that programs told, each behind the word HVDX.

    Launchers run the lines of several ranks together, so they are found wherever they stand.

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
    """The program behind a command's options, without the "--" that may stand before it.

    Example:
        >>> program_of(["--", "python", "train.py"])
        ['python', 'train.py']
    """
    return list(words[1:] if words[:1] == ["--"] else words)


def search_path() -> str:
    """PATH, with this Python's own bin folder in front when it is not on it.

    A virtual environment called by its full path is not on PATH, and its mpirun and cmake lie beside
    its python. Where the folder is on PATH already the user's order stands.
    """
    path = os.environ.get("PATH", "")
    here = str(Path(sys.executable).parent)
    return path if here in path.split(os.pathsep) else os.pathsep.join(filter(None, (here, path)))


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment with `search_path()` and quiet libraries, then `more`."""
    return {**_QUIET, **os.environ, "PATH": search_path(), **more}


def key_line(text: str) -> str:
    """The line that says what went wrong: the last one that names an error, else the last one written."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -*=\t")]
    named = [line for line in lines if "Error" in line or "error:" in line]
    chosen = (named or lines or [""])[-1]
    return chosen if len(chosen) <= 300 else chosen[:297] + "..."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
