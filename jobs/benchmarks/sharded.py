"""Traffic, decoding and time of a step under the two exchanges of `Threshold`, by the number of workers.

    python jobs/benchmarks/sharded.py                        2, 4 and 8 emulated hosts at 100 Mbit/s
    python jobs/benchmarks/sharded.py --hosts 4 --bandwidth 10mbit,100mbit --strategy "threshold:target_density=0.03"

Emulated hosts (`hvdx lab`) train a dense network of 1.86 million parameters on Fashion-MNIST. The table shows, for
"all_gather" and "sharded": the median milliseconds of a step, the bytes that a worker sends and receives in it, in
multiples of its own message, and the mean milliseconds of each part of the exchange.
"""

import argparse
import sys
from statistics import fmean, median

from hvdx.jobs.benchmarks import harness

# Uncounted first steps, which trace and compile.
_WARM = 20
_PARTS = ("encoding", "waiting", "exchanging", "decoding")
_COLUMNS = [
    ("network", lambda row: f"{row['hosts']} hosts, {row['bandwidth']}, {row['exchange']}"),
    harness.figure("ms", "ms", ".1f"),
    harness.figure("message, kB", "message", ".1f", 1e-3),
    ("sent, messages", lambda row: f"{row['sent'] / row['message']:.2f}"),
    ("received, messages", lambda row: f"{row['received'] / row['message']:.2f}"),
    *(harness.figure(part, part, ".2f") for part in _PARTS),
]


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

    def measure(case: harness.Row) -> harness.Row:
        spelling = f"{options.strategy}{',' if ':' in options.strategy else ':'}exchange={case['exchange']}"
        setting = {"spelling": spelling, "hidden": options.hidden, "seed": 0, "steps": options.steps}
        ranks = harness.launch(__file__, setting, case["hosts"], case["bandwidth"]).ranks
        return {name: fmean(rank[name] for rank in ranks) for name in ranks[0]}

    cases = (
        network | {"exchange": exchange}
        for network in harness.networks(options.hosts, options.bandwidth)
        for exchange in ("all_gather", "sharded")
    )
    harness.run_cases(options.json, cases, measure, _COLUMNS)
    return 0


def train(setting: argparse.Namespace) -> harness.Row:
    """Train, and return the means of a step."""
    import hvdx

    hvdx.init()
    model, data, _, _ = harness.mlp(setting)
    distribute = hvdx.keras.Distribute(setting.spelling)
    names = ("messages", "sent", "received", *_PARTS)
    watch = harness.StepWatch(_WARM, lambda: {name: getattr(distribute.cost(), name) for name in names})
    model.fit(
        data.repeat(),
        steps_per_epoch=_WARM + setting.steps,
        shuffle=False,
        verbose=0,
        callbacks=[distribute, harness.callback(watch)],
    )
    first, last = watch.totals[0], watch.totals[-1]
    means = {name: (last[name] - first[name]) / setting.steps for name in first}
    times = {part: 1e3 * means[part] for part in _PARTS}
    return (
        {"ms": 1e3 * median(watch.seconds[_WARM:]), "message": means["messages"]}
        | times
        | {name: means[name] for name in ("sent", "received")}
    )


if __name__ == "__main__":
    sys.exit(main())
