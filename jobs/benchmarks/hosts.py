"""Several workers on a host: bytes between hosts and time of a step, with and without sums on the hosts.

    python jobs/benchmarks/hosts.py                                        four hosts of two workers at 100mbit
    python jobs/benchmarks/hosts.py --hosts 2 --ranks 4 --bandwidth 1gbit --density auto

Emulated hosts (`hvdx lab`) train a dense network on Fashion-MNIST, 64 images per step on each worker, under
`Threshold(local="none")` and `Threshold(local="dense")`, in turns. The table shows the mean step on rank 0; the bytes
that the links of all hosts carried in a step; both relative to "none"; the bytes that a worker sent inside its host;
the test accuracy at the end; and the mean milliseconds of each part of the exchange. The row "no exchange" is a lower
bound: the same training, whose workers wait for each other in every step, and exchange nothing else.

With --local-only, the ranks of this machine only add up updates as the ranks of a host do, without training: once by
messages, and once in memory that they share, as hvdx does where it can.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from hvdx.comm import Channel, Comm
from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity, render
from hvdx.strategies import HostExchange, StepInput, TensorSpec, Threshold
from hvdx.strategies.telemetry import Telemetry

#: Values of `local`, in the order of a round, and the training without an exchange.
KINDS = ("none", "dense", "no exchange")
# Steps before anything is counted: compiling, and most of an automatic density's search.
_SETTLING = 40
_PARTS = ("encoding", "waiting", "exchanging", "decoding")


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--hosts", type=int, default=4, metavar="N", help="number of emulated hosts")
    add("--ranks", type=int, default=2, metavar="K", help="workers on each host")
    add("--bandwidth", default="100mbit", metavar="RATE", help="bandwidth of the links")
    add("--density", default="0.01", metavar="SHARE", help="target density, or auto")
    add("--rounds", type=int, default=1, metavar="N", help="trainings under each strategy")
    add("--steps", type=int, default=60, metavar="N", help="measured steps of a training")
    add("--hidden", type=int, default=1024, metavar="N", help="units in each of two hidden layers")
    add("--local-only", type=harness.several(harness.size), metavar="N,N", help="elements of updates to add up")
    return harness.run(parser, compare, work, argv)


def compare(options: argparse.Namespace) -> int:
    """Run all kinds in turns, and print a table."""
    if options.local_only:
        return compare_sums(options)
    rows: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        for kind in KINDS:
            given = {"kind": kind, "seed": 0} | {n: getattr(options, n) for n in ("density", "hidden", "steps")}
            ranks = harness.launch(__file__, given, options.hosts, options.bandwidth, per_host=options.ranks).ranks
            row = {"local": kind} | ranks[0] | {"between": sum(r["between"] for r in ranks) / options.ranks}
            rows.append(row)
            print(f"{kind}: {row['ms']:.1f} ms, {quantity(row['between'], 'B')}", file=sys.stderr, flush=True)
            shape = {"hosts": options.hosts, "ranks_per_host": options.ranks, "bandwidth": options.bandwidth}
            harness.write(options.json, shape | {"density": options.density, "rows": rows})
    print(text(rows))
    return 0


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table, with medians over the rounds."""

    def middle(kind: str, name: str) -> float:
        return median(row[name] for row in rows if row["local"] == kind)

    cells = [
        [
            kind if kind == KINDS[-1] else f"local={kind}",
            f"{middle(kind, 'ms'):.1f}",
            f"{middle(kind, 'ms') / middle('none', 'ms'):.2f}",
            quantity(middle(kind, "between"), "B"),
            f"{middle(kind, 'between') / middle('none', 'between'):.2f}",
            quantity(middle(kind, "inside"), "B"),
            f"{middle(kind, 'density'):.2g}",
            f"{middle(kind, 'accuracy'):.2f}",
            *(f"{middle(kind, part):.2f}" for part in _PARTS),
        ]
        for kind in KINDS
    ]
    header = ["strategy", "ms a step", "ratio", "between hosts", "ratio", "inside", "density", "accuracy %", *_PARTS]
    return render(cells, header)


def work(given: argparse.Namespace) -> dict[str, Any]:
    """Train under one strategy, or add up updates."""
    if hasattr(given, "elements"):
        return add_up(given)
    import hvdx

    hvdx.init()
    model, data, test, _ = harness.mlp(given)
    if given.kind == KINDS[-1]:
        distribute = hvdx.keras.Distribute(NoExchange(tau=1.0), check_every=None)
    else:
        distribute = hvdx.keras.Distribute(f"threshold:target_density={given.density},local={given.kind}")
    names = ("inside", "entries", "encoded", *_PARTS)

    def read() -> dict[str, float]:
        cost = distribute.cost()
        return {name: getattr(cost, name) for name in names} | {"link": harness.link_bytes("tx")}

    watch = harness.step_watch(_SETTLING, read)
    model.fit(
        data.repeat(), steps_per_epoch=_SETTLING + given.steps, shuffle=False, verbose=0, callbacks=[distribute, watch]
    )
    result = model.evaluate(test, verbose=0, return_dict=True)
    (first, last), steps = (watch.totals[0], watch.totals[-1]), given.steps
    return {
        "ms": 1e3 * fmean(watch.seconds[_SETTLING:]),
        "between": (last["link"] - first["link"]) / steps,
        "inside": (last["inside"] - first["inside"]) / steps,
        "density": (last["entries"] - first["entries"]) / max(last["encoded"] - first["encoded"], 1),
        "accuracy": 100 * result["accuracy"],
    } | {part: 1e3 * (last[part] - first[part]) / steps for part in _PARTS}


class NoExchange(Threshold):
    """`Threshold` whose ranks apply their own updates, and wait for each other in every step."""

    def open(self, comm: Comm, specs: Sequence[TensorSpec], momentum: float = 0.0, name: str = "") -> HostExchange:
        """Return an exchange that sends headers only."""
        return _Own(specs, Telemetry(), comm.channel("the steps"))


class _Own(HostExchange):
    def __init__(self, specs: Sequence[TensorSpec], telemetry: Telemetry, channel: Channel):
        super().__init__(specs, telemetry)
        self._channel = channel

    def combine(self, given: StepInput) -> list[np.ndarray]:
        self.telemetry.steps += 1
        self._channel.exchange([])
        return list(given.tensors)


# -- sums on one host -------------------------------------------------------------------------------------------------


def compare_sums(options: argparse.Namespace) -> int:
    """Time both ways to add up updates on one host, and print a table."""
    rows = []
    for elements in options.local_only:
        given = {"elements": elements, "rounds": options.steps}
        ranks = harness.launch(__file__, given, options.ranks).ranks
        slowest = {name: max(r[name] for r in ranks) for name in ranks[0]}
        rows.append({"elements": elements, "ranks": options.ranks} | slowest)
    harness.write(options.json, {"rows": rows})
    ways = ("messages", "memory", "pass")
    cells = [[f"{r['elements']:,}", str(r["ranks"]), *(f"{r[way]:.2f}" for way in ways)] for r in rows]
    print(render(cells, ["elements", "ranks", "messages, ms", "shared memory, ms", "one pass, ms"]))
    return 0


def add_up(given: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds of a sum over the ranks by each way, and of one pass over an update."""
    import hvdx
    from hvdx.comm import world
    from hvdx.strategies.threshold.dealing import Dealing
    from hvdx.strategies.threshold.host_sums import MessageSums, SharedSums, open_sums

    hvdx.init()
    channel = world.start().channel("sums")
    messages = MessageSums(channel, Dealing([given.elements], channel.size))
    memory = open_sums(channel, [given.elements])
    if not isinstance(memory, SharedSums):
        sys.exit("hosts: --local-only: expected ranks that can share memory; see the line above.")
    update, copy = np.ones(given.elements, np.float32), np.zeros(given.elements, np.float32)
    piece = np.zeros(int(np.diff(messages.parts.bounds)[channel.rank]), np.float32)

    def add(sums: MessageSums | SharedSums) -> None:
        sums.offer([update])
        channel.exchange([0])
        sums.add_up([update], piece)
        channel.exchange([0])
        sums.gather(piece)

    return {
        "messages": _milliseconds(channel, given.rounds, lambda: add(messages)),
        "memory": _milliseconds(channel, given.rounds, lambda: add(memory)),
        "pass": _milliseconds(channel, given.rounds, lambda: np.copyto(copy, update)),
    }


def _milliseconds(channel: Channel, rounds: int, work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(rounds):
        channel.exchange([0])
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * median(seconds[2:])


if __name__ == "__main__":
    sys.exit(main())
