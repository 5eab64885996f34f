"""What a user sees if a worker of `hvdx run --survive` dies anywhere between its first import and its exit.

    python jobs/benchmarks/edges.py                     # all places and strategies: some twenty minutes
    python jobs/benchmarks/edges.py --strategies all_reduce --places "a step,predict"

Three workers run a script that trains two epochs, predicts and evaluates on all workers, and lets rank 0 write a file.
One of them is killed by SIGKILL at one place, rank 0 or another one. Of each run the table has the exit code, how many
workers came to the end of the script, whether every sample was predicted and evaluated there, whether the file is
there, and how many lines name the dead worker. It is as it should be if a line names the worker, and exit code 0 means
that everything is there.
"""

import argparse
import atexit
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from hvdx.cli.common import processes
from hvdx.jobs.benchmarks import harness
from hvdx.jobs.benchmarks.harness import Row

STRATEGIES = (
    *("all_reduce", "parameter_averaging:period=4", "threshold"),
    *("threshold:max_staleness=inf", "parameter_server:servers=colocated"),
)
PLACES = (
    *("the first import", "before init", "after init", "the beginning of fit", "a step", "validation"),
    *("the end of an epoch", "the end of fit", "after fit", "predict", "evaluate", "the last line", "an exit handler"),
)
VICTIMS = 0, 1
_RANKS, _SAMPLES = 3, 203
_LIMIT = 180.0
# Seconds after which a worker gives up, so that a hang ends within the limit.
_PATIENCE = "20"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, or one of its workers."""
    if "--script" in (argv or sys.argv):
        _script(*sys.argv[2:])
        return 0
    parser = harness.parser(__doc__)
    parser.add_argument("--strategies", metavar="NAME;...", help="strategies (default: all that survive)")
    parser.add_argument("--places", type=harness.several(str), metavar="PLACE,...", help="places (default: all)")
    return compare(parser.parse_args(argv))


def compare(options: argparse.Namespace) -> int:
    """Kill workers, and print the table; return 1 if a death is not told, or something is missing in silence."""
    rows = harness.run_cases(
        options.json,
        (
            {"place": place, "strategy": strategy, "victim": victim}
            for place in options.places or PLACES
            for strategy in (options.strategies.split(";") if options.strategies else STRATEGIES)
            for victim in VICTIMS
        ),
        _measure,
        [
            ("place", lambda row: row["place"]),
            ("strategy", lambda row: row["strategy"]),
            ("dies", lambda row: f"rank {row['victim']}"),
            ("exit code", lambda row: "none" if row["code"] is None else str(row["code"])),
            ("to the end", lambda row: f"{row['ended']} of {_RANKS - 1}"),
            ("results", lambda row: "whole" if row["whole"] else "MISSING"),
            ("file", lambda row: "yes" if row["file"] else "no"),
            ("told", lambda row: str(row["told"])),
        ],
        resumes=True,
    )
    wrong = [row for row in rows if not is_right(row)]
    for row in wrong:
        print(f"not as it should be: rank {row['victim']} at {row['place']}, {row['strategy']}")
    print("every death is told, and 0 means that nothing is missing" if not wrong else f"{len(wrong)} are wrong")
    return 1 if wrong else 0


def is_right(row: Row) -> bool:
    """Return whether a death was told, and whether exit code 0 and nothing else says that all is there."""
    complete = bool(row["ended"] and row["whole"] and row["file"])
    return bool(row["told"]) and row["code"] is not None and (row["code"] != 0 or complete)


def _measure(case: Row) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        words = [case["place"], case["strategy"], str(case["victim"]), folder]
        command = [sys.executable, "-m", "hvdx", "run", "-n", str(_RANKS), "--all", "--survive"]
        done = processes.run(
            [*command, sys.executable, __file__, "--script", *words],
            _LIMIT,
            dict(os.environ) | {"HVDX_TIMEOUT": _PATIENCE},
            merged=True,
        )
        ended = re.findall(r"^ENDED (\d) (\d+) (\d+)$", done.text, re.MULTILINE)
        return {
            "code": done.code,
            "ended": len(ended),
            "whole": all(numbers[1:] == (str(_SAMPLES),) * 2 for numbers in ended) and bool(ended),
            "file": (Path(folder) / "written").exists(),
            "told": len(re.findall(rf"^hvdx: .*\brank {case['victim']} on \S+ (?:has )?died", done.text, re.MULTILINE)),
        }


def _script(place: str, strategy: str, victim: str, folder: str) -> None:
    """Train, predict and evaluate as a user's script does; die at a place."""

    def die_at(here: str) -> None:
        if here == place and os.environ["OMPI_COMM_WORLD_RANK"] == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    atexit.register(die_at, "an exit handler")
    die_at("the first import")
    import keras
    import numpy as np

    import hvdx
    import hvdx.keras

    die_at("before init")
    hvdx.init()
    die_at("after init")
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(_SAMPLES, 6)).astype(np.float32)
    y = np.ones(_SAMPLES, np.float32)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])

    class Count(keras.metrics.Sum):
        """Number of samples."""

        def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:
            super().update_state(y_true)

    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[Count(name="count")])

    class Deaths(keras.callbacks.Callback):
        def on_train_begin(self, logs: harness.Logs = None) -> None:
            die_at("the beginning of fit")

        def on_train_batch_begin(self, batch: int, logs: harness.Logs = None) -> None:
            if batch == 3:
                die_at("a step")

        def on_test_batch_begin(self, batch: int, logs: harness.Logs = None) -> None:
            die_at("validation")

        def on_epoch_end(self, epoch: int, logs: harness.Logs = None) -> None:
            die_at("the end of an epoch")

        def on_train_end(self, logs: harness.Logs = None) -> None:
            die_at("the end of fit")

    data, validation = hvdx.shard((x, y), 8), hvdx.shard((x, y), 8)
    callbacks = [hvdx.keras.Distribute(strategy), Deaths()]
    model.fit(data, epochs=2, verbose=0, validation_data=validation, callbacks=callbacks)
    die_at("after fit")
    whole = model.predict, model.evaluate

    def dying(here: str, function: "object") -> "object":
        def call(*arguments: object, **options: object) -> object:
            die_at(here)
            return function(*arguments, **options)  # type: ignore[operator]

        return call

    model.predict, model.evaluate = dying("predict", whole[0]), dying("evaluate", whole[1])
    predicted = len(hvdx.keras.predict(model, x))
    evaluated = round(hvdx.keras.evaluate(model, (x, y))["count"])
    die_at("the last line")
    if hvdx.rank() == 0:
        (Path(folder) / "written").touch()
    print(f"ENDED {hvdx.rank()} {predicted} {evaluated}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
