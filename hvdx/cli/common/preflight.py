"""Checks of a command of workers that would fail on each of them, or wait for ever, before any of them is started."""

import os
import re
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvdx.errors import LaunchError

# Bytes that must fit into the folder for temporary files: sockets and the description of a job take less.
_SCRATCH_BYTES = 1 << 18


#: Backends of Keras on which hvdx trains; hvdx.keras has the same, and would load Keras here.
_BACKENDS = ("tensorflow", "jax", "torch")


def check_start(words: Sequence[str], command: str) -> None:
    """Check the program of the workers, and the environment that they will have.

    Raises:
        LaunchError: if Keras has another backend, Python reads its script from standard input, or the folder for
            temporary files is full.
        ConfigError: if `HVDX_STRATEGY` is no strategy.
    """
    backend = os.environ.get("KERAS_BACKEND") or "tensorflow"
    if backend not in _BACKENDS:
        raise LaunchError(
            f"{command}: KERAS_BACKEND={backend}: expected one of {', '.join(_BACKENDS)}, on which hvdx trains. Do: "
            "unset KERAS_BACKEND, or KERAS_BACKEND=tensorflow."
        )
    if _reads_its_script_from_stdin(words):
        raise LaunchError(
            f"{command}: {' '.join(words)}: expected a script in a file, got one on standard input, which one worker "
            f"alone could read. Do: save it as train.py, then hvdx {command} ... {words[0]} train.py"
        )
    if os.environ.get("HVDX_STRATEGY"):
        from hvdx.strategies import resolve  # the command starts in half of the time without it

        resolve(None)
    folder = os.environ.get("TMPDIR") or "/tmp"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_SCRATCH_BYTES))
            file.flush()
    except OSError as error:
        raise LaunchError(
            f"{command}: TMPDIR: expected a folder with some room for MPI's files, got {folder}: {error.strerror}. "
            f"Do: free some of it, or TMPDIR=/another/folder hvdx {command} ..."
        ) from error


def _reads_its_script_from_stdin(words: Sequence[str]) -> bool:
    """Return whether the command is `python -`, or `python` with a file or a pipe as standard input."""
    if not re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        return False
    # The options that take no argument of their own, such as -u.
    script = next((word for word in words[1:] if not re.fullmatch(r"-[bBdEiIOPqsSuvx]+", word)), None)
    if script is not None or sys.stdin is None:
        return script == "-"
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
