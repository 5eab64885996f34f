"""Plan of a batch job: the options of `hvdx job` combined with the site file, and checked."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdx.cli.batch.template import plain_line, plain_word
from hvdx.cli.common.hostfile import parse_hostfile
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
        words: the command line, for the script's first lines.

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
    script = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    return re.sub(r"[^A-Za-z0-9_-]", "", Path(script).stem).strip("-_")[:15] or "hvdx"


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
