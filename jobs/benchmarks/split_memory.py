"""Memory of one large split layer on each rank, for several numbers of ranks.

    python jobs/benchmarks/split_memory.py                              14142 x 14142 = 200 million parameters

Groups of 1, 2 and 4 ranks share a `SplitDense` and train it for some steps with SGD and momentum. "Counted" is the
memory of its weights and momenta. "Resident" is the growth of a rank's resident memory from the start of the training
job to its end, "peak" the largest growth. Both include gradients, the optimiser's temporary arrays, activations and
TensorFlow's compiled functions.
"""

import argparse
import sys

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity


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
    shared = {"width": options.width, "batch": options.batch}

    def measure(case: harness.Row) -> harness.Row:
        setting = case | shared | {"steps": options.steps}
        found = harness.launch(__file__, setting, case["ranks"]).ranks
        return {key: max(figures[key] for figures in found) for key in found[0]}

    def memory(key: str) -> harness.Column:
        return key, lambda row: quantity(row[key], "B")

    columns = [("ranks", lambda row: str(row["ranks"])), memory("counted"), memory("resident"), memory("peak")]
    harness.run_cases(options.json, [{"ranks": ranks} for ranks in options.ranks], measure, columns, shared)
    return 0


def train(setting: argparse.Namespace) -> harness.Row:
    """Train the layer, and return the memory of this rank; the largest of the ranks is reported."""
    import keras
    import numpy as np

    import hvdx
    from hvdx.keras.layers import SplitDense

    hvdx.init(split=setting.ranks)
    before = harness.memory("VmRSS")
    keras.utils.set_random_seed(0)
    layer = SplitDense(setting.width, draw="shard")
    model = keras.Sequential([keras.Input((setting.width,)), layer])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    x = np.random.default_rng(hvdx.rank()).normal(size=(setting.batch, setting.width)).astype(np.float32)
    distribute = hvdx.keras.Distribute(check_every=None)
    model.fit(x, x, batch_size=setting.batch, epochs=setting.steps, shuffle=False, verbose=0, callbacks=[distribute])
    held = sum(4 * int(np.prod(v.shape)) for v in [*model.weights, *model.optimizer.variables])
    return {"counted": held} | {
        name: harness.memory(which) - before for name, which in (("resident", "VmRSS"), ("peak", "VmHWM"))
    }


if __name__ == "__main__":
    sys.exit(main())
