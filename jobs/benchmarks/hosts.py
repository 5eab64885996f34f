"""Several workers on a host: bytes between hosts and time of a step, with and without sums on the hosts.

    python jobs/benchmarks/hosts.py                                        four hosts of two workers at 100mbit
    python jobs/benchmarks/hosts.py --hosts 2 --ranks 4 --bandwidth 1gbit --density auto

Emulated hosts (`hvdx lab`) train a dense network on Fashion-MNIST, 64 images per step on each worker, under
`Threshold(local="none")` and `Threshold(local="dense")`, in turns. The table shows the median step on rank 0; the bytes
that the links of all hosts carried in a step; both relative to "none"; the bytes that a worker sent inside its host;
the test accuracy at the end; and the mean milliseconds of each part of the exchange.

With --local-only, the ranks of this machine only add up updates as the ranks of a host do, without training: once by
MPI's collectives, as hvdx does, and once in memory that MPI shares (`MPI.Win.Allocate_shared`).
"""

import argparse
import sys
import time
from statistics import median
from typing import Any

import numpy as np

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity, render

#: Values of `local`, in the order of a round.
KINDS = ("none", "dense")
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
    """Run both kinds in turns, and print a table."""
    if options.local_only:
        return compare_sums(options)
    rows: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        for kind in KINDS:
            spelling = f"threshold:target_density={options.density},local={kind}"
            given = {"spelling": spelling, "hidden": options.hidden, "seed": 0, "steps": options.steps}
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
            f"local={kind}",
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
    distribute = hvdx.keras.Distribute(given.spelling)
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
        "ms": 1e3 * median(watch.seconds[_SETTLING:]),
        "between": (last["link"] - first["link"]) / steps,
        "inside": (last["inside"] - first["inside"]) / steps,
        "density": (last["entries"] - first["entries"]) / max(last["encoded"] - first["encoded"], 1),
        "accuracy": 100 * result["accuracy"],
    } | {part: 1e3 * (last[part] - first[part]) / steps for part in _PARTS}


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
    ways = ("collectives", "windows", "pass")
    cells = [[f"{r['elements']:,}", str(r["ranks"]), *(f"{r[way]:.2f}" for way in ways)] for r in rows]
    print(render(cells, ["elements", "ranks", "collectives, ms", "windows, ms", "one pass, ms"]))
    return 0


def add_up(given: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds of a sum over the ranks by collectives, by windows, and of one pass over an update."""
    from mpi4py import MPI

    import hvdx
    from hvdx.comm import world
    from hvdx.strategies.interleaving import Interleaved

    hvdx.init()
    comm, n = world.start(), given.elements
    update, result = np.ones(n, np.float32), np.zeros(n, np.float32)
    parts, channel = Interleaved([n], comm.size), comm.channel("sums")
    pieces = np.zeros(n, np.float32)

    def collectives() -> None:
        parts.split([update], pieces)
        theirs = channel.scatter_pieces(pieces, parts.bounds)
        total = np.add(theirs[0], theirs[1])
        for piece in theirs[2:]:
            total += piece
        channel.gather_pieces(total, parts.bounds, pieces)
        parts.join(pieces, result)

    node: Any = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    window = MPI.Win.Allocate_shared(4 * n, 4, comm=node)
    shared = [np.asarray(window.Shared_query(r)[0]).view(np.float32) for r in range(node.size)]
    window.Lock_all()
    low, high = (int(b) for b in parts.bounds[node.rank : node.rank + 2])

    def meet() -> None:
        window.Sync()
        channel.exchange([0])
        window.Sync()

    def windows() -> None:
        # Pieces are not interleaved: a window can be read in any order at the same cost.
        shared[node.rank][:] = update
        meet()
        total = np.add(shared[0][low:high], shared[1][low:high])
        for theirs in shared[2:]:
            total += theirs[low:high]
        meet()
        shared[0][low:high] = total
        meet()
        result[:] = shared[0]
        meet()

    def one_pass() -> None:
        np.copyto(result, update)

    figures = {}
    for name, way in (("collectives", collectives), ("windows", windows), ("pass", one_pass)):
        seconds = []
        for _ in range(given.rounds):
            channel.exchange([0])
            begin = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - begin)
        figures[name] = 1e3 * median(seconds[2:])
    window.Unlock_all()
    return figures


if __name__ == "__main__":
    sys.exit(main())
