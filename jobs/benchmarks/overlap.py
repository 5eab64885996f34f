"""Milliseconds of a step whose backward pass takes as long as the exchange of its gradients.

    python jobs/benchmarks/overlap.py                                two hosts at 100mbit and 1gbit, five minutes
    python jobs/benchmarks/overlap.py --bandwidth 1gbit --pause 0.5  half as much computing

Workers on the hosts of `hvdx lab` train 16 dense layers of equal size, 4.2 million parameters, under
`AllReduce(engine="mpi")`. Before the gradient of each layer the backward pass sleeps, in place of computing that would
take cores from the other hosts. The figures are medians over the steps of rank 0, in processes of their own:

    exchange   the step without pauses: what the link needs, and the little that is computed
    computing  the step with pauses, without an exchange; all pauses together take --pause times `exchange`
    at once    the step with pauses; all gradients leave together after the last one
    buckets    the same, as `AllReduce` does it: gradients leave while others are still computed
    ratio      `buckets` divided by the longer of `exchange` and `computing`
"""

import argparse
import functools
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdx.jobs.benchmarks import harness

if TYPE_CHECKING:
    import keras

_LAYERS, _BATCH = 16, 8
# Uncounted first steps: they trace, compile and open connections.
_SETTLING = 5


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--hosts", type=harness.several(int), default="2", metavar="N,N,...", help="numbers of emulated hosts")
    add("--bandwidth", type=harness.several(str), default="100mbit,1gbit", metavar="RATE,...", help="bandwidths")
    add("--pause", type=float, default=1.0, metavar="X", help="pauses of a step, in multiples of its exchange")
    add("--width", type=int, default=512, metavar="N", help="units of each layer")
    add("--steps", type=int, default=20, metavar="N", help="number of timed steps")
    return harness.run(parser, compare, work, argv)


def compare(options: argparse.Namespace) -> int:
    """Measure each case, and print the table."""
    columns = [
        ("hosts", lambda row: str(row["hosts"])),
        ("bandwidth", lambda row: row["bandwidth"]),
        *(harness.figure(way.replace("_", " "), way, ".1f") for way in ("exchange", "computing", "at_once", "buckets")),
        harness.figure("ratio", "ratio", ".2f"),
    ]
    cases = harness.networks(options.hosts, options.bandwidth)
    shared = {"layers": _LAYERS, "width": options.width, "pause": options.pause}
    harness.run_cases(options.json, cases, functools.partial(measured, options=options), columns, shared)
    return 0


def measured(case: harness.Row, options: argparse.Namespace) -> harness.Row:
    """Return the milliseconds of each way in one case."""

    def step(way: str, pause: float) -> float:
        setting = {"way": way, "pause": pause, "steps": options.steps, "width": options.width}
        ended = harness.launch(__file__, setting, case["hosts"], case["bandwidth"])
        return float(ended.ranks[0]["milliseconds"])

    exchange = step("at once", 0.0)
    pause = options.pause * exchange / 1e3 / _LAYERS
    row = {"exchange": exchange, "computing": step("alone", pause)}
    row |= {"at_once": step("at once", pause), "buckets": step("buckets", pause)}
    return row | {"ratio": row["buckets"] / max(row["exchange"], row["computing"])}


# -- one rank ---------------------------------------------------------------------------------------------------------


def work(setting: argparse.Namespace) -> harness.Row:
    """Return the median milliseconds of a step on this rank."""
    import tensorflow as tf

    import hvdx

    tf.config.threading.set_inter_op_parallelism_threads(2)  # the lab's default is 1
    hvdx.init()
    model = build(setting.width, setting.pause)
    watch = harness.StepWatch(_SETTLING, dict)
    callbacks: list[Any] = [harness.callback(watch)]
    if setting.way != "alone":
        # A group that the user names is one collective.
        groups = [range(len(model.trainable_variables))] if setting.way == "at once" else 1
        callbacks.insert(0, hvdx.keras.Distribute(hvdx.AllReduce(engine="mpi", groups=groups)))
    steps = setting.steps + _SETTLING
    rng = np.random.default_rng(0)
    samples = hvdx.size() * _BATCH
    x, y = rng.random((samples, setting.width), np.float32), rng.integers(0, 10, samples)
    data = hvdx.shard((x, y), _BATCH, shuffle=False).repeat()
    model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=callbacks)
    return {"milliseconds": 1e3 * median(watch.seconds[_SETTLING:])}


def build(width: int, pause: float) -> "keras.Model":
    """Build the network, and compile it.

    Args:
        width: units of each layer.
        pause: seconds that the backward pass sleeps before the gradients of each layer.
    """
    import keras
    import tensorflow as tf

    def sleep(gradient: np.ndarray) -> np.ndarray:
        time.sleep(pause)
        return gradient

    class Pause(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            @tf.custom_gradient
            def same(x: Any) -> Any:
                def gradient(upstream: Any) -> Any:
                    later = tf.numpy_function(sleep, [upstream], upstream.dtype, stateful=False)
                    return tf.ensure_shape(later, upstream.shape)

                return tf.identity(x), gradient

            return same(inputs)

    layers = [keras.Input((width,))]
    for _ in range(_LAYERS):
        layers += [keras.layers.Dense(width, activation="relu"), *([Pause()] if pause else [])]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss=loss)
    return model


if __name__ == "__main__":
    sys.exit(main())
