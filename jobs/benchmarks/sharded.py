"""Traffic, decoding and time of a step under the two exchanges of `Threshold`, by the number of workers.

    python jobs/benchmarks/sharded.py                        2, 4 and 8 emulated hosts at 100 Mbit/s
    python jobs/benchmarks/sharded.py --hosts 4 --bandwidth 10mbit,100mbit --strategy "threshold:target_density=0.03"

Emulated hosts (`hvdx lab`) train a dense network of 1.86 million parameters on Fashion-MNIST. The table shows, for
"all_gather" and "sharded": the median milliseconds of a step, the bytes that a worker sends and receives in it, in
multiples of its own message, and the mean milliseconds of each part of the exchange.
"""

import argparse
import sys
from statistics import median
from typing import Any

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import render

# Uncounted first steps, which trace and compile, and in which the codec finds tau.
_WARM = 20
_PARTS = ("encoding", "waiting", "exchanging", "decoding")


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--hosts", type=harness.several(int), default="2,4,8", metavar="N,N,...", help="numbers of emulated hosts")
    add("--bandwidth", type=harness.several(str), default="100mbit", metavar="RATE,...", help="bandwidths of the links")
    add("--strategy", default="threshold:target_density=0.01", metavar="SPEC", help="spelling, without an exchange")
    add("--steps", type=int, default=100, metavar="N", help="measured steps")
    add("--hidden", type=int, default=1024, metavar="N", help="units in each of two hidden layers")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Run every network under both exchanges, and print a table."""
    rows: list[dict[str, Any]] = []
    for hosts in options.hosts:
        for bandwidth in options.bandwidth:
            for exchange in ("all_gather", "sharded"):
                spelling = f"{options.strategy}{',' if ':' in options.strategy else ':'}exchange={exchange}"
                given = {"spelling": spelling, "hidden": options.hidden, "seed": 0, "steps": options.steps}
                ranks = harness.launch(__file__, given, hosts, bandwidth).ranks
                mean = {name: sum(rank[name] for rank in ranks) / len(ranks) for name in ranks[0]}
                rows.append({"hosts": hosts, "bandwidth": bandwidth, "exchange": exchange} | mean)
                print(f"{hosts} hosts, {bandwidth}, {exchange}: {mean['ms']:.1f} ms", file=sys.stderr, flush=True)
                harness.write(options.json, {"rows": rows})
    print(text(rows))
    return 0


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    cells = [
        [
            f"{row['hosts']} hosts, {row['bandwidth']}, {row['exchange']}",
            f"{row['ms']:.1f}",
            f"{row['message'] / 1e3:.1f}",
            f"{row['sent'] / row['message']:.2f}",
            f"{row['received'] / row['message']:.2f}",
            *(f"{row[part]:.2f}" for part in _PARTS),
        ]
        for row in rows
    ]
    return render(cells, ["network", "ms", "message, kB", "sent, messages", "received, messages", *_PARTS])


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the means of a step."""
    import hvdx

    hvdx.init()
    model, data, _, _ = harness.mlp(given)
    distribute = hvdx.keras.Distribute(given.spelling)
    names = ("messages", "sent", "received", *_PARTS)
    watch = harness.step_watch(_WARM, lambda: {name: getattr(distribute.cost(), name) for name in names})
    model.fit(
        data.repeat(), steps_per_epoch=_WARM + given.steps, shuffle=False, verbose=0, callbacks=[distribute, watch]
    )
    first, last = watch.totals[0], watch.totals[-1]
    means = {name: (last[name] - first[name]) / given.steps for name in first}
    times = {part: 1e3 * means[part] for part in _PARTS}
    return (
        {"ms": 1e3 * median(watch.seconds[_WARM:]), "message": means["messages"]}
        | times
        | {name: means[name] for name in ("sent", "received")}
    )


if __name__ == "__main__":
    sys.exit(main())
