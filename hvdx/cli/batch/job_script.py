"""Scripts of batch jobs: options and site file make a checked plan, which fills the template of its system."""

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdx.cli.batch.template import Value, fill, plain_line, plain_word, shell_words, template
from hvdx.cli.common.mpi_tools import EXPORTED, EXPORTED_PREFIXES
from hvdx.cli.common.options import parse_hostfile
from hvdx.cli.common.processes import program_of
from hvdx.errors import ConfigError

#: Launchers of each system, the default first.
LAUNCHERS = {
    "slurm": ("srun", "mpirun"),
    "pbs": ("mpirun",),
    "lsf": ("mpirun", "jsrun"),
    "mpirun": ("mpirun",),
    "horovodrun": ("horovodrun",),
}
#: Systems with a queue; jobs of the others start at once, on the hosts of a file.
BATCH = ("slurm", "pbs", "lsf")
#: Vendors of mpirun, which differ in their options for hosts, cores and variables.
VENDORS = ("openmpi", "mpich", "intel")

#: Values for options that neither the command line nor the site file gives. 300 seconds are enough to save a large
#: network on a busy file system, and short compared with the hours of a job. 100 restarts are more than a training that
#: makes progress needs, and stop one that does not.
DEFAULTS = {"signal": 300, "max_restarts": 100, "mpi": "openmpi", "mpi_plugin": "pmix"}


@dataclass(frozen=True)
class Plan:
    """Checked settings of one job.

    Attributes:
        system: one of `LAUNCHERS`.
        name: name of the job.
        command: command of every rank.
        made_by: command line that made the script.
        launcher, mpi, mpi_plugin: launcher, vendor of mpirun, and plugin of srun.
        nodes, tasks_per_node: number of hosts, and of ranks on each; unused for host files.
        tasks: number of ranks.
        gpus_per_node: number of GPUs on each host, 0 for none.
        cpus_per_task: cores for each rank; None leaves the choice to the system.
        threads: value of OMP_NUM_THREADS; None leaves the choice to hvdx.
        seconds: time limit; 0 for none.
        signal: seconds before the time limit at which training gets the signal to save.
        max_restarts: number of times that the job may go back into the queue.
        account, queue, output, array, strategy, hosts, checkpoint: options of the same names (`queue` is Slurm's
            partition), or None.
        survive: whether the workers go on without one that dies.
        env_setup, directives: lines for the shell and for the batch system.
    """

    system: str
    name: str
    command: tuple[str, ...]
    made_by: str
    launcher: str
    mpi: str
    mpi_plugin: str
    nodes: int
    tasks_per_node: int
    tasks: int
    gpus_per_node: int
    cpus_per_task: int | None
    threads: int | None
    seconds: int
    signal: int
    max_restarts: int
    account: str | None
    queue: str | None
    output: str | None
    array: str | None
    strategy: str | None
    hosts: str | None
    checkpoint: str | None
    survive: bool
    env_setup: tuple[str, ...]
    directives: tuple[str, ...]


def make_plan(args: argparse.Namespace, site: Mapping[str, Any], words: Sequence[str]) -> Plan:
    """Combine options, site file and defaults, in this order of precedence, and check them.

    Args:
        args: the options; None or absent if not given.
        site: settings of the site file, from `site.settings`.

    Raises:
        ConfigError: if a setting is missing or wrong.
    """
    options = {key: value for key, value in vars(args).items() if value is not None}
    settings = {**DEFAULTS, **site, **options}
    system = settings["system"]
    command = command_of(settings.get("program", []), system)
    batch = system in BATCH
    gpus = check_count("--gpus-per-node", settings.get("gpus_per_node"), 0) or 0
    nodes = check_count("--nodes", settings.get("nodes"), 1) or 1
    each = check_count("--tasks-per-node", settings.get("tasks_per_node"), 1) or gpus or 1
    threads = check_count("--threads", settings.get("threads"), 1)
    cores = check_count("--cpus-per-task", settings.get("cpus_per_task"), 1)
    if "cpus_per_task" not in options:
        # --threads on the command line outranks cpus_per_task in the site file.
        cores = options.get("threads") or cores or threads
    seconds = parse_time(settings.get("time") or "") if batch else 0
    hosts = None if batch else settings.get("hosts")
    checkpoint, survive = settings.get("checkpoint"), bool(settings.get("survive"))
    # With --checkpoint it is that of `hvdx run`, unless the command line names one.
    default = "mpirun" if checkpoint else settings.get("launcher", LAUNCHERS[system][0])
    launcher = _one_of("--launcher", options.get("launcher", default), LAUNCHERS[system])
    mpi = _one_of("--mpi", settings["mpi"], VENDORS)
    _check_survival(checkpoint, survive, launcher, mpi)
    return Plan(
        system=system,
        name=check_name(settings.get("name"), command),
        command=tuple(command),
        # It becomes a comment of the script, so it must be one line.
        made_by=" ".join(" ".join(words).split()),
        launcher=launcher,
        mpi=mpi,
        mpi_plugin=plain_word("--mpi-plugin", settings["mpi_plugin"]),
        nodes=nodes,
        tasks_per_node=each,
        tasks=nodes * each if batch else _ranks(settings.get("ranks"), hosts, system),
        gpus_per_node=gpus,
        cpus_per_task=cores,
        threads=threads,
        seconds=seconds,
        signal=_warning(settings["signal"], seconds) if batch else 0,
        max_restarts=check_count("--max-restarts", settings["max_restarts"], 0) or 0,
        account=_word("--account", settings.get("account")),
        queue=_word("--queue", settings.get("partition" if system == "slurm" else "queue")),
        output=_word("--output", settings.get("output")),
        array=_array(settings.get("array"), system),
        strategy=check_strategy(settings.get("strategy")),
        hosts=hosts,
        checkpoint=checkpoint,
        survive=survive,
        env_setup=tuple(plain_line("--env-setup", line) for line in settings.get("env_setup", ())),
        directives=tuple(plain_line("--directive", line) for line in settings.get("directives", ())),
    )


def _check_survival(checkpoint: str | None, survive: bool, launcher: str, mpi: str) -> None:
    """Check that a job which goes on after failures can do so."""
    if checkpoint and launcher != "mpirun":
        raise ConfigError(
            f"job: --checkpoint: expected mpirun, which hvdx run starts again after a failure, got {launcher}. Do: "
            "--launcher mpirun"
        )
    if survive and not (checkpoint and mpi == "openmpi"):
        raise ConfigError(
            f"job: --survive: expected --checkpoint DIR and Open MPI, got {mpi}{'' if checkpoint else ' without it'}. "
            "Do: --survive --checkpoint ckpt --mpi openmpi"
        )


def parse_time(text: str) -> int:
    """Return the seconds of a time limit HH:MM:SS or DAYS-HH:MM:SS.

    Raises:
        ConfigError: if the text has neither form, or the time is zero.

    Example:
        >>> parse_time("1-12:00:00")
        129600
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups()) if match else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ConfigError(
            f"job: --time: expected HH:MM:SS or DAYS-HH:MM:SS, got {text or 'nothing'}. "
            "Do: --time 12:00:00 for twelve hours."
        )
    return total


def command_of(words: Sequence[str], system: str) -> list[str]:
    """Return the command after the options of `hvdx job SYSTEM`.

    Raises:
        ConfigError: if there is none.
    """
    command = program_of(words)
    if not command:
        raise ConfigError(f"job: expected a command after --, got none. Do: hvdx job {system} ... -- python train.py")
    if command[0].startswith("-"):
        raise ConfigError(
            f"job: expected a command after the options, got {command[0]}. "
            f"Do: check the options with hvdx job {system} --help."
        )
    return command


def check_count(what: str, value: int | None, least: int) -> int | None:
    """Return the value of the option `what`, after a check that it is at least `least`.

    Raises:
        ConfigError: if it is less.
    """
    if value is not None and value < least:
        raise ConfigError(f"job: {what}: expected {least} or more, got {value}. Do: {what} {max(least, 1)}")
    return value


def _one_of(what: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigError(f"job: {what}: expected {' or '.join(known)}, got {value!r}. Do: {what} {known[0]}")
    return value


def _word(what: str, value: str | None) -> str | None:
    return None if value is None else plain_word(what, value)


def _warning(signal: int, seconds: int) -> int:
    if not 1 <= signal < seconds:
        raise ConfigError(
            f"job: --signal: expected 1 or more seconds, fewer than the {seconds} of --time, got {signal}. "
            f"Do: --signal {max(1, min(300, seconds // 4))}"
        )
    return signal


def _array(text: str | None, system: str) -> str | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d+(-\d+(:[1-9]\d*)?)?(,\d+(-\d+(:[1-9]\d*)?)?)*(%[1-9]\d*)?", text):
        raise ConfigError(f"job: --array: expected numbers such as 1-4 or 1,3,7, got {text!r}. Do: --array 1-4")
    if system == "lsf" and any(int(number) == 0 for number in re.findall(r"(?:^|,)(\d+)", text)):
        raise ConfigError(f"job: --array: expected numbers from 1 on, as LSF requires, got {text}. Do: --array 1-4")
    return text


def check_name(name: str | None, command: Sequence[str]) -> str:
    """Return the given name, or the first 15 characters (the limit of older PBS) of the name of the script."""
    if name is not None:
        return plain_word("--name", name)
    file = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    return re.sub(r"[^A-Za-z0-9_-]", "", Path(file).stem).strip("-_")[:15] or "hvdx"


def check_strategy(text: str | None) -> str | None:
    """Return the text of --strategy, after a check that hvdx can parse it."""
    if text is not None:
        from hvdx.strategies import resolve

        resolve(text)
    return text


def _ranks(ranks: int | None, hosts: str | None, system: str) -> int:
    """Return the number of ranks of a job with a host file."""
    if not hosts:
        raise ConfigError(
            f"job: --hosts: expected a host file, got nothing. Do: hvdx job {system} --hosts hosts.txt ..."
        )
    if ranks is not None:
        return check_count("-n", ranks, 1) or 1
    try:
        slots = sum(parse_hostfile(Path(hosts).read_text()).values())
    except (OSError, UnicodeDecodeError):
        slots = 0
    if not slots:
        raise ConfigError(
            f"job: --hosts: expected a file with a host on each line, got {hosts}. "
            "Do: write the file, or give the number of ranks with -n."
        )
    return slots


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
