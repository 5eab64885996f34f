"""Seconds of an epoch of workers of unequal speed, with even and with balanced rows.

    python jobs/benchmarks/balance.py                                   four workers, one of them ten times slower
    python jobs/benchmarks/balance.py --times 1,2                       two workers
    python jobs/benchmarks/balance.py --times 1,2 --change 50           their speeds are exchanged after 50 steps
    python jobs/benchmarks/balance.py --bandwidth 100mbit --json balance.json

Workers train a dense network on Fashion-MNIST, with SGD and momentum. In each step a worker sleeps for 4 ms (--pause)
for each of its rows, times its number in --times: this stands for computing. "Ideal" is the time in which all workers
would do the rows of a step together if their speeds added up, and nothing else took time. Seconds are those of the
epoch, and milliseconds those of a step after the first thirty. A way is a strategy, with "balanced" before it if the
rows follow the speeds; "one process" takes the same steps alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import fmean, median
from typing import TYPE_CHECKING

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import render

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

_BALANCED = "balanced "
_WAYS = "all_reduce,balanced all_reduce,threshold,balanced threshold,threshold:max_staleness=inf"
# Steps that are not timed: they trace and compile. And steps after which the rows are expected to follow the speeds.
_COMPILING, _SETTLED = 3, 30


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--times", type=harness.several(float), default="1,1,1,10", metavar="X,...", help="slowness of each worker")
    add("--ways", type=harness.several(str), default=_WAYS, metavar="WAY,...", help="compared ways")
    add("--bandwidth", default="", metavar="RATE", help="give each worker an emulated host with a link of this rate")
    add("--rows", type=int, default=24, help="rows of a step for each worker, on average")
    add("--pause", type=float, default=4.0, metavar="MS", help="sleep for a row of a worker of slowness 1")
    add("--steps", type=int, default=120, help="steps of each worker in an epoch")
    add("--change", type=int, default=0, metavar="STEP", help="step in which the order of --times is turned around")
    add("--seeds", type=harness.several(int), default="0", metavar="N,N,...", help="seeds of weights and data")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Run the ways, and print a table."""
    rows: list[harness.Row] = []
    for way in ["one process", *options.ways]:
        for seed in options.seeds:
            rows.append(figures(way, seed, options))
            print(f"{way}: {rows[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
    ideal = 1e-3 * options.pause * options.rows * len(options.times) / sum(1 / t for t in options.times)
    written = {"times": options.times, "bandwidth": options.bandwidth, "ideal": ideal, "rows": rows}
    show(rows, ideal, options)
    harness.write(options.json, written)
    return 0


def figures(way: str, seed: int, options: argparse.Namespace) -> harness.Row:
    """Train once, and combine the workers' figures."""
    setting: harness.Row = {key: getattr(options, key) for key in ("times", "rows", "pause", "steps", "change")}
    setting |= {"way": way, "seed": seed}
    size = 1 if way == "one process" else len(options.times)
    # The pause takes one thread of TensorFlow's, and the pipeline of the data needs another.
    one = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1") | {"TF_NUM_INTEROP_THREADS": "2"}
    ranks = harness.launch(__file__, setting, size, options.bandwidth if size > 1 else "", limit=1800, env=one).ranks
    settled = [rank["steps"][_SETTLED:] for rank in ranks]
    return {
        "way": way,
        "seed": seed,
        "seconds": max(rank["seconds"] for rank in ranks),
        # Asynchronous workers take different numbers of steps.
        "settled": max(fmean(steps) for steps in settled) if len(set(map(len, settled))) == 1 else None,
        "rows_at_the_end": [rank["sizes"][-1] for rank in ranks],
        "loss": ranks[0]["loss"],
        "accuracy": ranks[0]["accuracy"],
        "steps": [len(rank["steps"]) for rank in ranks],
    }


def show(rows: list[harness.Row], ideal: float, options: argparse.Namespace) -> None:
    """Print a table of medians over the seeds."""
    cells = []
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        even = [row for row in rows if row["way"] == way.removeprefix(_BALANCED)]
        seconds, steps = median(row["seconds"] for row in mine), [row["settled"] for row in mine]
        step = None if None in steps else median(steps)
        ratio = step / median(row["settled"] for row in even) if step and even and way.startswith(_BALANCED) else None
        cells.append(
            [
                way,
                f"{seconds:.1f}",
                f"{1e3 * step:.1f}" if step else "",
                f"{ratio:.3f}" if ratio else "",
                f"{ideal / step:.2f}" if step and way != "one process" else "",
                ", ".join(str(n) for n in mine[0]["rows_at_the_end"]),
                f"{median(row['loss'] for row in mine):.6f}",
                f"{median(row['accuracy'] for row in mine):.2f}",
            ]
        )
    links = f", links of {options.bandwidth}" if options.bandwidth else ""
    listed = ", ".join(f"{t:g}" for t in options.times)
    print(f"\n{len(options.times)} workers of slowness {listed}{links}; ideal step {1e3 * ideal:.1f} ms")
    header = ["way", "s", "ms a step", "/ even", "ideal / it", "rows at the end", "held-out loss", "%"]
    print(render(cells, header=header))


def train(setting: argparse.Namespace) -> harness.Row:
    """Train, and return the figures of this worker."""
    import keras
    import tensorflow as tf

    import hvdx
    from hvdx.jobs.data import load

    alone = setting.way == "one process"
    strategy = setting.way.removeprefix(_BALANCED)
    hvdx.init(strategy=None if alone else strategy)
    loaded = load(getattr(setting, "data", "fashion-mnist"))
    keras.utils.set_random_seed(setting.seed)
    sizes: list[int] = []

    def pause(x: np.ndarray) -> np.ndarray:
        times = setting.times[::-1] if setting.change and len(sizes) >= setting.change else setting.times
        if not alone:
            time.sleep(1e-3 * setting.pause * len(x) * times[hvdx.rank()])
        sizes.append(len(x))
        return x

    class Pausing(keras.Model):
        """A model whose steps take as long as the rows of this worker."""

        def train_step(self, data: tuple[tf.Tensor, ...]) -> object:
            x = tf.ensure_shape(tf.numpy_function(pause, [data[0]], data[0].dtype), data[0].shape)
            return super().train_step((x, *data[1:]))

    inputs = keras.Input(loaded.train_x.shape[1:])
    hidden = keras.layers.Dense(64, "relu")(keras.layers.Flatten()(inputs))
    model = Pausing(inputs, keras.layers.Dense(10)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    together = setting.rows * len(setting.times)
    data = hvdx.shard(
        (loaded.train_x, loaded.train_y),
        global_batch_size=together,
        seed=setting.seed,
        steps=setting.steps,
        balance="auto" if setting.way.startswith(_BALANCED) else "off",
    )
    watch = harness.StepWatch(0, dict)
    callbacks = [harness.callback(watch)] + ([] if alone else [hvdx.keras.Distribute()])
    model.fit(data, verbose=0, callbacks=callbacks)
    steps = watch.seconds[_COMPILING + 1 :]
    held_out, accuracy = model.evaluate(loaded.test_x, loaded.test_y, 2000, verbose=0)
    return {
        "steps": steps,
        "seconds": sum(steps),
        "sizes": sizes,
        "loss": held_out,
        "accuracy": 100 * accuracy,
    }


if __name__ == "__main__":
    sys.exit(main())
