"""`hvdx simulate`: the strategies and codecs of hvdx on virtual workers, by a virtual clock."""

import argparse
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdx.cli.advise import LATENCY, given_link
from hvdx.cli.common.options import write_json
from hvdx.errors import ConfigError
from hvdx.log import Log

if TYPE_CHECKING:
    from hvdx.costs.types import Link, Machine
    from hvdx.simulation.training import Outcome, Setting
    from hvdx.simulation.workloads import Workload
    from hvdx.strategies import Strategy

_log = Log(__name__)

DETAILS = """\
Nothing is launched: the workers are threads of this process, of which one runs at a time. What is real: exchanges and
codecs run as they are, encode and decode every message, and their work is timed on this machine. What is virtual: a
training step takes --computing, and a transfer takes the time that the cost model of `hvdx advise` predicts for its
bytes. A collective begins when its last worker has arrived.

The workers train a small network on images of digits by SGD with momentum, with batches of their own, and a loss on
held-out data is printed at virtual times. With --elements they send updates of that size with heavy tails: of bytes and
times only. With more than 64 workers, or --elements, only some of the workers run (4, or 2 with --elements, and
whole hosts at least). The others repeat them: their messages are copies of those, and so no loss is printed. The sums
are then of repeated messages, but every message is received, checked and decoded.

Graph strategies (all_reduce, parameter_averaging) take the time of the cost model, and add up arrays of NumPy. Left out
are strategies without a common step (parameter_server, threshold:max_staleness=inf), and auto.

  hvdx simulate --slow 3:10 --strategies "all_reduce;threshold"     worker 3 is ten times slower
  hvdx simulate --slow 3:10 --balance                               and takes fewer rows of each step
  hvdx simulate --jitter 0.2 --workers 16                           computing times differ by about 20 %
  hvdx simulate --elements 25000000 --workers 256                   a model of 25 million parameters
  hvdx simulate --core-speed 4 --computing 5ms                      workers with cores four times as fast as this one

"""

_WORKERS, _BANDWIDTH, _STRATEGIES = "4,16,64", "1gbit", "all_reduce;threshold;parameter_averaging"
_COMPUTING, _STEPS, _STEPS_MADE = "20ms", 60, 30
# Real seconds of all cases together, by default.
_ALL_SECONDS = 50.0
_MOST_WORKERS, _MOST_ELEMENTS, _MOST_STEPS = 2048, 10**9, 100_000
# Largest number of workers that all run, and numbers that run in a larger world, with a model and without.
_ALL_RUN, _RUN, _RUN_MADE = 64, 4, 2
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# Largest number of workers whose rows are printed.
_FEW = 8
# Shares of the shortest training at which losses are shown.
_SHARES = (0.25, 0.5, 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "hvdx simulate [options]"
    add = parser.add_argument
    add("--workers", default=_WORKERS, metavar="N,...", help=f"numbers of workers (default: {_WORKERS})")
    add("--workers-per-host", type=int, default=1, metavar="L", help="workers that share a host's link (default: 1)")
    add("--bandwidth", default=_BANDWIDTH, metavar="RATE,...", help=f"links of a host (default: {_BANDWIDTH})")
    add("--latency", default=f"{LATENCY:g}ms", metavar="TIME", help="latency one way (default: %(default)s)")
    add("--strategies", default=_STRATEGIES, metavar="S;S", help=f"strategies (default: {_STRATEGIES})")
    add("--computing", default=_COMPUTING, metavar="TIME", help=f"computing of a step (default: {_COMPUTING})")
    add("--steps", type=int, help=f"steps of a training (default: {_STEPS}; {_STEPS_MADE} with --elements)")
    add("--elements", type=int, metavar="N", help="parameters of a model that is not trained")
    add("--hidden", type=int, default=256, metavar="N", help="hidden units of the model (default: %(default)d)")
    add("--batch", type=int, default=32, metavar="N", help="samples in a batch of a worker (default: %(default)d)")
    add("--slow", action="append", default=[], metavar="RANK:FACTOR", help="slower worker; may be repeated")
    add("--jitter", type=float, default=0.0, metavar="S", help="spread of computing, of its logarithm: 0.2")
    add("--balance", action="store_true", help="divide the rows of each step by the workers' speeds")
    add("--core-speed", type=float, default=1.0, metavar="F", help="cores of the workers / this core; inf: no work")
    add("--seed", type=int, default=0, help="seed of weights, batches and jitter (default: 0)")
    add(
        "--limit",
        type=float,
        metavar="SECONDS",
        help=f"real time of a case (default: its share of the rest of {_ALL_SECONDS:g})",
    )
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE; - prints only them")


def run(args: argparse.Namespace) -> int:
    """Simulate all cases, and print a table for each link and number of workers. Return 0.

    Raises:
        ConfigError: if an option is wrong, or a strategy cannot be simulated.
    """
    from hvdx.simulation.training import simulate

    workers, links, strategies = _checked(args)
    slow = _slow(args.slow, max(workers))
    workload = _workload(args)
    machine = _machine(args, sum(s.elements for s in workload.specs))
    total = len(workers) * len(links) * len(strategies)
    document: dict[str, Any] = {"options": _options(args), "machine": _as_dict(machine), "cases": []}
    number, end = 0, time.monotonic() + _ALL_SECONDS
    if str(args.json) != "-":
        print(_model(args, workload, workers), end="\n\n")
    for bandwidth, link in links.items():
        for count in workers:
            setting, outcomes = _setting(args, count, link, machine, slow, workload), {}
            for spelling, strategy in strategies.items():
                number += 1
                _say(f"{number} of {total}: {count} workers at {bandwidth}, {spelling}")
                begin = time.monotonic()
                # What a short case leaves of its share goes to those after it.
                limit = args.limit or max(end - begin, 1.0) / (total - number + 1)
                outcomes[spelling] = simulate(strategy, replace(setting, limit=limit), workload)
                case = {"workers": count, "bandwidth": bandwidth, "strategy": spelling}
                document["cases"].append(case | vars(outcomes[spelling]) | {"took": time.monotonic() - begin})
            if str(args.json) != "-":
                print(_section(args, count, bandwidth, outcomes), flush=True)
    write_json("simulate", args.json, document, indent=1)
    return 0


# -- options ----------------------------------------------------------------------------------------------------------


def _checked(args: argparse.Namespace) -> "tuple[list[int], dict[str, Link], dict[str, Strategy]]":
    """Return the numbers of workers, the links and the strategies; check the other options."""
    from hvdx.simulation.training import check
    from hvdx.strategies import parse

    workers = _counts(args.workers)
    args.steps = args.steps if args.steps is not None else _STEPS if args.elements is None else _STEPS_MADE
    for option, value, least, most in (
        ("--workers-per-host", args.workers_per_host, 1, _MOST_WORKERS),
        ("--steps", args.steps, 1, _MOST_STEPS),
        ("--elements", args.elements, 1, _MOST_ELEMENTS),
        ("--hidden", args.hidden, 1, 1 << 16),
        ("--batch", args.batch, 1, 1 << 16),
        ("--seed", args.seed, 0, 2**32 - 1),
    ):
        if value is not None and not least <= value <= most:
            raise ConfigError(f"simulate: {option}: expected {least} to {most}, got {value}. Do: leave it out.")
    if not 0 <= args.jitter <= 3:
        raise ConfigError(f"simulate: --jitter: expected 0 to 3, got {args.jitter:g}. Do: --jitter 0.2")
    if not args.core_speed > 0:
        raise ConfigError(
            f"simulate: --core-speed: expected a factor above 0, got {args.core_speed:g}. Do: leave it out."
        )
    if args.limit is not None and not args.limit > 0:
        raise ConfigError(f"simulate: --limit: expected more than 0, got {args.limit:g}. Do: leave it out.")
    args.computing, latency = _seconds("--computing", args.computing), _seconds("--latency", args.latency)
    links = {}
    for rate in filter(None, (part.strip().lower() for part in args.bandwidth.split(","))):
        try:
            links[rate] = given_link(rate, 1e3 * latency)
        except ConfigError as error:
            raise ConfigError(str(error).replace("advise:", "simulate:", 1)) from None
    strategies = {text: parse(text) for text in filter(None, (part.strip() for part in args.strategies.split(";")))}
    if not links or not strategies:
        raise ConfigError("simulate: expected at least one --bandwidth and one of --strategies. Do: leave them out.")
    for strategy in strategies.values():
        check(strategy)
    return workers, links, strategies


def _counts(text: str) -> list[int]:
    """Parse "4,16"."""
    try:
        counts = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        counts = []
    if not counts or any(not 1 <= count <= _MOST_WORKERS for count in counts):
        raise ConfigError(
            f"simulate: --workers: expected numbers from 1 to {_MOST_WORKERS}, got {text!r}. Do: --workers 4,16"
        )
    return sorted(set(counts))


def _seconds(option: str, text: str) -> float:
    """Parse a time such as "0.2ms"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else math.inf
    if seconds > 3600:
        raise ConfigError(
            f"simulate: {option}: expected a time such as 50us, 0.2ms or 1s, got {text!r}. Do: {option} 1ms"
        )
    return seconds


def _slow(texts: Sequence[str], most: int) -> dict[int, float]:
    """Parse "1:10"; the workers exist in the largest world."""
    found = {}
    for text in texts:
        match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)", text.strip())
        if match is None or int(match[1]) >= most or not 0 < float(match[2]) <= 1000:
            raise ConfigError(
                f"simulate: --slow: expected RANK:FACTOR, RANK below {most}, FACTOR up to 1000, got {text!r}. "
                "Do: --slow 1:10"
            )
        found[int(match[1])] = float(match[2])
    return found


def _workload(args: argparse.Namespace) -> "Workload":
    from hvdx.simulation.workloads import Digits, Made

    if args.elements is not None:
        return Made(args.elements, args.seed, args.batch)
    from hvdx.jobs.data import load

    try:
        data = load("digits")
    except ImportError as error:
        raise ConfigError(f"simulate: {error}, or give --elements, which takes no data.") from None
    train, held_out = (
        (x.reshape(len(x), -1), y) for x, y in ((data.train_x, data.train_y), (data.test_x, data.test_y))
    )
    return Digits(train, held_out, args.hidden, args.batch, args.seed)


def _machine(args: argparse.Namespace, elements: int) -> "Machine":
    """Return the speeds of a worker's machine: passes over memory and TCP of this one, times --core-speed."""
    from hvdx.costs.measure import measure_memory, measure_network
    from hvdx.costs.types import Machine

    if math.isinf(args.core_speed):
        return Machine()
    speed = args.core_speed
    message, transport = measure_network()
    return Machine(speed * measure_memory(elements), message / speed, speed * transport)


def _setting(
    args: argparse.Namespace, count: int, link: "Link", machine: "Machine", slow: dict[int, float], workload: "Workload"
) -> "Setting":
    from hvdx.costs.model import Situation
    from hvdx.simulation.training import Setting

    sizes = tuple(s.elements for s in workload.specs)
    situation = Situation(
        count, sizes, args.computing, link, machine, batch=args.batch, slots=1.0, per_host=args.workers_per_host
    )
    running = _RUN_MADE if args.elements is not None else _RUN if count > _ALL_RUN else None
    return Setting(situation, args.steps, slow, args.jitter, args.balance, args.core_speed, running, args.seed)


# -- the answer -------------------------------------------------------------------------------------------------------


def _model(args: argparse.Namespace, workload: "Workload", workers: Sequence[int]) -> str:
    """Return the sentences that name the model, and the numbers of workers that are too many for its data."""
    from hvdx.simulation.workloads import Digits

    elements = sum(s.elements for s in workload.specs)
    if not isinstance(workload, Digits):
        return f"model: updates of {elements:,} parameters; nothing is trained, so only bytes and times count"
    samples, batch = len(workload.train[0]), workload.batch
    lines = [
        f"model: a network on scikit-learn's digits, not yours: {elements:,} parameters,",
        f"{samples:,} samples, batches of {batch} a worker, {args.computing:g} s of computing a step",
    ]
    many = [count for count in workers if count * batch > samples]
    if many:
        lines += [
            f"{', '.join(map(str, many))} workers: an epoch has less than a batch for each, so these rows are about",
            "bytes and times; they are no reason to use so many workers for such data",
        ]
    return "\n".join(lines)


def _section(args: argparse.Namespace, count: int, bandwidth: str, outcomes: "dict[str, Outcome]") -> str:
    """Return the table of one number of workers and one link."""
    from hvdx.report.table import fitted, quantity
    from hvdx.simulation.training import PARTS

    shown = [part for part in PARTS if any(o.parts[part] > 5e-6 for o in outcomes.values())]
    shortest = min(o.total for o in outcomes.values())
    times = [share * shortest for share in _SHARES] if all(o.losses for o in outcomes.values()) else []
    rows = []
    for spelling, o in outcomes.items():
        losses = [f"{loss_at(o.losses, moment):.3f}" for moment in times]
        parts = [_ms(o.parts[part]) for part in shown]
        crossing = [quantity(o.crossing, "B")] if args.workers_per_host > 1 else []
        amounts = [quantity(o.sent, "B"), quantity(o.received, "B"), *crossing, quantity(o.memory, "B")]
        rows.append(
            [spelling, _ms(o.seconds), *parts, *amounts, *losses, *([f"{o.losses[-1][1]:.3f}"] if times else [])]
        )
    header = ["strategy", "ms a step", *shown, "sent", "received", *(["to hosts"] if args.workers_per_host > 1 else [])]
    header += ["memory", *(f"loss {moment:.3g} s" for moment in times), *(["at end"] if times else [])]
    running = next(iter(outcomes.values())).running
    repeated = "" if running == count else f"; {running} run, the others repeat them"
    hosts = f" on {-(-count // args.workers_per_host)} hosts" if args.workers_per_host > 1 else ""
    title = f"{count} workers{hosts} at {bandwidth}, {args.steps} steps{repeated}"
    cut = [
        f"{spelling}: {o.taken} steps, then --limit was reached"
        for spelling, o in outcomes.items()
        if o.taken < args.steps
    ]
    divided = [
        f"{spelling}: rows of a step in the end: {', '.join(map(str, o.rows))}"
        for spelling, o in outcomes.items()
        if args.balance and count <= _FEW
    ]
    return "\n".join([title, fitted(rows, header), *divided, *cut, ""])


def loss_at(losses: Sequence[tuple[float, float]], seconds: float) -> float:
    """Return the last loss at or before a time; the first one if there is none.

    Example:
        >>> loss_at([(1.0, 2.5), (2.0, 2.0), (3.0, 1.5)], 2.5)
        2.0
    """
    return next((loss for moment, loss in reversed(losses) if moment <= seconds), losses[0][1])


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("workers", "workers_per_host", "bandwidth", "latency", "strategies", "computing", "steps", "elements")
    more = ("hidden", "batch", "slow", "jitter", "balance", "seed", "limit")
    # JSON has no infinity.
    speed = args.core_speed if math.isfinite(args.core_speed) else None
    return {name: getattr(args, name) for name in (*names, *more)} | {"core_speed": speed}


def _as_dict(machine: "Machine") -> dict[str, float | None]:
    names = ("memory", "message", "transport")
    return {name: value if math.isfinite(value := getattr(machine, name)) else None for name in names}


def _say(line: str) -> None:
    _log.info(line, head="hvdx simulate: ")
