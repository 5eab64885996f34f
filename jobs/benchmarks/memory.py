"""Memory of each strategy in copies of the weights, compared with all-reduce.

    python jobs/benchmarks/memory.py

Two workers train a small and a large dense network under each strategy, in new processes. The number of copies is the
difference of the two runs' memory divided by the difference of the weights' sizes, so that code, libraries and
compilers cancel out. Memory is the peak resident size of rank 0.
"""

import sys

from hvdx.jobs.benchmarks import harness, network
from hvdx.report.table import render

#: Compared strategies by name.
STRATEGIES = {
    "AllReduce": "all_reduce",
    "Threshold": "threshold:target_density=0.01",
    "ParameterAveraging": "parameter_averaging:period=5",
    "ParameterAveraging, own momenta": "parameter_averaging:period=5,average_optimizer=false",
}
_STEPS = 20


def main(argv: list[str] | None = None) -> int:
    """Measure every strategy, and print the table."""
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--hidden", type=int, nargs=2, default=(1024, 5120), metavar="N", help="units of the two networks' layers"
    )
    options = parser.parse_args(argv)
    weights = [4 * (785 * h + (h + 1) * h + (h + 1) * 10) / 1e6 for h in options.hidden]
    rows = []
    for name, spelling in STRATEGIES.items():
        small, large = (measure(spelling, hidden) for hidden in options.hidden)
        rows.append({"strategy": name, "MB": [small, large], "copies": (large - small) / (weights[1] - weights[0])})
    base = rows[0]["copies"]
    cells = [
        [r["strategy"], *(f"{mb:.0f}" for mb in r["MB"]), f"{r['copies']:.2f}", f"{r['copies'] - base:+.2f}"]
        for r in rows
    ]
    header = ["strategy", *(f"MB at {w:.0f} MB of weights" for w in weights), "copies", "above AllReduce"]
    print(render(cells, header=header))
    harness.write(options.json, {"weights_MB": weights, "rows": rows})
    return 0


def measure(spelling: str, hidden: int) -> float:
    """Return the peak megabytes of rank 0 in a short training."""
    given = {"spelling": spelling, "hidden": hidden, "seed": 0, "steps": _STEPS, "target": 101.0}
    return harness.launch(network.__file__, given, ranks=2).ranks[0]["memory_MB"]


if __name__ == "__main__":
    sys.exit(main())
