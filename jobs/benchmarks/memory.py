"""Memory of each strategy in copies of the weights, compared with all-reduce.

    python jobs/benchmarks/memory.py

Two workers train a small and a large dense network under each strategy, in new processes. The number of copies is the
difference of the two runs' memory divided by the difference of the weights' sizes, so that code, libraries and
compilers cancel out. Memory is the peak resident size of rank 0.
"""

import argparse
import sys

from hvdx.jobs.benchmarks import harness

#: Compared strategies by name.
STRATEGIES = {
    "AllReduce": "all_reduce",
    "Threshold": "threshold:target_density=0.01",
    "ParameterAveraging": "parameter_averaging:period=5",
    "ParameterAveraging, own momenta": "parameter_averaging:period=5,average_optimizer=false",
}
_STEPS = 20


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--hidden", type=int, nargs=2, default=(1024, 5120), metavar="N", help="units of the two networks' layers"
    )
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Measure every strategy, and print the table."""
    weights = [4 * harness.parameters(h) / 1e6 for h in options.hidden]

    def measure(case: harness.Row) -> harness.Row:
        setting = {"spelling": STRATEGIES[case["strategy"]], "seed": 0}
        peaks = [
            harness.launch(__file__, setting | {"hidden": hidden}, ranks=2).ranks[0]["memory_MB"]
            for hidden in options.hidden
        ]
        return {"MB": peaks, "copies": (peaks[1] - peaks[0]) / (weights[1] - weights[0])}

    columns = [
        ("strategy", lambda row: row["strategy"]),
        harness.figure("copies", "copies", ".2f"),
        (f"MB at {weights[0]:.0f} MB of weights", lambda row: f"{row['MB'][0]:.0f}"),
        (f"MB at {weights[1]:.0f} MB of weights", lambda row: f"{row['MB'][1]:.0f}"),
    ]
    cases = [{"strategy": name} for name in STRATEGIES]
    harness.run_cases(options.json, cases, measure, columns, {"weights_MB": weights})
    return 0


def train(setting: argparse.Namespace) -> harness.Row:
    """Train for some steps on one of the workers."""
    import hvdx

    hvdx.init()
    model, data, _, _ = harness.mlp(setting)
    callbacks = [hvdx.keras.Distribute(setting.spelling)]
    model.fit(data.repeat(), steps_per_epoch=_STEPS, shuffle=False, verbose=0, callbacks=callbacks)
    return {"memory_MB": harness.memory("VmHWM") / 1e6}


if __name__ == "__main__":
    sys.exit(main())
