"""Memory of one large split layer on each rank, for several numbers of ranks.

    python jobs/benchmarks/split_memory.py                              14142 x 14142 = 200 million parameters

Groups of 1, 2 and 4 ranks share a `SplitDense` and train it for some steps with SGD and momentum. "Counted" is the
memory of its weights and momenta. "Resident" is the growth of a rank's resident memory from the start of the training
job to its end, "peak" the largest growth. Both include gradients, the optimiser's temporary arrays, activations and
TensorFlow's compiled functions.
"""

import argparse
import sys
from typing import Any

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity, render


def main(argv: list[str] | None = None) -> int:
    """Run the measurement, or one of its workers."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=harness.several(int), default="1,2,4", metavar="N,N,...", help="numbers of ranks in the group")
    add("--width", type=int, default=14142, metavar="N", help="inputs and units of the layer")
    add("--batch", type=int, default=4, metavar="N", help="samples per step and rank")
    add("--steps", type=int, default=3, metavar="N", help="number of steps")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Measure every number of ranks, and print a table."""
    rows = []
    for ranks in options.ranks:
        given = {"ranks": ranks, "width": options.width, "batch": options.batch, "steps": options.steps}
        found = harness.launch(__file__, given, ranks).ranks
        rows.append({"ranks": ranks} | {key: max(figures[key] for figures in found) for key in found[0]})
    harness.show(options.json, {"width": options.width, "batch": options.batch, "rows": rows}, text)
    return 0


def text(document: dict[str, Any]) -> str:
    """Return the table."""
    rows, keys = document["rows"], ("counted", "resident", "peak")
    first = rows[0]
    cells = [
        [str(row["ranks"]), *(f"{quantity(row[key], 'B')} ({row[key] / first[key]:.3f})" for key in keys)]
        for row in rows
    ]
    return render(cells, header=["ranks", *(f"{key} (/ {first['ranks']} rank)" for key in keys)])


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train the layer, and return the memory of this rank; the largest of the ranks is reported."""
    import keras
    import numpy as np

    import hvdx
    from hvdx.keras.layers import SplitDense

    hvdx.init(split=given.ranks)
    before = harness.memory("VmRSS")
    keras.utils.set_random_seed(0)
    layer = SplitDense(given.width, draw="shard")
    model = keras.Sequential([keras.Input((given.width,)), layer])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    x = np.random.default_rng(hvdx.rank()).normal(size=(given.batch, given.width)).astype(np.float32)
    model.fit(
        x,
        x,
        batch_size=given.batch,
        epochs=given.steps,
        shuffle=False,
        verbose=0,
        callbacks=[hvdx.keras.Distribute(check_every=None)],
    )
    held = sum(4 * int(np.prod(v.shape)) for v in [*model.weights, *model.optimizer.variables])
    return {
        "counted": held,
        "resident": harness.memory("VmRSS") - before,
        "peak": harness.memory("VmHWM") - before,
    }


if __name__ == "__main__":
    sys.exit(main())
