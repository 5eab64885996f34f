"""`hvdx advise`: which strategy on how many workers, predicted in two minutes without a training."""

import argparse
import functools
import shlex
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdx.cli.commands import COMMANDS
from hvdx.cli.common.options import parse_hosts, write_json
from hvdx.cli.common.processes import program_of
from hvdx.cli.common.termination import TERMINATED, TerminatedError, sigterm_raises
from hvdx.cli.emulation.switch import parse_rate
from hvdx.comm.launcher import usable_memory
from hvdx.errors import ConfigError
from hvdx.log import Log

if TYPE_CHECKING:
    from hvdx.cli.advising.answer import Answer
    from hvdx.cli.advising.script import Training
    from hvdx.costs.model import Situation
    from hvdx.costs.types import Link, Machine

_log = Log(__name__)

NAME = "advise"
EXAMPLE = COMMANDS["advise"].example
DETAILS = """\
The script runs alone for some steps, unchanged; it needs the callback hvdx.keras.Distribute(). Then the speeds of this
machine are measured, and a cost model predicts a step under each strategy. With --hosts, or inside a batch job, the
link is measured; otherwise --bandwidth gives it. The predictions are of time. They do not say how well a strategy
learns: `hvdx compare` measures that. Strategies that need more memory than this machine has are left out.

  hvdx advise --hosts node1:2,node2:2 -- python train.py           measure the link between two hosts, and their speeds
  hvdx advise --bandwidth 10mbit,1gbit -n 8 -- python train.py     two networks that you do not have

Exit code 0: several workers are worth it on at least one link; 1: one worker learns as fast; 2: an error.

"""

#: Bandwidth that is assumed if none is given and none can be measured.
ASSUMED = "1gbit"
#: One-way latency in milliseconds that is assumed with --bandwidth: that of a network of Ethernet switches.
LATENCY = 0.1
# TCP carries 1448 bytes in a frame of 1514.
_PAYLOAD = 1448 / 1514
# Numbers of workers for which the best strategy is shown, and those of the full table by default.
_LINE = tuple(2**k for k in range(11))
_DEFAULT = (2, 4)
_MOST = 1 << 20
_TIMEOUT = 90.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "hvdx advise [options] -- COMMAND [ARGUMENT ...]"
    add = parser.add_argument
    add("-n", dest="workers", metavar="N,N,...", help="numbers of workers (default: 2,4, or the sum of --hosts)")
    add("--bandwidth", metavar="RATE,...", help="bandwidths of the link of each host: 10mbit,100mbit,1gbit")
    add("--latency", type=float, metavar="MS", help=f"latency one way, with --bandwidth (default: {LATENCY:g})")
    add("--hosts", metavar="HOST:N,...", help="hosts with their numbers of workers: measure the link between them")
    add("--workers-per-host", type=int, metavar="K", help="workers that share a host and its link (default: 1)")
    add("--timeout", type=float, default=_TIMEOUT, metavar="SECONDS", help="time for the script (default: %(default)g)")
    add("--json", type=Path, metavar="FILE", help="also write the predictions to FILE; - prints only them")
    add("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="command of the script")


def run(args: argparse.Namespace) -> int:
    """Measure, predict and print. Return 0 if several workers are worth it, 1 if one worker learns as fast.

    Raises:
        ConfigError: if an option is wrong, or the script wrote no record.
        LaunchError: if the script or a measurement fails.
    """
    words = program_of(args.program)
    if not words or words[0].startswith("-"):
        raise ConfigError(f"advise: expected a command after the options, got {words[:1] or 'none'}. Do: {EXAMPLE}")
    hosts = parse_hosts(args.hosts, NAME)
    if len(hosts) == 1:
        raise ConfigError("advise: --hosts: expected two hosts or more, got one. Give --workers-per-host instead.")
    per_host = args.workers_per_host or max(hosts.values(), default=1)
    if per_host < 1:
        raise ConfigError(f"advise: --workers-per-host: expected 1 or more, got {per_host}. Do: leave it out for 1.")
    if not args.timeout > 0:
        raise ConfigError(f"advise: --timeout: expected seconds above 0, got {args.timeout}. Do: leave it out.")
    workers = _counts(args.workers) or ([sum(hosts.values())] if sum(hosts.values()) > 1 else list(_DEFAULT))
    configured = _links(args.bandwidth, args.latency)
    # Killed at once, so that no copy of the script stays behind.
    try:
        with sigterm_raises():
            measured = _measure(words, per_host, args.timeout)
            links, seconds = (configured, ()) if configured else _probed(list(hosts), measured[0].elements)
    except TerminatedError:
        return TERMINATED
    return _report(args, words, workers, per_host, measured, links, seconds)


def _counts(text: str | None) -> list[int]:
    """Parse "2,4"."""
    try:
        counts = [int(part) for part in (text or "").split(",") if part]
    except ValueError:
        counts = [0]
    if any(not 1 <= count <= _MOST for count in counts):
        raise ConfigError(f"advise: -n: expected numbers from 1 to {_MOST}, got {text!r}. Do: -n 2,4")
    return sorted(set(counts))


def _links(text: str | None, latency: float | None) -> dict[str, "Link"]:
    """Return the links that the options give, by the spelling of their bandwidth."""
    if latency is not None and not 0 <= latency <= 10_000:
        raise ConfigError(f"advise: --latency: expected 0 to 10000 milliseconds, got {latency}. Do: --latency 0.1")
    milliseconds = LATENCY if latency is None else latency
    rates = [part.strip().lower() for part in (text or "").split(",") if part]
    return {rate: given_link(rate, milliseconds) for rate in rates}


def given_link(bandwidth: str, latency: float = LATENCY) -> "Link":
    """Return the link of a bandwidth that was not measured.

    Args:
        bandwidth: rate in the spelling of `hvdx lab`; "none" for a link that is faster than any machine.
        latency: milliseconds one way.

    Raises:
        ConfigError: if the bandwidth has another form.
    """
    from hvdx.costs.types import Link

    try:
        rate = parse_rate(bandwidth)
    except ConfigError as error:
        raise ConfigError(str(error).replace("lab:", "advise:", 1)) from None
    return Link(latency / 1000, float("inf") if rate is None else rate / 8 * _PAYLOAD)


def _probed(hosts: Sequence[str], elements: int) -> tuple[dict[str, "Link"], Sequence[tuple[str, float]]]:
    """Measure the hosts, or those of the batch job: their link, and their speeds; without either, assume a link."""
    from hvdx.cli.advising import machine

    if hosts or machine.job_size() > 1:
        _say("measuring the link between the hosts, and their speeds")
        found = machine.probe(hosts, elements)
        return {f"{8e-6 * found.link.bandwidth:.0f}mbit": found.link}, found.seconds
    _say(f"no --bandwidth, no --hosts, and no batch job: assuming a link of {ASSUMED}. Give --bandwidth for yours.")
    return {ASSUMED: given_link(ASSUMED)}, ()


def _measure(words: Sequence[str], per_host: int, timeout: float) -> "tuple[Training, Training, Machine]":
    """Run the script alone, and with as many copies as share a host; measure this machine.

    Returns:
        The training alone, a copy beside the others, and the machine.
    """
    from hvdx.cli.advising import machine, script

    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvdx-advise-") as folder:
        _say(f"running {script.STEPS} steps on one worker: {shlex.join(words)}")
        alone = shared = _together(script.run_copies(words, _made(folder, "alone"), 1, timeout))
        if per_host > 1:
            _say(f"running {per_host} copies at once, which share this machine")
            shared = _together(script.run_copies(words, _made(folder, "shared"), per_host, timeout))
    _say(f"measuring this machine ({time.monotonic() - begin:.0f} s so far)")
    return alone, shared, machine.measure(alone.elements, per_host)


def _made(folder: str, name: str) -> Path:
    path = Path(folder, name)
    path.mkdir()
    return path


def _together(found: "Sequence[Training]") -> "Training":
    """Return the training of the copy with the median step."""
    return sorted(found, key=lambda training: training.computing)[len(found) // 2]


def _report(
    args: argparse.Namespace,
    words: Sequence[str],
    workers: Sequence[int],
    per_host: int,
    measured: "tuple[Training, Training, Machine]",
    links: "dict[str, Link]",
    seconds: Sequence[tuple[str, float]],
) -> int:
    """Predict for each link, print, and write the JSON file."""
    from hvdx.cli.advising import answer
    from hvdx.costs.model import one_worker

    alone, shared, machine = measured
    most = answer.most_workers(alone)
    # Numbers that the user gives may leave a worker a single batch.
    limit = alone.batches if args.workers or args.hosts or most is None else min(alone.batches, max(2, most))
    fits = [count for count in workers if count <= (limit or count)]
    if not fits:
        raise ConfigError(
            f"advise: -n: expected at most {alone.batches} workers, one for each batch of an epoch of the script, got "
            f"{min(workers)}: a worker would have less than a batch. Do: -n {max(1, alone.batches // 2)}, or raise the "
            "script's steps_per_epoch= if its epochs are shorter than its data."
        )
    document: dict[str, Any] = {
        "command": list(words),
        "training": _facts(alone, shared),
        "links": [],
        "hosts": dict(seconds),
    }
    memory = answer.Memory(max(alone.memory, shared.memory), usable_memory() / per_host)
    advices, texts = [], [_head(alone, shared, machine, per_host)]
    worth = False
    for bandwidth, link in links.items():
        single = one_worker(answer.situation_of(alone, machine, link, 1, per_host))
        situation = answer.situation_of(shared, machine, link, max(workers), per_host)
        answers = answer.line_of_workers(situation, fits, bandwidth, single, memory)
        shown = [count for count in _LINE if count <= (most or count)]
        line = answer.line_of_workers(situation, shown, bandwidth, single, memory)
        worth = worth or any(a.best != answer.ALONE for a in answers)
        advice = answer.advice(answers, shlex.join(words), f" --hosts {args.hosts}" if args.hosts else "")
        advices.append(f"At {bandwidth}:\n{advice}")
        texts.append(_section(situation, answers, line))
        texts += filter(None, [answer.wrapped(answer.data_text(alone, [*workers, *_LINE]))])
        document["links"].append(
            {
                "bandwidth": bandwidth,
                "latency": link.latency,
                "bytes_per_second": answer.bytes_per_second(situation),
                "relative_transfer": answer.relative_transfer(situation),
                "chart_line": answer.chart_line(situation),
                "answers": [a.as_dict() for a in answers],
                "line": [_point(a) for a in line],
            }
        )
    if args.json is None or str(args.json) != "-":
        unequal = answer.speeds_text(seconds, alone.batch)
        print("\n\n".join([*advices, *filter(None, [answer.wrapped(unequal)]), *texts]))
    write_json("advise", args.json, document)
    return 0 if worth else 1


def _point(found: "Answer") -> dict[str, Any]:
    """Return the best strategy of a number of workers for JSON."""
    from hvdx.cli.advising import answer

    facts = {"workers": found.workers, "best": found.best, "speedup": found.speedup(found.best)}
    return facts | {"note": found.fastest.note, "basis": answer.basis(found.workers, found.best)}


def _facts(alone: "Training", shared: "Training") -> dict[str, Any]:
    return {
        "parameters": alone.elements,
        "batch": alone.batch,
        "seconds_a_step": alone.computing,
        "seconds_a_step_shared": shared.computing,
        "optimizer_slots": alone.slots,
        "memory": alone.memory,
        "backend": alone.backend,
    }


def _head(alone: "Training", shared: "Training", machine: "Machine", per_host: int) -> str:
    """Return the lines with the measurements."""
    from hvdx.report.table import WIDTH, quantity

    codec = machine.codec
    step = f"{1e3 * alone.computing:.3g} ms a step on one worker (median of {alone.steps}, +-{1e3 * alone.spread:.2g})"
    if per_host > 1:
        step += f"; {1e3 * shared.computing:.3g} ms with {per_host} workers on the host"
    wrapped = functools.partial(textwrap.fill, width=WIDTH, subsequent_indent=" " * 10)
    lines = [
        f"script    {alone.name or 'a model'}: {alone.elements:,} trained parameters, {alone.batch or '?'} samples a "
        f"step and worker{', ' * bool(alone.backend)}{alone.backend}",
        f"          {step}",
        f"machine   {quantity(machine.memory, 'B/s')} of memory, {quantity(machine.transport, 'B/s')} and "
        f"{1e6 * machine.message:.0f} us a message of TCP",
        f"codec     encodes {quantity(1 / max(codec.encode_element + 0.01 * codec.encode_entry, 1e-12), 'elements/s')}"
        " at density 0.01",
    ]
    return "\n".join(map(wrapped, lines))


def _section(situation: "Situation", answers: "Sequence[Answer]", line: "Sequence[Answer]") -> str:
    """Return the tables for one link."""
    from hvdx.cli.advising import answer

    network = situation.link
    bandwidth, transfer = answer.bytes_per_second(situation), answer.relative_transfer(situation)
    texts = [
        answer.wrapped(
            f"link {answers[0].bandwidth}: {8e-6 * bandwidth:.4g} Mbit/s for data, {1e3 * network.latency:.3g} ms. "
            f"To transfer the gradients once takes {transfer:.2g} times as long as computing."
        )
    ]
    for found in answers:
        plural = "s" * (found.workers > 1)
        texts.append(f"{found.workers} worker{plural} at {found.bandwidth}\n{answer.table(found)}")
    texts.append(f"best strategy by the number of workers at {answers[0].bandwidth}\n{answer.best_table(line)}")
    texts += filter(None, [answer.wrapped(answer.basis_text([*answers, *line]))])
    texts.append(answer.chart_text(situation))
    return "\n\n".join(texts)


def _say(line: str) -> None:
    _log.info(line, head="hvdx advise: ")
