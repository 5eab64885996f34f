"""Puts a Horovod wheel into this environment, and proves with two workers that it works."""

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

# What Horovod imports when it runs; its own metadata would also be met by other releases of TensorFlow.
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
    """The installed Horovod did not do a two-worker all-reduce."""


def installed_digest() -> str:
    """SHA-256 of the wheel that the installed Horovod came from, "" where there is none or pip did not say."""
    try:
        text = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        return json.loads(text or "{}").get("archive_info", {}).get("hashes", {}).get("sha256", "")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def is_installed(wheel: Path) -> bool:
    """Whether this environment's Horovod was installed from exactly this wheel."""
    return installed_digest() == source.digest(wheel)


def install(wheel: Path) -> None:
    """Install a wheel over whatever Horovod there is, then what Horovod needs when it runs.

    Raises:
        HvdxError: pip failed.
    """
    _pip(["--no-deps", "--force-reinstall", str(wheel)])
    missing = unmet(_RUNTIME)
    if missing:
        _pip(missing)


def prove(mpi: Mpi) -> str:
    """Sum 1 and 2 over two workers with Horovod.

    Args:
        mpi: the MPI that Horovod was built for.

    Returns:
        The command line that did it.

    Raises:
        ProofError: it failed, hung for 120 s, or the workers did not find each other.
    """
    outcome = launch(_WORKERS, [sys.executable, "-c", _PROOF], _PROOF_TIMEOUT, mpi)
    command = shlex.join([*mpirun_command(_WORKERS, mpi), "python"])
    # Searched for, not split by line: launchers run the lines of several ranks together.
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
        + "  Do: hvdx doctor tells which part fails."
    )


def _pip(arguments: list[str]) -> None:
    options = ["--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    outcome = run(command, _PIP_TIMEOUT, child_environment())
    if outcome.code != 0:
        raise HvdxError(
            f"pip: expected it to install {arguments[-1]}, got: {outcome.reason()}. Do: {shlex.join(command)}"
        )
