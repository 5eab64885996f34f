"""Endurance of a strategy whose workers are stopped and continued at random: replicas, memory and accuracy by epoch.

    python jobs/benchmarks/soak.py --minutes 30                            four workers, threshold:max_staleness=inf
    python jobs/benchmarks/soak.py --minutes 5 --strategy threshold --workers 2 --json soak.json

Workers on this machine train a dense network on Fashion-MNIST, epoch by epoch. Meanwhile one worker after another is
stopped (SIGSTOP) for up to --longest seconds, and then continues. After each epoch all workers compare their weights,
bit for bit. The exit code is 1 if they differ once, or if the memory of a worker grows by more than 5 % after the first
quarter of the epochs.
"""

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import render

# Growth of the memory that counts as none: TensorFlow's allocator keeps pieces.
_GROWTH = 0.05
# Seconds for start and end of the workers, beyond the minutes asked for.
_AROUND = 300


def main(argv: list[str] | None = None) -> int:
    """Run the endurance test, or one of its workers."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=4, metavar="N", help="number of workers")
    add("--strategy", default="threshold:max_staleness=inf", metavar="SPEC", help="spelling of the strategy")
    add("--minutes", type=float, default=30.0, help="duration of the training")
    add("--longest", type=float, default=5.0, metavar="SECONDS", help="longest time for which a worker is stopped")
    add("--steps", type=int, default=100, metavar="N", help="steps of each worker in an epoch")
    add("--hidden", type=int, default=256, metavar="N", help="units in each of two hidden layers")
    add("--seed", type=int, default=0, help="seed of weights, data and stops")
    return harness.run(parser, compare, train, argv)


def compare(options: argparse.Namespace) -> int:
    """Start the workers, stop them at random, and print a table."""
    with tempfile.TemporaryDirectory() as pids:
        given = {name: getattr(options, name) for name in ("strategy", "minutes", "steps", "hidden", "seed")}
        over, stops = threading.Event(), [0]
        thread = threading.Thread(target=disturb, args=(Path(pids), options, over, stops), daemon=True)
        thread.start()
        one = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1")
        try:
            ended = harness.launch(
                __file__, given | {"pids": pids}, options.workers, limit=60 * options.minutes + _AROUND, **one
            )
        finally:
            over.set()
            thread.join()
    epochs = len(ended.ranks[0]["memory"])
    settled = epochs // 4
    growth = max(rank["memory"][-1] / rank["memory"][settled] - 1 for rank in ended.ranks)
    differing = ended.ranks[0]["differing"]
    accuracy = ended.ranks[0]["accuracy"]
    row = [
        options.strategy,
        epochs,
        stops[0],
        len(differing),
        f"{growth:+.1%}",
        f"{accuracy[0]:.1f}",
        f"{accuracy[-1]:.1f}",
    ]
    print(
        render(
            [[str(cell) for cell in row]], ["strategy", "epochs", "stops", "differing", "memory", "first %", "last %"]
        )
    )
    figures = {"strategy": options.strategy, "stops": stops[0], "growth": growth, "differing": differing}
    figures |= {"accuracy": accuracy, "memory": [rank["memory"] for rank in ended.ranks]}
    harness.write(options.json, figures)
    return int(bool(differing) or growth > _GROWTH)


def disturb(pids: Path, options: argparse.Namespace, over: threading.Event, stops: list[int]) -> None:
    """Stop a worker, continue it, and so on, until `over` is set.

    Args:
        pids: folder in which each worker has a file with the name of its process number.
        options: options of the command.
        over: set at the end.
        stops: one counter.
    """
    chance = random.Random(options.seed)
    while not over.wait(chance.uniform(0.5, 3.0)):
        found = sorted(pids.iterdir())
        if len(found) < options.workers:
            continue  # some are still starting
        pid = int(chance.choice(found).name)
        try:
            os.kill(pid, signal.SIGSTOP)
            over.wait(chance.uniform(0.1, options.longest))
            os.kill(pid, signal.SIGCONT)
            stops[0] += 1
        except ProcessLookupError:
            return  # the training is over


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train for some minutes; return memory and accuracy by epoch, and the epochs after which weights differed."""
    import keras

    import hvdx

    hvdx.init()
    model, data, test, _ = harness.mlp(given)
    distribute = hvdx.keras.Distribute(given.strategy)
    memory: list[int] = []
    differing: list[int] = []
    end = time.monotonic() + 60 * given.minutes

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            memory.append(harness.memory("VmRSS"))
            digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
            everyone = hvdx.keras.allgather_object((digest, time.monotonic() >= end))
            if len({theirs for theirs, _ in everyone}) > 1:
                differing.append(epoch + 1)
            if epoch == 1:
                (Path(given.pids) / str(os.getpid())).touch()  # everything is compiled: the stops may begin
            self.model.stop_training = everyone[0][1]

    history = model.fit(
        data.repeat(),
        epochs=1_000_000,
        steps_per_epoch=given.steps,
        shuffle=False,
        verbose=0,
        validation_data=test,
        callbacks=[distribute, Watch()],
    )
    (Path(given.pids) / str(os.getpid())).unlink(missing_ok=True)
    accuracy = [100 * value for value in history.history["val_accuracy"]]
    return {"memory": memory, "differing": differing, "accuracy": accuracy}


if __name__ == "__main__":
    sys.exit(main())
