"""Detection of the cluster's batch system, its settings, and the job that this process runs in."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdx.cli.common.mpi_traffic import HOSTFILE
from hvdx.cli.common.processes import run

_TIMEOUT = 20.0  # seconds; a busy controller has taken several

# Commands that identify each system, and its other commands.
_COMMANDS = {
    "Slurm": (("sbatch", "srun"), ("scontrol", "sinfo", "squeue", "scancel")),
    "PBS": (("qsub",), ("qstat", "pbsnodes", "qdel")),
    "LSF": (("bsub",), ("lsid", "bjobs", "bkill", "jsrun")),
}

# Command that prints the version, and the pattern of the version.
_VERSION = {
    "Slurm": (["sbatch", "--version"], r"slurm\S*\s+(\d\S*)"),
    "PBS": (["qsub", "--version"], r"(?:pbs_version\s*=\s*|Version:\s*|PBSPro_)(\d\S*)"),
    "LSF": (["lsid"], r"LSF\D*(\d[\d.]*)"),
}

# Variable with the job's id, set inside a job.
_JOB = {"Slurm": "SLURM_JOB_ID", "PBS": "PBS_JOBID", "LSF": "LSB_JOBID"}


@dataclass(frozen=True)
class BatchSystem:
    """A batch system and its commands.

    Attributes:
        name: "Slurm", "PBS" or "LSF".
        version: version, "" if unknown.
        failure: reason of a failed version query; "" if it succeeded.
        commands: its commands on PATH.
        missing: its commands that are not on PATH, except jsrun.
    """

    name: str
    version: str = ""
    failure: str = ""
    commands: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlurmSite:
    """Settings of a Slurm installation.

    Attributes:
        partition: default partition; "" if there is none.
        limit: time limit of the default partition, in Slurm's format.
        nodes: number of nodes of the default partition, including nodes that are down.
        plugins: MPI plugins that `srun --mpi` accepts.
        mpi: default MPI plugin; "" if unknown.
        failure: reason of the first query that failed; "" if all succeeded.
    """

    partition: str = ""
    limit: str = ""
    nodes: int = 0
    plugins: tuple[str, ...] = ()
    mpi: str = ""
    failure: str = ""


def find_batch_system() -> BatchSystem | None:
    """Find the batch system by its commands on PATH; None if there is none.

    Slurm is tried first, because it may provide commands with the names of PBS commands.

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
    """Return the id of the job of batch system `name` that this process runs in; "" outside of a job.

    Example:
        >>> job_of("Slurm", {"SLURM_JOB_ID": "7"})
        '7'
    """
    return (os.environ if environ is None else environ).get(_JOB[name], "")


def hosts_of_job(name: str, environ: Mapping[str, str] | None = None) -> int:
    """Return the number of hosts of the job of batch system `name` that this process runs in; 1 if unknown.

    Example:
        >>> hosts_of_job("Slurm", {"SLURM_JOB_NUM_NODES": "4"})
        4
    """
    environ = os.environ if environ is None else environ
    if name == "Slurm":
        number = environ.get("SLURM_JOB_NUM_NODES", "")
        return int(number) if number.isdigit() else 1
    if shutil.which("jsrun"):
        return 1  # the host file also names the host of the script, where jsrun starts nothing
    try:
        return max(1, len(set(Path(environ.get(HOSTFILE[name], "")).read_text().split())))
    except OSError:
        return 1


def ask_slurm() -> SlurmSite:
    """Query Slurm for its default partition and its MPI plugins."""
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
    """Read the default partition, its time limit and its number of nodes from `sinfo -h -o "%P|%l|%D"`.

    Example:
        >>> default_partition("long|7-00:00:00|4\\nshort*|1:00:00|2")
        ('short', '1:00:00', 2)
    """
    rows = [line.split("|") for line in text.split() if line.count("|") == 2]
    chosen = [(name[:-1], limit, int(nodes)) for name, limit, nodes in rows if name.endswith("*")]
    # sinfo prints one line for each state of the nodes.
    return (chosen[0][0], chosen[0][1], sum(nodes for _, _, nodes in chosen)) if chosen else ("", "", 0)


def plugins(text: str) -> tuple[str, ...]:
    """Read the plugin names from `srun --mpi=list`: one in each line, in some versions with further words.

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
    """Return the version, "" if unknown, and the reason of a failed query, "" if it succeeded."""
    command, pattern = _VERSION[name]
    if shutil.which(command[0]) is None:
        return "", ""
    done = run(command, _TIMEOUT)
    found = re.search(pattern, done.text)
    return found.group(1).rstrip(",") if found else "", "" if done.code == 0 else done.reason()
