"""What a batch job is to be: the options of `hvdx job` and the site file put together, and checked."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdx.cli.batch.template import plain_line, plain_word
from hvdx.cli.common.processes import program_of
from hvdx.errors import ConfigError

#: system: its launchers, the default first.
LAUNCHERS = {
    "slurm": ("srun", "mpirun"),
    "pbs": ("mpirun",),
    "lsf": ("mpirun", "jsrun"),
    "mpirun": ("mpirun",),
    "horovodrun": ("horovodrun",),
}
#: Systems with a queue; the others start at once, on the hosts of a file.
BATCH = ("slurm", "pbs", "lsf")
#: Whose mpirun: it decides how hosts, cores and variables are spelled.
VENDORS = ("openmpi", "mpich", "intel")

#: What holds where neither an option nor the site file says anything. 300 seconds: room to save a large network on a
#: busy file system, small against the hours of a job. 100 restarts: no run that gets on needs as many, and a run that
#: does not is stopped some time.
DEFAULTS = {"signal": 300, "max_restarts": 100, "mpi": "openmpi", "mpi_plugin": "pmix"}


@dataclass(frozen=True)
class Plan:
    """One job.

    Attributes:
        system: one of `LAUNCHERS`.
        name: of the job.
        command: what every rank runs.
        made_by: the command line that asked for the script.
        launcher, mpi, mpi_plugin: how ranks are started.
        nodes, tasks_per_node: hosts, and ranks on each; for host files `tasks` alone counts.
        tasks: all ranks.
        gpus_per_node: 0 for none.
        cpus_per_task: cores for each rank; None leaves it to the system.
        threads: OMP_NUM_THREADS; None leaves it to hvdx.
        seconds: how long the job may run; 0 without a limit.
        signal: seconds before the end at which training is told to save.
        max_restarts: how often the job may go back into the queue.
        account, queue, output, array, strategy, hosts: None where not given.
        env_setup, directives: lines.
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
    env_setup: tuple[str, ...]
    directives: tuple[str, ...]


def make_plan(args: argparse.Namespace, site: Mapping[str, Any], words: Sequence[str]) -> Plan:
    """Put options, site file and defaults together; options win.

    Args:
        args: the options; None, or not there, where not given.
        site: what `site.settings` found.
        words: the command line that asked, for the script's first lines.

    Raises:
        ConfigError: something that is missing, or not what it should be.
    """
    options = {key: value for key, value in vars(args).items() if value is not None}
    given = {**DEFAULTS, **site, **options}
    system = given["system"]
    command = _command(given.get("program", []), system)
    batch = system in BATCH
    gpus = _count("--gpus-per-node", given.get("gpus_per_node"), 0) or 0
    nodes = _count("--nodes", given.get("nodes"), 1) or 1
    each = _count("--tasks-per-node", given.get("tasks_per_node"), 1) or gpus or 1
    threads = _count("--threads", given.get("threads"), 1)
    cores = _count("--cpus-per-task", given.get("cpus_per_task"), 1)
    if "cpus_per_task" not in options:
        # What the site file says for all jobs is no match for threads that this one asks for.
        cores = options.get("threads") or cores or threads
    seconds = parse_time(given.get("time") or "") if batch else 0
    hosts = None if batch else given.get("hosts")
    return Plan(
        system=system,
        name=_name(given.get("name"), command),
        command=tuple(command),
        # In a comment: it has to stay one line.
        made_by=" ".join(" ".join(words).split()),
        launcher=_one_of("--launcher", given.get("launcher", LAUNCHERS[system][0]), LAUNCHERS[system]),
        mpi=_one_of("--mpi", given["mpi"], VENDORS),
        mpi_plugin=plain_word("--mpi-plugin", given["mpi_plugin"]),
        nodes=nodes,
        tasks_per_node=each,
        tasks=nodes * each if batch else _ranks(given.get("ranks"), hosts, system),
        gpus_per_node=gpus,
        cpus_per_task=cores,
        threads=threads,
        seconds=seconds,
        signal=_warning(given["signal"], seconds) if batch else 0,
        max_restarts=_count("--max-restarts", given["max_restarts"], 0) or 0,
        account=_word("--account", given.get("account")),
        queue=_word("--queue", given.get("partition" if system == "slurm" else "queue")),
        output=_word("--output", given.get("output")),
        array=_array(given.get("array"), system),
        strategy=_strategy(given.get("strategy")),
        hosts=hosts,
        env_setup=tuple(plain_line("--env-setup", line) for line in given.get("env_setup", ())),
        directives=tuple(plain_line("--directive", line) for line in given.get("directives", ())),
    )


def parse_time(text: str) -> int:
    """Seconds of a time limit.

    Args:
        text: HH:MM:SS or DAYS-HH:MM:SS.

    Raises:
        ConfigError: it is neither, or no time at all.

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


def count_slots(text: str) -> int:
    """How many ranks a host file has room for.

    Args:
        text: its content: `host slots=4` (Open MPI, Horovod), `host:4` (MPICH, Intel), or `host`, one a line.

    Example:
        >>> count_slots("node1 slots=4  # the new one\\nnode2:2\\nnode3\\n")
        7
    """
    total = 0
    for line in text.splitlines():
        entry = line.partition("#")[0].strip()
        if entry:
            slots = re.search(r"(?:\bslots\s*=\s*|^[^\s:]+:)(\d+)", entry)
            total += int(slots.group(1)) if slots else 1
    return total


def _command(words: Sequence[str], system: str) -> list[str]:
    command = program_of(words)
    if not command:
        raise ConfigError(f"job: expected a command after --, got none. Do: hvdx job {system} ... -- python train.py")
    if command[0].startswith("-"):
        raise ConfigError(
            f"job: expected a command after the options, got {command[0]}. "
            f"Do: hvdx job {system} --help, which lists the options."
        )
    return command


def _count(what: str, value: int | None, least: int) -> int | None:
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
        raise ConfigError(f"job: --array: expected numbers from 1 on, which LSF wants, got {text}. Do: --array 1-4")
    return text


def _name(name: str | None, command: Sequence[str]) -> str:
    """The one given, or that of the script; 15 characters of it, since older PBS takes no more."""
    if name is not None:
        return plain_word("--name", name)
    script = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    return re.sub(r"[^A-Za-z0-9_-]", "", Path(script).stem).strip("-_")[:15] or "hvdx"


def _strategy(text: str | None) -> str | None:
    """The spelling, once hvdx has understood it: better now than after a night in the queue."""
    if text is not None:
        from hvdx.strategies import resolve

        resolve(text)
    return text


def _ranks(ranks: int | None, hosts: str | None, system: str) -> int:
    """All ranks of a job with a host file."""
    if not hosts:
        raise ConfigError(
            f"job: --hosts: expected a host file, got nothing. Do: hvdx job {system} --hosts hosts.txt ..."
        )
    if ranks is not None:
        return _count("-n", ranks, 1) or 1
    try:
        slots = count_slots(Path(hosts).read_text())
    except (OSError, UnicodeDecodeError):
        slots = 0
    if not slots:
        raise ConfigError(
            f"job: --hosts: expected a file with a host on each line, got {hosts}. "
            "Do: write it, or say with -n how many ranks there will be."
        )
    return slots
