"""Options of `hvdx compare` as a plan."""

import argparse
import math
import shlex

from hvdx.cli.common.processes import program_of
from hvdx.cli.comparing.plan import STRATEGIES, Plan
from hvdx.cli.emulation.network import MAX_HOSTS, parse_rate
from hvdx.cli.report import parse_target
from hvdx.cli.run import parse_hosts
from hvdx.errors import ConfigError

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
