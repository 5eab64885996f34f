"""Time that a step takes more if batches may differ between workers, and if a loss has a mask.

    python jobs/benchmarks/batches.py                      two workers of this machine

Steps of the same batches are timed in turns, fit by fit, on the same workers. "Fixed": the number of rows is part of
the shapes, so nothing is added to a step. "Open": it is not, so each rank weighs by its rows. "Mask": the shapes are
fixed, and the loss is divided by the unmasked steps of all ranks, which are summed before the backward pass. "Alone" is
the same step without hvdx; "added" is what the step takes more than a fixed one, less what it takes more alone.
"""

import argparse
import sys
import time
from statistics import median

from hvdx.jobs.benchmarks import harness

_KINDS = ("fixed", "open", "mask")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, or one of its workers."""
    parser = harness.parser(__doc__)
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of workers")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="fits of each kind")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps of a fit")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Time the steps, and print a table."""
    setting = {"rounds": options.rounds, "steps": options.steps}
    env = {"HVDX_ALLOW_SEPARATE": "1"}
    rows = harness.launch(__file__, setting, options.workers, env=env).ranks[0]["rows"]
    names = {"alone": "alone ms", "median": "ms", "added": "added ms"}
    columns = [("batches", lambda row: row["kind"]), *(harness.figure(h, key, ".3f") for key, h in names.items())]
    print(harness.table(rows, columns))
    harness.write(options.json, {"workers": options.workers, "rows": rows})
    return 0


def train(setting: argparse.Namespace) -> harness.Row:
    """Train on one worker, and return the milliseconds of a step of each kind."""
    import keras
    import numpy as np
    import tensorflow as tf

    import hvdx.keras

    hvdx.init()
    x = np.random.default_rng(0).normal(size=(16 * setting.steps, 4, 8)).astype("float32")
    x[:, 2:] *= np.arange(len(x))[:, None, None] % 2
    y, took = x[..., :1].copy(), dict[tuple[str, bool], list[float]]()

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            self.begin = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch >= setting.steps // 5:
                took.setdefault(self.training, []).append(1e3 * (time.perf_counter() - self.begin))

    def compiled(kind: str) -> keras.Model:
        keras.utils.set_random_seed(1)
        first = [keras.layers.Masking()] if kind == "mask" else []
        body = [keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4, 8)), *first, *body])
        model.compile("sgd", "mse")
        return model

    clock, trainings = Clock(), [(kind, alone) for alone in (False, True) for kind in _KINDS]
    models = {training: compiled(training[0]) for training in trainings}
    callbacks = {t: [clock] if t[1] else [hvdx.keras.Distribute(), clock] for t in trainings}
    for number in range(setting.rounds + 1):
        for kind, alone in trainings:
            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=kind != "open")
            clock.training = kind, alone
            models[kind, alone].fit(data, verbose=0, callbacks=callbacks[kind, alone])
        if number == 0:
            took.clear()  # the steps were traced
    middle = {training: median(found) for training, found in took.items()}
    own = {kind: middle[kind, False] - middle[kind, True] for kind in _KINDS}
    return {
        "rows": [
            {"kind": k, "alone": middle[k, True], "median": middle[k, False], "added": own[k] - own["fixed"]}
            for k in _KINDS
        ]
    }


if __name__ == "__main__":
    sys.exit(main())
