"""Is averaging networks the same as averaging gradients? The figures behind docs/averaging.md.

    mpirun -n 4 python jobs/benchmarks/averaging_question.py                       a table, in some minutes
    mpirun -n 4 python jobs/benchmarks/averaging_question.py --json question.json  and keep the figures
    mpirun -n 2 python jobs/benchmarks/averaging_question.py --steps 64 --periods 1,8 --optimizers sgd,adam

Every way starts from the same weights and sees the same batches. "From dense" is how far its weights end from those of
all-reduced gradients: the 2-norm of the difference, in units of the norm of the weights. "Apart" is how far a worker
had gone from the mean when the last period ended, on average over the workers: what averaging takes back.

Training multiplies differences, those of rounding too: "rounded otherwise" are all-reduced gradients that are divided
by 3 before they are added up, and multiplied by it afterwards. What is no farther from dense than that is the same.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

#: Learning rates at which each of them trains well here.
OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "momentum": ("SGD", {"learning_rate": 0.05, "momentum": 0.9}),
    "adam": ("Adam", {"learning_rate": 0.001}),
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="default: sgd,momentum,adam")
    parser.add_argument("--periods", default="1,4,16,64", help="default: 1,4,16,64")
    parser.add_argument("--steps", type=int, default=192, help="steps of each training (default: 192)")
    parser.add_argument("--hidden", type=int, default=256, help="units in each of two hidden layers (default: 256)")
    parser.add_argument("--batch", type=int, default=64, help="samples a step on each worker (default: 64)")
    parser.add_argument("--data", default="fashion-mnist", help="fashion-mnist (default) or digits")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train in every way, and print the table; see `--help`."""
    options = arguments(argv)
    import hvdx

    hvdx.init()
    import keras

    from hvdx.jobs.data import load

    keras.config.disable_interactive_logging()
    data = load(options.data)
    rows: list[dict[str, Any]] = []
    for name in options.optimizers.split(","):
        dense, row = train(data, name, hvdx.AllReduce(), options)
        rows.append({"optimizer": name, "way": "gradients", "from_dense": 0.0} | row)
        weights, row = train(data, name, hvdx.AllReduce(gradient_predivide_factor=3.0), options)
        rows.append({"optimizer": name, "way": "gradients, rounded otherwise", "from_dense": far(weights, dense)} | row)
        for period in map(int, options.periods.split(",")):
            for state in (True, False) if name != "sgd" else (True,):
                way = hvdx.ParameterAveraging(period, average_optimizer=state)
                weights, row = train(data, name, way, options)
                kept = "" if name == "sgd" else ", averaged state" if state else ", own state"
                rows.append(
                    {"optimizer": name, "way": f"every {period}{kept}", "from_dense": far(weights, dense)} | row
                )
                if hvdx.rank() == 0:
                    print(rows[-1], file=sys.stderr, flush=True)
    if hvdx.rank() == 0:
        show(rows, hvdx.size(), options)
        if options.json:
            command = (
                f"mpirun -n {hvdx.size()} python jobs/benchmarks/averaging_question.py {' '.join(sys.argv[1:])}".strip()
            )
            Path(options.json).write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
    return 0


def train(data: Any, optimizer: str, strategy: Any, options: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """Train one way; the weights at its end, and its figures."""
    import keras

    import hvdx
    from hvdx.jobs.fashion_mnist import build

    keras.utils.set_random_seed(0)
    model = build(data, "mlp", options.hidden, "sgd", None)
    kind, settings = OPTIMIZERS[optimizer]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(getattr(keras.optimizers, kind)(**settings), loss, metrics=["accuracy"])
    batches = hvdx.shard((data.train_x, data.train_y), options.batch, seed=0).repeat()
    test = hvdx.shard((data.test_x, data.test_y), 500, shuffle=False, drop_remainder=False)
    distribute = hvdx.keras.Distribute(strategy)
    history = model.fit(
        batches,
        steps_per_epoch=options.steps,
        epochs=1,
        validation_data=test,
        shuffle=False,
        verbose=0,
        callbacks=[distribute],
    ).history
    (cost,) = distribute.counters.telemetry or [None]
    apart = hvdx.keras.allreduce(np.float32(getattr(cost, "apart", 0.0)), name="apart")
    return model.get_weights(), {"accuracy": 100 * history["val_accuracy"][-1], "apart": float(apart)}


def far(weights: list[Any], others: list[Any]) -> float:
    """2-norm of the difference, in units of the norm of the second."""
    difference = sum(np.sum(np.square(a - b, dtype=np.float64)) for a, b in zip(weights, others, strict=True))
    return float(np.sqrt(difference / sum(np.sum(np.square(b, dtype=np.float64)) for b in others)))


def show(rows: list[dict[str, Any]], size: int, options: argparse.Namespace) -> None:
    """Print the table."""
    from hvdx.report.table import render

    cells = [
        [row["optimizer"], row["way"], f"{row['from_dense']:.2g}", f"{row['apart']:.2g}", f"{row['accuracy']:.2f}"]
        for row in rows
    ]
    print(f"{size} workers, {options.steps} steps of {options.batch} samples on each")
    print(render(cells, header=["optimizer", "averaged", "from dense", "apart", "accuracy, %"]))


if __name__ == "__main__":
    sys.exit(main())
