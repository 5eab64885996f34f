"""Comparison of averaging networks with averaging gradients; the figures are in docs/averaging.md.

    mpirun -n 4 python jobs/benchmarks/averaging_question.py                       a table, within minutes
    mpirun -n 4 python jobs/benchmarks/averaging_question.py --json question.json  also write the figures
    mpirun -n 2 python jobs/benchmarks/averaging_question.py --steps 64 --periods 1,8 --optimizers sgd,adam

Every variant starts from the same weights and trains on the same batches. "From dense" is the 2-norm of the difference
between its final weights and those of all-reduced gradients, divided by the norm of the latter. "Divergence" is the
distance of a worker's weights from the mean before the last average, divided by the norm of the mean, and averaged over
the workers.

Training amplifies differences, even those of rounding. The variant "rounded otherwise" shows their size: it divides the
gradients by 3 before the all-reduce, and multiplies them by 3 afterwards. A variant that is no farther from dense than
this one equals dense, up to rounding.
"""

import argparse
import sys
from typing import TYPE_CHECKING

import numpy as np

from hvdx.jobs.benchmarks import harness

if TYPE_CHECKING:
    from hvdx.strategies import Strategy

Weights = list[np.ndarray]
#: Optimisers, each with a learning rate at which it trains well here.
OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "momentum": ("SGD", {"learning_rate": 0.05, "momentum": 0.9}),
    "adam": ("Adam", {"learning_rate": 0.001}),
}


def main(argv: list[str] | None = None) -> int:
    """Train in every way, and print the table."""
    parser = harness.parser(__doc__)
    parser.add_argument("--optimizers", type=harness.several(str), default=",".join(OPTIMIZERS), help="optimisers")
    parser.add_argument("--periods", type=harness.several(int), default="1,4,16,64", help="steps between averages")
    parser.add_argument("--steps", type=int, default=192, help="steps of each training")
    parser.add_argument("--hidden", type=int, default=256, help="units in each of two hidden layers")
    parser.add_argument("--data", default="fashion-mnist", help="fashion-mnist or digits")
    parser.set_defaults(seed=0)
    options = parser.parse_args(argv)
    import hvdx

    hvdx.init()
    import keras

    keras.config.disable_interactive_logging()
    rows: list[harness.Row] = []
    for name in options.optimizers:
        dense, row = train(name, hvdx.AllReduce(), options)
        rows.append({"optimizer": name, "way": "gradients", "from_dense": 0.0} | row)
        weights, row = train(name, hvdx.AllReduce(gradient_predivide_factor=3.0), options)
        rows.append(
            {"optimizer": name, "way": "gradients, rounded otherwise", "from_dense": relative_distance(weights, dense)}
            | row
        )
        for period in options.periods:
            for state in (True, False) if name != "sgd" else (True,):
                way = hvdx.ParameterAveraging(period, average_optimizer=state)
                weights, row = train(name, way, options)
                kept = "" if name == "sgd" else ", averaged state" if state else ", own state"
                rows.append(
                    {"optimizer": name, "way": f"every {period}{kept}", "from_dense": relative_distance(weights, dense)}
                    | row
                )
                if hvdx.rank() == 0:
                    print(rows[-1], file=sys.stderr, flush=True)
    if hvdx.rank() == 0:
        print(f"{hvdx.size()} workers, {options.steps} steps of 64 samples on each")
        print(harness.table(rows, _COLUMNS))
        harness.write(options.json, {"rows": rows}, hvdx.size())
    return 0


def train(optimizer: str, strategy: "Strategy", options: argparse.Namespace) -> tuple[Weights, harness.Row]:
    """Train in one way, and return the final weights and the figures."""
    import keras

    import hvdx

    model, batches, test, _ = harness.mlp(options)
    kind, settings = OPTIMIZERS[optimizer]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(getattr(keras.optimizers, kind)(**settings), loss, metrics=["accuracy"])
    distribute = hvdx.keras.Distribute(strategy)
    history = model.fit(
        batches.repeat(),
        steps_per_epoch=options.steps,
        epochs=1,
        validation_data=test,
        shuffle=False,
        verbose=0,
        callbacks=[distribute],
    ).history
    (cost,) = distribute.counters.telemetry or [None]
    divergence = hvdx.keras.allreduce(np.float32(getattr(cost, "divergence", 0.0)), name="divergence")
    return model.get_weights(), {"accuracy": 100 * history["val_accuracy"][-1], "divergence": float(divergence)}


def relative_distance(weights: Weights, others: Weights) -> float:
    """Return the 2-norm of the difference, divided by the norm of `others`."""
    difference = sum(np.sum(np.square(a - b, dtype=np.float64)) for a, b in zip(weights, others, strict=True))
    return float(np.sqrt(difference / sum(np.sum(np.square(b, dtype=np.float64)) for b in others)))


_COLUMNS = [
    ("optimizer", lambda row: row["optimizer"]),
    ("averaged", lambda row: row["way"]),
    harness.figure("from dense", "from_dense", ".2g"),
    harness.figure("divergence", "divergence", ".2g"),
    harness.figure("accuracy, %", "accuracy", ".2f"),
]


if __name__ == "__main__":
    sys.exit(main())
