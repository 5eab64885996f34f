"""Cost of a step under `Threshold` with its automatic density, beside the same step without communication.

    python jobs/benchmarks/density.py                                            two hosts, three rates, two bursts
    python jobs/benchmarks/density.py --hosts 4 --bandwidth 100mbit --burst 256kB

Emulated hosts (`hvdx lab`) train a dense network of 1.86 million parameters on Fashion-MNIST, 64 images per step on
each. In each run, the same processes train alone, then under `Threshold()`, then alone again. The table shows the mean
step after the first 100, divided by the mean step alone; the density there, and its range, in means over 20 steps and
as multiples of the median; and the mean milliseconds of each part of the exchange. Means, because hosts that share
cores stop each other: the median of the steps alone would leave out the pauses.
"""

import argparse
import sys
from itertools import pairwise
from statistics import fmean, median

from hvdx.jobs.benchmarks import harness

#: Steps in which the density settles.
SETTLING = 100
# Uncounted first steps of a fit, which trace and compile.
_COMPILING = 3
# Steps alone, before and after.
_ALONE = 100
# Steps over which a density is averaged.
_AVERAGED = 20
_PARTS = ("encoding", "waiting", "exchanging", "decoding")
_COLUMNS = [
    ("network", lambda row: f"{row['hosts']} hosts, {row['bandwidth']}, {row['burst']}"),
    harness.figure("ratio", "ratio", ".2f"),
    harness.figure("alone ms", "alone_ms", ".1f"),
    harness.figure("ms", "ms", ".1f"),
    harness.figure("density", "density", ".2g"),
    ("range", lambda row: f"{row['lowest']:.2f} to {row['highest']:.2f}"),
    *(harness.figure(part, part, ".2f") for part in _PARTS),
]


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add, words = parser.add_argument, harness.several(str)
    add("--hosts", type=harness.several(int), default="2", metavar="N,N,...", help="numbers of emulated hosts")
    add("--bandwidth", type=words, default="10mbit,100mbit,1gbit", metavar="RATE,...", help="bandwidths of the links")
    add("--burst", type=words, default="5kB,256kB", metavar="SIZE,...", help="bytes that a link passes after a pause")
    add("--strategy", default="threshold", metavar="SPEC", help="spelling of the strategy")
    add("--steps", type=int, default=300, metavar="N", help="measured steps, after the density has settled")
    add("--batch", type=int, default=64, metavar="N", help="images per step on each host")
    add("--hidden", type=int, default=1024, metavar="N", help="units in each of two hidden layers")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Run every network, and print a table."""
    shape = {"hidden": options.hidden, "batch": options.batch}
    setting = {"spelling": options.strategy, "seed": 0, "steps": options.steps} | shape

    def measure(case: harness.Row) -> harness.Row:
        return harness.launch(__file__, setting, case["hosts"], case["bandwidth"], burst=case["burst"]).ranks[0]

    cases = (
        network | {"burst": burst, "batch": options.batch}
        for network in harness.networks(options.hosts, options.bandwidth)
        for burst in options.burst
    )
    harness.run_cases(options.json, cases, measure, _COLUMNS)
    return 0


def train(setting: argparse.Namespace) -> harness.Row:
    """Train alone, under the strategy, and alone again."""
    import hvdx

    hvdx.init()
    model, data, _, _ = harness.mlp(setting)

    entries: list[float] = []

    def read() -> dict[str, float]:
        cost = distribute.cost()
        entries.append(cost.entries / max(cost.elements, 1))
        return {part: getattr(cost, part) for part in _PARTS}

    def fit(steps: int, watch: harness.StepWatch, *callbacks: hvdx.keras.Distribute) -> list[float]:
        hooks = [*callbacks, harness.callback(watch)]
        model.fit(data.repeat(), steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=hooks)
        return watch.seconds

    def fit_alone() -> float:
        return fmean(fit(_ALONE, harness.StepWatch(_ALONE + 1, dict))[_COMPILING:])

    before = fit_alone()
    distribute = hvdx.keras.Distribute(setting.spelling)
    watch = harness.StepWatch(SETTLING, read)
    measured = fmean(fit(SETTLING + setting.steps, watch, distribute)[SETTLING:])
    alone = (before + fit_alone()) / 2
    # The density of a single step varies with the update: at 1e-4 a message of this model has 190 entries.
    # The first entries are those of the last settling step.
    densities = [(end - begin) / _AVERAGED for begin, end in pairwise(entries[1::_AVERAGED])]
    middle = median(densities)
    return {
        "alone_ms": 1e3 * alone,
        "ms": 1e3 * measured,
        "ratio": measured / alone,
        "density": middle,
        "lowest": min(densities) / middle,
        "highest": max(densities) / middle,
    } | {part: 1e3 * (watch.totals[-1][part] - watch.totals[0][part]) / setting.steps for part in _PARTS}


if __name__ == "__main__":
    sys.exit(main())
