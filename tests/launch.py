"""Launcher of Python scripts on several ranks, with an outer time limit, so that a deadlock fails and does not hang."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdx.cli.common import processes
from hvdx.cli.common.mpi_tools import mpirun_command
from tests import warm

ROOT = Path(__file__).resolve().parent.parent

# One thread a rank; Horovod warns of a stalled collective after 20 s and ends it after 240 s.
_ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # At Horovod's default of 1 ms, polling takes a third of a core on each rank.
    "HOROVOD_CYCLE_TIME": "5",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True)
class Run:
    """Result of a launch.

    Attributes:
        code: exit status; None if the time limit ended the launch.
        out: output of all ranks, standard output and standard error together.
    """

    code: int | None
    out: str

    @property
    def ready(self) -> list[float]:
        """Seconds since the epoch at which ranks printed "READY"."""
        return [float(line.split()[1]) for line in self.out.splitlines() if line.startswith("READY")]

    def __str__(self) -> str:
        return f"exit status {self.code}\n{self.out}"


def run(
    ranks: int, program: Sequence[str], timeout: float = 120, env: Mapping[str, str] | None = None, fresh: bool = False
) -> Run:
    """Run `python program...` on some ranks.

    Args:
        ranks: number of ranks; 1 is started without a launcher.
        program: script and arguments, or "-c" and code.
        timeout: seconds after which every process of the launch is killed.
        env: variables to add to the environment.
        fresh: start new processes, like a user; otherwise fork a process that has imported TensorFlow (`warm`).
    """
    backend = {name: value for name, value in (env or {}).items() if name == "KERAS_BACKEND"}
    command = [*([sys.executable] if fresh else warm.command(environment(backend))), *program]
    if ranks == 1:
        return run_command(command, timeout, env)
    done = run_command(mpirun_command(ranks) + command, timeout, env)
    if done.code != -signal.SIGSEGV:
        return done
    # Open MPI's launcher itself crashed at the end of the job (open-mpi/ompi#13650); a rank's crash has code 139.
    print(f"mpirun crashed; once more. Its output:\n{done.out}")
    return run_command(mpirun_command(ranks) + command, timeout, env)


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a test's processes, with `env` added."""
    environ = os.environ | _ENVIRONMENT | dict(env or {})
    # After the folders that a test adds itself.
    folders = [environ.get("PYTHONPATH", ""), str(ROOT / "tests" / "quick_start")]
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def run_command(command: Sequence[str], timeout: float = 120, env: Mapping[str, str] | None = None) -> Run:
    """Run any command with the environment and time limit of `run`."""
    ended = processes.run(command, timeout, environment(env), ROOT, merged=True)
    return Run(ended.code, ended.text)
