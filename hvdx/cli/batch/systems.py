"""The batch system of a cluster: which one is here, what it says of itself, and whether this runs inside a job."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdx.cli.common.processes import run

_TIMEOUT = 20.0  # seconds; a busy controller has taken several

# What each system is known by (the first commands), and asked with.
_COMMANDS = {
    "Slurm": (("sbatch", "srun"), ("scontrol", "sinfo", "squeue", "scancel")),
    "PBS": (("qsub",), ("qstat", "pbsnodes", "qdel")),
    "LSF": (("bsub",), ("lsid", "bjobs", "bkill", "jsrun")),
}

# The command whose answer holds the version.
_VERSION = {
    "Slurm": (["sbatch", "--version"], r"slurm\S*\s+(\d\S*)"),
    "PBS": (["qsub", "--version"], r"(?:pbs_version\s*=\s*|Version:\s*|PBSPro_)(\d\S*)"),
    "LSF": (["lsid"], r"LSF\D*(\d[\d.]*)"),
}

# Set inside a job.
_JOB = {"Slurm": "SLURM_JOB_ID", "PBS": "PBS_JOBID", "LSF": "LSB_JOBID"}
#: Name a job's file of hosts, a line for each task; Slurm has none.
HOSTFILE = {"PBS": "PBS_NODEFILE", "LSF": "LSB_DJOB_HOSTFILE"}


@dataclass(frozen=True)
class BatchSystem:
    """A batch system.

    Attributes:
        name: "Slurm", "PBS" or "LSF".
        version: as it says; "" where it does not.
        failure: why it does not answer; "" where it does.
        commands: those of it that are on PATH.
        missing: those that belong to it and are not.
    """

    name: str
    version: str = ""
    failure: str = ""
    commands: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlurmSite:
    """What a Slurm tells of its site.

    Attributes:
        partition: the default one; "" where there is none.
        limit: its time limit, as Slurm writes it.
        nodes: how many nodes the default partition has, down ones included.
        plugins: what `srun --mpi` takes.
        mpi: what it takes when nothing is said.
        failure: why something could not be asked; "" where all answered.
    """

    partition: str = ""
    limit: str = ""
    nodes: int = 0
    plugins: tuple[str, ...] = ()
    mpi: str = ""
    failure: str = ""


def find_batch_system() -> BatchSystem | None:
    """Look for the batch system on PATH; None where there is none.

    Slurm comes first: it has commands named like those of PBS, for people who come from there.

    Example:
        >>> find_batch_system()  # doctest: +SKIP
        BatchSystem(name='Slurm', version='22.05.8', failure='', commands=('sbatch', 'srun', ...), missing=())
    """
    for name, (marks, others) in _COMMANDS.items():
        if any(map(shutil.which, marks)):
            there = tuple(filter(shutil.which, (*marks, *others)))
            missing = tuple(command for command in (*marks, *others) if command not in (*there, "jsrun"))
            return BatchSystem(name, *_version(name), there, missing)
    return None


def job_of(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The id of the job that this process runs in; "" outside of one.

    Args:
        name: of the batch system.
        environ: where to look; the process environment by default.

    Example:
        >>> job_of("Slurm", {"SLURM_JOB_ID": "7"})
        '7'
    """
    return (os.environ if environ is None else environ).get(_JOB[name], "")


def hosts_of_job(name: str, environ: Mapping[str, str] | None = None) -> int:
    """How many hosts the job has that this process runs in; 1 where nothing tells.

    Args:
        name: of the batch system.
        environ: where to look; the process environment by default.

    Example:
        >>> hosts_of_job("Slurm", {"SLURM_JOB_NUM_NODES": "4"})
        4
    """
    environ = os.environ if environ is None else environ
    if name == "Slurm":
        number = environ.get("SLURM_JOB_NUM_NODES", "")
        return int(number) if number.isdigit() else 1
    if shutil.which("jsrun"):
        return 1  # the file has the host of the script too, on which jsrun starts nothing
    try:
        return max(1, len(set(Path(environ.get(HOSTFILE[name], "")).read_text().split())))
    except OSError:
        return 1


def ask_slurm() -> SlurmSite:
    """Ask a Slurm for its default partition and for what `srun --mpi` takes."""
    limits = run(["sinfo", "-h", "-o", "%P|%l|%D"], _TIMEOUT)
    listed = run(["srun", "--mpi=list"], _TIMEOUT)
    config = run(["scontrol", "show", "config"], _TIMEOUT)
    partition, limit, nodes = default_partition(limits.out)
    default = re.search(r"^MpiDefault\s*=\s*(\S+)", config.out, re.MULTILINE)
    failed = [done.reason() for done in (limits, listed, config) if done.code != 0]
    return SlurmSite(
        partition, limit, nodes, plugins(listed.text), default.group(1) if default else "", "; ".join(failed[:1])
    )


def default_partition(text: str) -> tuple[str, str, int]:
    """Read the default partition, its time limit and its number of nodes out of `sinfo -h -o "%P|%l|%D"`.

    Example:
        >>> default_partition("long|7-00:00:00|4\\nshort*|1:00:00|2")
        ('short', '1:00:00', 2)
    """
    rows = [line.split("|") for line in text.split() if line.count("|") == 2]
    chosen = [(name[:-1], limit, int(nodes)) for name, limit, nodes in rows if name.endswith("*")]
    # Nodes in unlike states stand in lines of their own.
    return (chosen[0][0], chosen[0][1], sum(nodes for _, _, nodes in chosen)) if chosen else ("", "", 0)


def plugins(text: str) -> tuple[str, ...]:
    """Read the names out of `srun --mpi=list`, which writes them in one line each, with more words in some versions.

    Example:
        >>> plugins("MPI plugin types are...\\n\\tpmix\\n\\tnone\\nspecific pmix plugin versions available: pmix_v4")
        ('pmix', 'none', 'pmix_v4')
    """
    _, _, listed = text.partition("types are")
    names: list[str] = []
    for line in listed.splitlines():
        said = line.removeprefix("srun:").split(":")[-1]
        names += re.findall(r"[a-z]\w*", said)
    return tuple(dict.fromkeys(names))


def _version(name: str) -> tuple[str, str]:
    """The version, "" where it says none; and why it does not answer, if so."""
    command, pattern = _VERSION[name]
    if shutil.which(command[0]) is None:
        return "", ""
    done = run(command, _TIMEOUT)
    found = re.search(pattern, done.text)
    return found.group(1).rstrip(",") if found else "", "" if done.code == 0 else done.reason()
