"""Plan of a comparison: its settings, checked before anything starts, and its runs in order."""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdx import foreign
from hvdx.cli.common.options import parse_hosts, parse_target
from hvdx.cli.common.processes import program_of, search_path
from hvdx.cli.emulation.switch import MAX_HOSTS, parse_rate
from hvdx.errors import ConfigError
from hvdx.report.overview import COMPARISON, ONE_WORKER, Setting
from hvdx.report.records import OUTCOME

#: Strategies that are compared by default.
STRATEGIES = (
    "all_reduce",
    "all_reduce:compression=fp16",
    "threshold",
    "parameter_averaging",
    "parameter_server:servers=colocated",
)
#: Version of compare.json.
SCHEMA = 1
#: Folder of the runs in that of the comparison.
RUNS = "runs"

# Settings that all runs of a folder have in common.
_FIXED = ("command", "epochs", "minutes", "threads", "hosts", "launcher")
_ADDED = ("strategies", "workers", "bandwidths")


@dataclass(frozen=True)
class Single:
    """One run.

    Attributes:
        asked: strategy as the user wrote it, or "one worker".
        workers: number of workers.
        bandwidth: rate of the links; None outside of the lab.
        seed: value of HVDX_SEED.
    """

    asked: str
    workers: int
    bandwidth: str | None
    seed: int

    @property
    def slug(self) -> str:
        """Name of the folder."""
        plain = re.sub(r"[^A-Za-z0-9.=_-]+", "-", self.asked).strip("-")
        if plain != self.asked.replace(" ", "-"):
            plain = f"{plain[:60]}-{hashlib.sha256(self.asked.encode()).hexdigest()[:6]}"
        return "_".join([plain, f"{self.workers}w", *([self.bandwidth] if self.bandwidth else []), f"seed{self.seed}"])

    def __str__(self) -> str:
        setting = Setting(self.workers, self.bandwidth or "")
        return f"{self.asked}, seed {self.seed}" if self.workers == 1 else f"{self.asked}, {setting}, seed {self.seed}"


@dataclass
class Plan:
    """Settings of a comparison.

    Attributes:
        command: command of a worker; {seed} stands for the seed.
        output: folder of the comparison.
        strategies: spellings.
        workers: numbers of workers.
        bandwidths: rates of the lab's links; empty outside of the lab.
        seeds: number of seeds.
        target: metric and value; None without one.
        epochs, minutes: limits of a run; None for the script's own end.
        hosts: text of --hosts; "" for this machine or a batch job.
        launcher: text of --launcher; "" for the usual one.
        threads: threads of a rank in the lab.
        timeout: seconds after which a run is ended.
        words: command line, for the report.
    """

    command: list[str]
    output: Path
    strategies: list[str] = field(default_factory=lambda: list(STRATEGIES))
    workers: list[int] = field(default_factory=lambda: [1, 2])
    bandwidths: list[str] = field(default_factory=list)
    seeds: int = 3
    target: tuple[str, float] | None = None
    epochs: int | None = None
    minutes: float | None = None
    hosts: str = ""
    launcher: str = ""
    threads: int = 1
    timeout: float = 3600.0
    words: str = ""

    def runs(self) -> list[Single]:
        """Return the runs: all settings and strategies with one seed, then with the next.

        An interrupted comparison thus has as many runs of each strategy. One worker has no link and no strategy, so its
        runs differ only in their seeds.
        """
        found = []
        rates: list[str | None] = [*self.bandwidths] or [None]
        for seed in range(self.seeds):
            found += [Single(ONE_WORKER, 1, None, seed)] if 1 in self.workers else []
            for workers in (n for n in self.workers if n > 1):
                for bandwidth in rates:
                    found += [Single(strategy, workers, bandwidth, seed) for strategy in self.strategies]
        return found

    def folder(self, single: Single) -> Path:
        """Return the folder of a run."""
        return self.output.resolve() / RUNS / single.slug

    @property
    def limit(self) -> str | None:
        """Value of HVDX_LIMIT."""
        if self.epochs is not None:
            return f"epochs:{self.epochs}"
        return f"minutes:{self.minutes:g}" if self.minutes is not None else None

    def program(self, seed: int) -> list[str]:
        """Return the command of a worker, with its path and its seed."""
        path = shutil.which(self.command[0], path=search_path()) or self.command[0]
        return [path, *(word.replace("{seed}", str(seed)) for word in self.command[1:])]


def check(plan: Plan) -> dict[str, str]:
    """Check a plan before anything starts.

    Returns:
        For each strategy, the call that makes it.

    Raises:
        ConfigError: if a strategy or the program is unknown, or there is nothing to do.
    """
    from hvdx.strategies.registry import resolve

    made = {strategy: repr(resolve(strategy)) for strategy in plan.strategies}
    if shutil.which(plan.command[0], path=search_path()) is None:
        raise ConfigError(
            f"compare: {plan.command[0]}: expected a program, got a name that is not found. "
            "Do: check its spelling, and that it is executable."
        )
    if any(number > 1 for number in plan.workers) and not plan.strategies:
        raise ConfigError("compare: --strategies: expected one or more, got none. Do: leave it out for the usual five.")
    return made


def store(plan: Plan) -> None:
    """Write compare.json, after a check that the folder has no runs of another program.

    Raises:
        ConfigError: if it has, or the folder cannot be written.
    """
    path = plan.output / COMPARISON
    old = _read(path)
    new = _content(plan)
    if old and any((plan.output / RUNS).glob(f"*/{OUTCOME}")):
        _check_same(old, new, plan.output)
        for name in _ADDED:
            new[name] = list(dict.fromkeys([*old.get(name, []), *new[name]]))
        new["seeds"] = max(int(old.get("seeds", 0)), plan.seeds)
    try:
        write_whole(path, new)
    except OSError as error:
        raise ConfigError(
            f"compare: --output: expected a folder that can be written, got {plan.output}: {error.strerror}. "
            "Do: choose another folder."
        ) from error


def _content(plan: Plan) -> dict[str, Any]:
    values = asdict(plan)
    target = {"metric": plan.target[0], "value": plan.target[1]} if plan.target else None
    kept = {name: values[name] for name in (*_FIXED, *_ADDED, "seeds")}
    return {"schema": SCHEMA, **kept, "target": target, "hvdx_command": plan.words, "files": _files(plan.command)}


def _files(command: Sequence[str]) -> dict[str, str]:
    """Return hashes of the Python files of a command, so that an edited script is noticed."""
    files = [word for word in command if word.endswith(".py") and os.path.isfile(word)]
    return {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in files}


def _check_same(old: dict[str, Any], new: dict[str, Any], folder: Path) -> None:
    remedy = "Do: choose another folder with --output, or delete this one."
    for name in _FIXED:
        if name in old and old[name] != new[name]:
            shown = [shlex.join(v) if isinstance(v, list) else v for v in (old[name], new[name])]
            raise ConfigError(
                f"compare: {folder} has runs of another {name}: expected {shown[0]}, got {shown[1]}. {remedy}"
            )
    edited = [name for name, digest in new["files"].items() if old.get("files", {}).get(name, digest) != digest]
    if edited:
        raise ConfigError(
            f"compare: {folder} has runs of an earlier {edited[0]}: expected the same file, got an edited one. {remedy}"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(foreign.read(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, all of it or nothing.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with part.open("x") as file:  # "x" does not follow a link
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


_EXAMPLE = "hvdx compare -n 1,2 -- python train.py"


def plan_of(args: argparse.Namespace) -> Plan:
    """Check the options, and make the plan.

    Raises:
        ConfigError: if an option is wrong.
    """
    command = program_of(args.program)
    if not command or command[0].startswith("-"):
        got = command[0] if command else "none"
        raise ConfigError(f"compare: expected a command after the options, got {got}. Do: {_EXAMPLE}")
    if args.hosts and args.bandwidth:
        raise ConfigError("compare: expected --hosts or --bandwidth, got both. Do: leave out one of the two.")
    if args.launcher and (args.hosts or args.bandwidth):
        raise ConfigError("compare: --launcher: expected no --hosts and no --bandwidth, got one. Do: leave it out.")
    _check_launcher(args.launcher)
    for name, least in (("seeds", 1), ("epochs", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"compare: --{name}: expected {least} or more, got {value}. Do: --{name} 3")
    for name in ("minutes", "timeout"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"compare: --{name}: expected a number above 0, got {value:g}. Do: --{name} 10")
    return Plan(
        command=command,
        output=args.output,
        strategies=_listed(args.strategies, ";") or list(STRATEGIES),
        workers=_workers(args),
        bandwidths=_rates(args.bandwidth),
        seeds=args.seeds,
        target=parse_target(args.target) if args.target else None,
        epochs=args.epochs,
        minutes=args.minutes,
        hosts=args.hosts or "",
        launcher=args.launcher or "",
        threads=args.threads,
        timeout=args.timeout,
        words=_words(args, command),
    )


def _listed(text: str | None, separator: str) -> list[str]:
    return list(dict.fromkeys(filter(None, (part.strip() for part in (text or "").split(separator)))))


def _workers(args: argparse.Namespace) -> list[int]:
    room = sum(parse_hosts(args.hosts, "compare").values()) if args.hosts else MAX_HOSTS if args.bandwidth else 1 << 20
    if args.workers is None:
        return sorted({1, room}) if args.hosts else [1, 2]
    words = _listed(args.workers, ",")
    if not words or not all(word.isdecimal() and 1 <= int(word) <= room for word in words):
        raise ConfigError(
            f"compare: -n: expected numbers of workers from 1 to {room}, joined by commas, got {args.workers!r}. "
            "Do: -n 1,2"
        )
    return sorted({int(word) for word in words})


def _check_launcher(text: str | None) -> None:
    if text is None:
        return
    try:
        words = shlex.split(text)
    except ValueError as error:
        words, reason = [], f" ({error})"
    else:
        reason = ""
    if not words:
        raise ConfigError(
            f"compare: --launcher: expected a command, got {text!r}{reason}. Do: --launcher 'srun -n {{n}}'"
        )


def _rates(text: str | None) -> list[str]:
    if text is None:
        return []
    rates = _listed(text.lower(), ",")
    for rate in rates or [""]:
        parse_rate(rate)
    return rates


def _words(args: argparse.Namespace, command: list[str]) -> str:
    """Return the command line that repeats the comparison."""
    words = ["hvdx", "compare"]
    options = ("strategies", "bandwidth", "hosts", "launcher", "seeds", "target", "epochs", "minutes", "threads")
    defaults = {"seeds": 3, "threads": 1}
    words += ["-n", args.workers] if args.workers else []
    for name in (*options, "timeout", "output"):
        value = getattr(args, name)
        if value is not None and value != defaults.get(name):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, "--", *command])
