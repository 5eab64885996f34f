"""Installation of a Horovod wheel into this environment, and a test with two workers."""

import importlib.metadata
import json
import re
import shlex
import sys
from pathlib import Path

from hvdx.cli.common.mpi_tools import Mpi, launch, mpirun_command
from hvdx.cli.common.processes import child_environment, run
from hvdx.cli.horovod_build import source
from hvdx.cli.horovod_build.tools import unmet
from hvdx.errors import HvdxError

# Packages that Horovod imports at run time. They are not read from its metadata, which also accepts other releases of
# TensorFlow.
_RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging")
_PIP_TIMEOUT = 600.0  # seconds
_PROOF_TIMEOUT = 120.0  # seconds
_WORKERS = 2
_LINES = 30  # of a failed proof's output

_PROOF = """
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
total = float(hvd.allreduce(tf.constant(float(hvd.rank() + 1)), op=hvd.Sum, name="proof"))
print(f"HVDX {hvd.rank()} of {hvd.size()}: {total:g};", flush=True)
hvd.shutdown()
"""


class ProofError(HvdxError):
    """Raised when the installed Horovod fails the all-reduce of two workers."""


def installed_digest() -> str:
    """Return the SHA-256 of the wheel of the installed Horovod; "" if none is installed or pip recorded no digest."""
    try:
        text = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        return json.loads(text or "{}").get("archive_info", {}).get("hashes", {}).get("sha256", "")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def is_installed(wheel: Path) -> bool:
    """Return whether this environment's Horovod was installed from this wheel."""
    return installed_digest() == source.digest(wheel)


def install(wheel: Path) -> None:
    """Install a wheel, replacing any installed Horovod, and then Horovod's missing run-time packages.

    Raises:
        HvdxError: if pip fails.
    """
    _pip(["--no-deps", "--force-reinstall", str(wheel)])
    missing = unmet(_RUNTIME)
    if missing:
        _pip(missing)


def prove(mpi: Mpi) -> str:
    """Sum 1 and 2 over two workers with Horovod, and return the command line.

    Args:
        mpi: MPI that Horovod was built for.

    Raises:
        ProofError: if the launch fails, takes longer than 120 s, or prints another sum.
    """
    outcome = launch(_WORKERS, [sys.executable, "-c", _PROOF], _PROOF_TIMEOUT, mpi)
    command = shlex.join([*mpirun_command(_WORKERS, mpi), "python"])
    # Search the whole text, since launchers may join the lines of several ranks.
    answers = sorted(re.findall(r"HVDX (\d+ of \d+: [^;\n]*);", outcome.out))
    total = sum(range(1, _WORKERS + 1))
    expected = [f"{rank} of {_WORKERS}: {total}" for rank in range(_WORKERS)]
    if outcome.code == 0 and answers == expected:
        return command
    got = f"got: {', '.join(answers)}" if answers else f"got: {outcome.reason()}"
    raise ProofError(
        f"the {_WORKERS}-worker all-reduce: expected the sum {total} on each rank, {got}\n"
        f"  command: {command}\n"
        + "".join(f"    {line[:300]}\n" for line in outcome.text.splitlines()[-_LINES:])
        + "  Do: hvdx doctor, which finds the part that fails."
    )


def _pip(arguments: list[str]) -> None:
    options = ["--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    outcome = run(command, _PIP_TIMEOUT, child_environment())
    if outcome.code != 0:
        raise HvdxError(
            f"pip: expected it to install {arguments[-1]}, got: {outcome.reason()}. Do: {shlex.join(command)}"
        )
