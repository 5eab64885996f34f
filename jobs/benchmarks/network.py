"""Cost of each strategy on a slow network: milliseconds per step, and seconds to reach a test accuracy.

    python jobs/benchmarks/network.py                                   two hosts at 100mbit, short
    python jobs/benchmarks/network.py --hosts 2,4 --bandwidth 100mbit,1gbit --json network.json

Emulated hosts (`hvdx lab`) train a dense network of 1.86 million parameters on Fashion-MNIST, 64 images per step on
each, SGD with momentum, with the same seed under every strategy. Each strategy runs in new processes, since Horovod's
thread would slow down the next one. "Alone" is the same training without communication. The time to an accuracy counts
only training steps, without evaluation and without the first two steps, in which everything is compiled.

Accuracy does not depend on bandwidth. If a step is so slow that reaching the accuracy would take more than --patience
seconds, only some steps are timed, and the number of steps is taken from the fastest network.
"""

import argparse
import resource
import sys
import time
from statistics import median
from typing import Any

import numpy as np

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity, render

#: Strategies that are compared by default, by name; "alone" stands for no strategy.
STRATEGIES = {
    "alone": "alone",
    "Horovod fp32": "all_reduce:engine=horovod",
    "Horovod fp16": "all_reduce:engine=horovod,compression=fp16",
    "threshold": "threshold",
}
#: Steps between two evaluations.
_EVERY = 20
# Uncounted first steps, which trace and compile.
_COMPILING = 2


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    add, numbers, words = parser.add_argument, harness.several(int), harness.several(str)
    add("--hosts", type=numbers, default="2", metavar="N,N,...", help="numbers of emulated hosts")
    add(
        "--bandwidth",
        type=words,
        default="100mbit",
        metavar="RATE,...",
        help="bandwidths of the links, such as 100mbit,1gbit",
    )
    add("--strategies", help="strategies to compare: `name=spelling`, separated by semicolons")
    add("--target", type=float, default=85.0, help="test accuracy to reach, in %%")
    add("--most-steps", type=int, default=1500, metavar="N", help="largest number of steps of a training")
    add("--timed-steps", type=int, default=40, metavar="N", help="number of steps of a run that only measures time")
    add(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="longest expected time of a training that is run in full",
    )
    add("--hidden", type=int, default=1024, help="units in each of two hidden layers")
    add("--seed", type=int, default=0, help="seed of weights and data")
    return harness.run(parser, compare, train, argv)


# -- the comparison -----------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> int:
    """Run every strategy on every network, and print a table for each."""
    chosen = STRATEGIES
    if options.strategies:
        pairs = (item.partition("=") for item in options.strategies.split(";"))
        chosen = {name.strip(): spelling.strip() for name, _, spelling in pairs}
    rows: list[dict[str, Any]] = []
    for hosts in options.hosts:
        learnt: dict[str, int] = {}
        # The fastest network first, since it gives the number of steps that a strategy needs.
        for bandwidth in sorted(options.bandwidth, key=harness.bits, reverse=True):
            for name, spelling in chosen.items():
                row = run_strategy(name, spelling, hosts, bandwidth, learnt, options)
                rows.append(row)
                print(line(row), flush=True)
            show([r for r in rows if (r["hosts"], r["bandwidth"]) == (hosts, bandwidth)], options)
            harness.write(options.json, {"target": options.target, "rows": rows})
    return 0


def run_strategy(
    name: str, spelling: str, hosts: int, bandwidth: str, learnt: dict[str, int], options: argparse.Namespace
) -> dict[str, Any]:
    """Run one strategy on one network: in full, or, if that would take too long, for some steps."""
    row = {"strategy": name, "spelling": spelling, "hosts": hosts, "bandwidth": bandwidth}

    def launch(steps: int, target: float) -> dict[str, Any]:
        given = {"spelling": spelling, "hidden": options.hidden, "seed": options.seed, "steps": steps, "target": target}
        return harness.launch(__file__, given, hosts, bandwidth).ranks[0]

    quick = launch(options.timed_steps, 101.0)
    expected = learnt.get(name, 500) * quick["milliseconds"] / 1e3
    if spelling == "alone":
        return row | quick
    if name in learnt and expected > options.patience:
        return row | quick | {"steps_to_target": learnt[name], "seconds_to_target": expected, "extrapolated": True}
    full = launch(options.most_steps, options.target)
    if full["steps_to_target"]:
        learnt[name] = full["steps_to_target"]
    return row | full


def line(row: dict[str, Any]) -> str:
    """Return the progress line of a finished run."""
    return f"{row['hosts']} hosts, {row['bandwidth']}: {row['strategy']}: {row['milliseconds']:.1f} ms a step"


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table of one network."""
    (alone,) = [r["milliseconds"] for r in rows if r["spelling"] == "alone"] or [None]
    cells = []
    for row in rows:
        seconds = row.get("seconds_to_target")
        mark = "*" if row.get("extrapolated") else ""
        cells.append(
            [
                row["strategy"],
                f"{row['milliseconds']:.1f}",
                f"{row['milliseconds'] / alone:.2f}" if alone else "",
                quantity(row["bytes_per_step"], "B"),
                f"{row['link_bytes_of_reported']:.3f}" if row["link_bytes_of_reported"] else "-",
                str(row.get("steps_to_target") or "-"),
                f"{seconds:.1f}{mark}" if seconds else "-",
                f"{row['memory_MB']:.0f}",
            ]
        )
    header = [
        "strategy",
        "ms a step",
        "/ alone",
        "sent a step",
        "link / sent",
        f"steps to {options.target:g} %",
        "seconds",
        "MB",
    ]
    print(f"\n{rows[0]['hosts']} hosts, {rows[0]['bandwidth']} a link")
    print(render(cells, header=header))
    print(
        "MB: peak resident memory of rank 0; *: number of steps from the fastest network, times ms a step\n", flush=True
    )


# -- one rank -----------------------------------------------------------------------------------------------------


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train under one strategy until the target accuracy or the number of steps is reached."""
    import hvdx

    hvdx.init()
    model, data, test, _ = harness.mlp(given)
    distribute = None if given.spelling == "alone" else hvdx.keras.Distribute(given.spelling)
    watch = make_watch(given.target, distribute)
    model.fit(
        data.repeat(),
        steps_per_epoch=_EVERY,
        epochs=-(-given.steps // _EVERY),
        validation_data=test if given.target <= 100 else None,
        shuffle=False,
        verbose=0,
        callbacks=[watch] if distribute is None else [distribute, watch],
    )
    return result(watch, distribute)


def make_watch(target: float, distribute: Any) -> Any:
    """Make a callback that times steps, compares the link's counter with hvdx', and stops at the target accuracy."""
    import keras

    class Watch(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[float] = []
            self.reached: tuple[int, float] | None = None
            self.counted = np.zeros(2)
            self._before = np.zeros(2)
            self._end = time.perf_counter()

        def sent(self) -> np.ndarray:
            """Return the bytes sent according to the interface, and according to hvdx."""
            return np.array([harness.link_bytes("tx"), distribute.cost().sent if distribute else 0], float)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._before = self.sent()
            self._end = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.perf_counter()
            self.steps.append(now - self._end)
            if batch == _EVERY - 1 and len(self.steps) > _EVERY:
                # The first steps open channels and measure the link.
                self.counted += self.sent() - self._before
            self._end = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            accuracy = 100 * (logs or {}).get("val_accuracy", 0.0)
            seconds = sum(self.steps[_COMPILING:])
            if accuracy >= target and self.reached is None:
                self.reached = len(self.steps), seconds
                self.model.stop_training = True

    return Watch()


def result(watch: Any, distribute: Any) -> dict[str, Any]:
    """Return the figures of a run."""
    # Without the first step of each epoch, which waits for ranks that are still evaluating.
    timed = [s for i, s in enumerate(watch.steps) if i >= _EVERY and i % _EVERY] or watch.steps[_COMPILING:]
    figures = {
        "milliseconds": 1e3 * median(timed),
        "steps": len(watch.steps),
        "steps_to_target": watch.reached[0] if watch.reached else None,
        "seconds_to_target": watch.reached[1] if watch.reached else None,
        "bytes_per_step": 0,
        "bytes_sent": 0,
        "link_bytes_of_reported": float(watch.counted[0] / watch.counted[1]) if watch.counted[1] else None,
        "memory_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    if distribute is not None:
        counters = distribute.counters
        figures |= {"bytes_per_step": counters.bytes_per_exchange, "bytes_sent": counters.bytes_sent}
    return figures


if __name__ == "__main__":
    sys.exit(main())
