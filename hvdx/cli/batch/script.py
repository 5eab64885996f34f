"""Job scripts: the template of each system, filled with the values of a plan in the system's spelling."""

import shlex
from collections.abc import Callable, Mapping

from hvdx.cli.batch.plan import BATCH, Plan
from hvdx.cli.batch.template import Value, fill, shell_words, template
from hvdx.cli.common.mpi_tools import EXPORTED, EXPORTED_PREFIXES
from hvdx.errors import ConfigError

# Number of times that a job starts its training again by itself, before the batch system decides. It does so without
# waiting in the queue, and a training that fails more often should be looked at.
_RESTARTS = 5
_PARTS = ("before_launch", "after_launch")


def script(plan: Plan) -> str:
    """Return the script of a job."""
    values = _common(plan) | _SPELLINGS[plan.system](plan)
    if plan.system in BATCH:
        values["supervised"] = _supervised(plan, str(values["all_hosts"]))
        # Scripts with a queue share these parts, which pass signals on and decide on a requeue at the end.
        values |= {part: fill(template(f"{part}.part.sh"), values).splitlines() for part in _PARTS}
    return fill(template(f"{plan.system}.sh"), values)


def _common(plan: Plan) -> dict[str, Value]:
    """Return the values of the placeholders that all templates share."""
    by_open_mpi = plan.checkpoint is None and _by_open_mpi(plan)
    return {
        "made_by": plan.made_by,
        "name": plan.name,
        "account": plan.account,
        "queue": plan.queue,
        "tasks": plan.tasks,
        "max_restarts": plan.max_restarts,
        "env_setup": plan.env_setup,
        "directives": plan.directives,
        "strategy": None if plan.strategy is None else shlex.quote(plan.strategy),
        "threads": plan.threads,
        "command": shell_words(plan.command),
        "mpi_options": _mpi_options(plan) if by_open_mpi else None,
        "exports": _exports(plan) if by_open_mpi else None,
        # Hydra, the launcher of MPICH and Intel MPI, takes -f.
        "hostfile_option": "--hostfile" if plan.mpi == "openmpi" else "-f",
    }


def _by_open_mpi(plan: Plan) -> bool:
    """Return whether the script needs options that only Open MPI's mpirun needs.

    Open MPI binds ranks to cores and passes few variables to other hosts; MPICH and Intel MPI do not.
    """
    return plan.launcher == "mpirun" and plan.mpi == "openmpi"


def _mpi_options(plan: Plan) -> str:
    # The host files of PBS and LSF name a host once for each rank. If a file names a host only once, Open MPI 5 gives
    # the host one slot per core.
    spread = f"--map-by ppr:{plan.tasks_per_node}:node " if plan.system in ("pbs", "lsf") else ""
    return f'--bind-to none {spread}"${{exports[@]}}"'


def _supervised(plan: Plan, all_hosts: str) -> str | None:
    """Return the options of `hvdx run` with which a job goes on after failures; None if it does not.

    Args:
        plan: the job.
        all_hosts: command that prints the hosts of the job.
    """
    if plan.checkpoint is None:
        return None
    hosts = f"$({all_hosts} | sed 's/$/:{plan.tasks_per_node}/' | paste -sd, -)"
    survival = " --survive" if plan.survive else ""
    return f'--hosts "{hosts}"{survival} --max-restarts {_RESTARTS} --checkpoint {shell_words([plan.checkpoint])}'


def _exports(plan: Plan) -> tuple[str, ...]:
    """Return the lines that collect the -x options, only for variables that are set: Open MPI warns about others."""
    # Without --threads, OMP_NUM_THREADS may be set by the batch system, to a number that does not fit.
    names = " ".join(name for name in EXPORTED if plan.threads is not None or name != "OMP_NUM_THREADS")
    prefixes = " ".join(f'"${{!{prefix}@}}"' for prefix in EXPORTED_PREFIXES)
    return (
        "# Variables that mpirun passes on to other hosts. Add the names of variables that you export above.",
        "exports=()",
        f"for variable in {names} {prefixes}; do",
        '    if [ -n "$(printenv "$variable")" ]; then exports+=(-x "$variable"); fi',
        "done",
    )


def _slurm(plan: Plan) -> dict[str, Value]:
    srun = plan.launcher == "srun"
    return {
        "partition": plan.queue,
        "nodes": plan.nodes,
        "tasks_per_node": plan.tasks_per_node,
        "cpus_per_task": plan.cpus_per_task,
        "gpus_per_node": plan.gpus_per_node or None,
        "time": _days(plan.seconds),
        "array": plan.array,
        "output": plan.output or ("%x-%A_%a.out" if plan.array else "%x-%j.out"),
        "signal": plan.signal,
        "mpi_plugin": plan.mpi_plugin if srun else None,
        "system": "Slurm",
        "ends": "TERM",
        "on_host": "srun --overlap --nodes=1 --ntasks=1 --mpi=none --nodelist=",
        "this_host": "$SLURMD_NODENAME",
        "all_hosts": 'scontrol show hostnames "$SLURM_JOB_NODELIST"',
        "mpirun_tasks": None if srun or plan.checkpoint else '"$SLURM_NTASKS"',
    }


def _pbs(plan: Plan) -> dict[str, Value]:
    cores = plan.cpus_per_task or 1
    # Always set ompthreads: without it, PBS sets OMP_NUM_THREADS to ncpus, the cores of all ranks on a host.
    chunk = f"ncpus={cores * plan.tasks_per_node}:mpiprocs={plan.tasks_per_node}:ompthreads={plan.threads or cores}"
    gpus = f":ngpus={plan.gpus_per_node}" if plan.gpus_per_node else ""
    return {
        "select": f"{plan.nodes}:{chunk}{gpus}",
        "time": _hours(plan.seconds),
        "seconds": plan.seconds,
        "signal": plan.signal,
        "output": plan.output,
        "system": "PBS",
        "ends": "TERM",
        "mpirun_tasks": None if plan.checkpoint else plan.tasks,
        "on_host": "pbs_tmrsh ",
        "this_host": '$(head -n 1 "$PBS_NODEFILE")',
        "all_hosts": 'sort -u "$PBS_NODEFILE"',
    }


def _lsf(plan: Plan) -> dict[str, Value]:
    jsrun = plan.launcher == "jsrun"
    minutes = -(-plan.seconds // 60)
    return {
        "name": _lsf_name(plan),
        # With jsrun, a job gets whole nodes; otherwise one slot for each rank.
        "tasks_by_slot": None if jsrun else plan.tasks,
        "ptile": None if jsrun else plan.tasks_per_node,
        "cores_by_slot": None if jsrun else plan.cpus_per_task,
        "cpus_per_task": plan.cpus_per_task,
        "gpus_by_host": None if jsrun else plan.gpus_per_node or None,
        "nnodes": plan.nodes if jsrun else None,
        "time": f"{minutes // 60}:{minutes % 60:02}",
        "output": plan.output or f"{plan.name}-{'%J_%I' if plan.array else '%J'}.out",
        "signal_minutes": -(-plan.signal // 60),
        "jsrun_tasks": plan.tasks if jsrun else None,
        "jsrun_cores": (plan.cpus_per_task or 1) if jsrun else None,
        "jsrun_gpus": _gpus_of_a_rank(plan) if jsrun and plan.gpus_per_node else None,
        "mpirun_tasks": None if jsrun or plan.checkpoint else plan.tasks,
        "system": "LSF",
        "ends": "INT TERM",
        "on_host": "blaunch ",
        "this_host": '$(head -n 1 "$LSB_DJOB_HOSTFILE")',
        # blaunch cannot reach the hosts of jsrun.
        "all_hosts": None if jsrun else 'sort -u "$LSB_DJOB_HOSTFILE"',
    }


def _lsf_name(plan: Plan) -> str:
    if plan.array is None:
        return plan.name
    indices, percent, at_once = plan.array.partition("%")
    return f"{plan.name}[{indices}]{percent}{at_once}"


def _gpus_of_a_rank(plan: Plan) -> int:
    gpus, rest = divmod(plan.gpus_per_node, plan.tasks_per_node)
    if rest:
        raise ConfigError(
            f"job: --gpus-per-node: with jsrun expected a multiple of the {plan.tasks_per_node} ranks on each node, "
            f"got {plan.gpus_per_node}. Do: --tasks-per-node {plan.gpus_per_node}"
        )
    return gpus


def _mpirun(plan: Plan) -> dict[str, Value]:
    return {"hosts": shell_words([plan.hosts or ""])}


def _horovodrun(plan: Plan) -> dict[str, Value]:
    binding = "--bind-to none --map-by slot" if plan.mpi == "openmpi" else None
    return {"hosts": shell_words([plan.hosts or ""]), "binding": binding}


_SPELLINGS: Mapping[str, Callable[[Plan], dict[str, Value]]] = {
    "slurm": _slurm,
    "pbs": _pbs,
    "lsf": _lsf,
    "mpirun": _mpirun,
    "horovodrun": _horovodrun,
}


def _hours(seconds: int) -> str:
    """Format a time as HH:MM:SS; hours may exceed 24."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _days(seconds: int) -> str:
    """Format a time for Slurm: HH:MM:SS, or DAYS-HH:MM:SS from 24 hours on."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-{_hours(rest)}" if days else _hours(rest)
