"""Seconds of an epoch of workers of unequal speed, or accuracy after the same time, with even and with balanced rows.

    python jobs/benchmarks/balance.py                                   four workers, one of them ten times slower
    python jobs/benchmarks/balance.py --times 1,2                       two workers
    python jobs/benchmarks/balance.py --times "1,1,1,1;1,1,1,2"         one spread of speeds after another
    python jobs/benchmarks/balance.py --times 1,1,1,1 --jitter 0.5,1    pauses differ at random in each step
    python jobs/benchmarks/balance.py --times 1,2 --change 50           their speeds are exchanged after 50 steps
    python jobs/benchmarks/balance.py --bandwidth 100mbit --json balance.json
    python jobs/benchmarks/balance.py --seconds 20 --pause 1.5 --steps 480 --data digits --seeds 0,1,2

Workers train a dense network with SGD and momentum, or the transformer on text with AdamW. In each step a worker sleeps
for 4 ms (--pause) for each of its rows, times its number in --times, and a random factor if there is --jitter: this
stands for computing. "Ideal" is the time in which all workers would do the rows of a step together if their speeds
added up, and nothing else took time. Seconds are those of the epoch, and milliseconds those of a step after the first
thirty. Samples a second are those of all workers in the second half of the time; beside them stand those of `hvdx
simulate --balance` for the same pauses, where nothing else takes time. A way is a strategy, with "balanced" before it
if the rows follow the speeds; "one process" takes the same steps alone.

With --seconds each way has the same time: worker 0 stores its weights, which are evaluated after the training, and loss
and accuracy are those after a quarter, a half, and all of the seconds. The rest of the epoch has no pauses. Seconds
count from the fourth step, when everything is compiled.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from hvdx.costs.model import Situation
from hvdx.costs.types import Link
from hvdx.jobs.benchmarks import harness
from hvdx.jobs.benchmarks.accuracy import held_out_windows
from hvdx.jobs.data import Data, load, load_text
from hvdx.jobs.language_model import windows
from hvdx.simulation.training import Setting, simulate
from hvdx.simulation.workloads import Made
from hvdx.strategies import parse

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

_BALANCED = "balanced "
_WAYS = "all_reduce,balanced all_reduce,threshold,balanced threshold,threshold:max_staleness=inf"
# Steps that are not timed: they trace and compile. And steps after which the rows are expected to follow the speeds.
_COMPILING, _SETTLED = 4, 30
# Parts of the seconds after which the weights are evaluated.
_PARTS = (0.25, 0.5, 1.0)
# Steps of a simulation.
_SIMULATED = 200
_COLUMNS = [
    ("way", lambda row: row["way"]),
    harness.figure("samples/s", "samples", ".0f"),
    harness.figure("simulated", "simulated", ".0f"),
    harness.figure("s", "seconds", ".1f"),
    harness.figure("ms a step", "settled", ".1f", 1e3),
    ("ideal / it", lambda row: f"{row['ideal'] / row['settled']:.2f}" if row["settled"] else ""),
    ("rows at the end", lambda row: ", ".join(map(str, row["rows_at_the_end"]))),
    harness.figure("held-out loss", "loss", ".6f"),
    harness.figure("%", "accuracy", ".2f"),
    ("times", lambda row: ",".join(f"{t:g}" for t in row["times"])),
    harness.figure("jitter", "jitter", "g"),
    ("data", lambda row: row["data"]),
    harness.figure("seed", "seed", "d"),
]


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--times", default="1,1,1,10", metavar="X,...;...", help="slowness of each worker")
    add("--jitter", type=harness.several(float), default="0", metavar="S,...", help="spread of a pause's logarithm")
    add("--ways", type=harness.several(str), default=_WAYS, metavar="WAY,...", help="compared ways")
    add("--data", type=harness.several(str), default="fashion-mnist", metavar="NAME,...", help="or digits, or text")
    add("--bandwidth", default="", metavar="RATE", help="give each worker an emulated host with a link of this rate")
    add("--batch", type=int, default=24, metavar="ROWS", help="rows of a step for each worker, on average")
    add("--pause", type=float, default=4.0, metavar="MS", help="sleep for a row of a worker of slowness 1")
    add("--steps", type=int, default=120, help="steps of each worker in an epoch")
    add("--seconds", type=float, default=0.0, metavar="S", help="compare the ways after this time")
    add("--change", type=int, default=0, metavar="STEP", help="step in which the order of --times is turned around")
    add("--seeds", type=harness.several(int), default="0", metavar="N,N,...", help="seeds of weights and data")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Run all cases, and print a table."""
    spreads = [harness.several(float)(times) for times in options.times.split(";")]
    names = ("data", "times", "jitter", "seed", "way")
    # Alone, without pauses, a process would have taken all steps long before the end of the seconds.
    ways = options.ways if options.seconds else ["one process", *options.ways]
    cases = product(options.data, spreads, options.jitter, options.seeds, ways)
    shared = {name: getattr(options, name) for name in ("bandwidth", "batch", "pause", "steps", "seconds", "change")}
    rows = (dict(zip(names, case, strict=True)) for case in cases)
    harness.run_cases(options.json, rows, lambda case: figures(case, shared), _COLUMNS, shared, resumes=True)
    return 0


def figures(case: harness.Row, shared: harness.Row) -> harness.Row:
    """Train once, and combine the workers' figures."""
    size = 1 if case["way"] == "one process" else len(case["times"])
    # The pause takes one thread of TensorFlow's, and the pipeline of the data needs another.
    one = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1") | {"TF_NUM_INTEROP_THREADS": "2"}
    bandwidth = shared["bandwidth"] if size > 1 else ""
    ranks = harness.launch(__file__, case | shared, size, bandwidth, limit=1800, env=one).ranks
    seconds = shared["seconds"] or max(sum(rank["steps"]) for rank in ranks)
    if sum(ranks[0]["steps"]) < shared["seconds"]:
        sys.exit(f"{case['way']}: {shared['steps']} steps took less than {seconds:g} s. Do: give more --steps.")
    settled = [rank["steps"][_SETTLED:] for rank in ranks]
    # Asynchronous workers take different numbers of steps.
    in_step = len(set(map(len, settled))) == 1 and not shared["seconds"]
    rates, rows = zip(*(second_half(rank, seconds) for rank in ranks), strict=True)
    return {
        "samples": sum(rates),
        "simulated": simulated(case, shared),
        "ideal": 1e-3 * shared["pause"] * shared["batch"] * len(case["times"]) / sum(1 / t for t in case["times"]),
        "seconds": seconds,
        "settled": max(fmean(steps) for steps in settled) if in_step else None,
        "rows_at_the_end": rows,
        "loss": ranks[0]["curve"][-1][0],
        "accuracy": ranks[0]["curve"][-1][1],
        "curve": ranks[0]["curve"],
        "steps": [len(rank["steps"]) for rank in ranks],
    }


def second_half(rank: harness.Row, seconds: float) -> tuple[float, int]:
    """Return the samples a second of a worker in the second half of a time, and the rows of its last step."""
    ends = np.cumsum([0.0, *rank["steps"]])
    first, last = np.searchsorted(ends, [seconds / 2, seconds * (1 + 1e-9)], "right") - 1
    rows = rank["sizes"][_COMPILING:][:last]
    return sum(rows[first:]) / max(ends[last] - ends[first], 1e-9), rows[-1]


def simulated(case: harness.Row, shared: harness.Row) -> float | None:
    """Return the samples a second by `hvdx simulate`, with exchanges that take no time; None without a common step."""
    strategy = parse(case["way"].removeprefix(_BALANCED).replace("one process", "all_reduce"))
    if strategy.asynchronous or case["way"] == "one process":
        return None
    size, rows = len(case["times"]), shared["batch"]
    situation = Situation(size, (1000,), 1e-3 * shared["pause"] * rows, Link(0.0, math.inf), engine="mpi")
    setting = Setting(
        situation,
        _SIMULATED,
        dict(enumerate(case["times"])),
        case["jitter"],
        case["way"].startswith(_BALANCED),
        math.inf,
        seed=case["seed"],
    )
    return float(rows * size) / simulate(strategy, setting, Made(1000, batch=rows)).seconds


def problem(name: str) -> tuple[keras.Model, keras.optimizers.Optimizer, Data]:
    """Return a network that is not trained, its optimizer, and the data."""
    import keras

    if name == "text":
        network, text = harness.transformer(0.001), load_text()
        held_out = held_out_windows(text.held_out)
        return network, network.optimizer, Data(name, *windows(text.train, harness.CONTEXT), *held_out)
    loaded = load(name)
    inputs = keras.Input(loaded.train_x.shape[1:])
    hidden = keras.layers.Dense(64, "relu")(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Dense(10)(hidden)), keras.optimizers.SGD(0.05, momentum=0.9), loaded


def train(setting: argparse.Namespace) -> harness.Row:
    """Train, and return the figures of this worker."""
    import keras
    import tensorflow as tf

    import hvdx

    alone = setting.way == "one process"
    strategy = setting.way.removeprefix(_BALANCED)
    hvdx.init(strategy=None if alone else strategy)
    keras.utils.set_random_seed(setting.seed)
    network, optimizer, loaded = problem(setting.data)
    sizes: list[int] = []
    random = np.random.default_rng([setting.seed, hvdx.rank()])

    def is_over() -> bool:
        after = time.perf_counter() - stored.start
        return bool(setting.seconds) and len(sizes) > _COMPILING and after > setting.seconds

    def pause(x: np.ndarray) -> np.ndarray:
        times = setting.times[::-1] if setting.change and len(sizes) >= setting.change else setting.times
        if not alone and not is_over():
            noise = math.exp(setting.jitter * random.standard_normal() - setting.jitter**2 / 2)
            time.sleep(1e-3 * setting.pause * len(x) * times[hvdx.rank()] * noise)
        sizes.append(len(x))
        return x

    class Pausing(keras.Model):
        """A model whose steps take as long as the rows of this worker."""

        def train_step(self, data: tuple[tf.Tensor, ...]) -> object:
            x = tf.ensure_shape(tf.numpy_function(pause, [data[0]], data[0].dtype), data[0].shape)
            return super().train_step((x, *data[1:]))

    model = Pausing(network.inputs, network.outputs[0])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    together = setting.batch * len(setting.times)
    data = hvdx.shard(
        (loaded.train_x, loaded.train_y),
        global_batch_size=together,
        seed=setting.seed,
        balance="auto" if setting.way.startswith(_BALANCED) else "off",
    )
    stored = harness.StoredWeights(model)

    def store() -> dict[str, float]:
        if len(watch.seconds) == _COMPILING:
            stored.start = time.perf_counter()
        if setting.seconds and hvdx.rank() == 0 and not is_over():
            stored.store(at_once=not stored.copies)
        return {}

    watch = harness.StepWatch(_COMPILING, store)
    callbacks = [harness.callback(watch)] + ([] if alone else [hvdx.keras.Distribute()])
    model.fit(data.repeat(), steps_per_epoch=setting.steps, verbose=0, callbacks=callbacks)
    if not setting.seconds:
        stored.store(at_once=True)
    moments = [part * setting.seconds for part in _PARTS] if setting.seconds else [math.inf]
    copies = [next(w for at, w in reversed(stored.copies) if at <= moment) for moment in moments if hvdx.rank() == 0]
    curve = [stored.accuracy(weights, loaded) for weights in copies]
    return {"steps": watch.seconds[_COMPILING:], "sizes": sizes, "curve": curve}


if __name__ == "__main__":
    sys.exit(main())
