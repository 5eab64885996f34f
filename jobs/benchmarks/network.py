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
from typing import TYPE_CHECKING

import numpy as np

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity

if TYPE_CHECKING:
    import keras

    from hvdx.keras import Distribute

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
    rows: list[harness.Row] = []
    for hosts in options.hosts:
        learnt: dict[str, int] = {}
        # The fastest network first, since it gives the number of steps that a strategy needs.
        for bandwidth in sorted(options.bandwidth, key=harness.bits, reverse=True):
            print(f"{hosts} hosts, {bandwidth} a link")

            def measure(case: harness.Row, learnt: dict[str, int] = learnt) -> harness.Row:
                return run_strategy(**case, learnt=learnt, options=options)

            cases = [
                {"strategy": name, "spelling": spelling, "hosts": hosts, "bandwidth": bandwidth}
                for name, spelling in chosen.items()
            ]
            shared = {"target": options.target, "rows": rows}
            rows += harness.run_cases(None, cases, measure, columns(options.target))
            harness.write(options.json, shared)
    return 0


def run_strategy(
    strategy: str, spelling: str, hosts: int, bandwidth: str, learnt: dict[str, int], options: argparse.Namespace
) -> harness.Row:
    """Run one strategy on one network: in full, or, if that would take too long, for some steps."""

    def launch(steps: int, target: float) -> harness.Row:
        setting = {
            "spelling": spelling,
            "hidden": options.hidden,
            "seed": options.seed,
            "steps": steps,
            "target": target,
        }
        return harness.launch(__file__, setting, hosts, bandwidth).ranks[0]

    quick = launch(options.timed_steps, 101.0)
    expected = learnt.get(strategy, 500) * quick["milliseconds"] / 1e3
    if spelling == "alone":
        return quick
    if strategy in learnt and expected > options.patience:
        return quick | {"steps_to_target": learnt[strategy], "seconds_to_target": expected, "extrapolated": True}
    full = launch(options.most_steps, options.target)
    if full["steps_to_target"]:
        learnt[strategy] = full["steps_to_target"]
    return full


def columns(target: float) -> list[harness.Column]:
    """Return the columns of the table of one network; *: the steps of the fastest network, times ms a step."""

    def seconds(row: harness.Row) -> str:
        mark = "*" if row.get("extrapolated") else ""
        return f"{row['seconds_to_target']:.1f}{mark}" if row["seconds_to_target"] else "-"

    return [
        ("strategy", lambda row: row["strategy"]),
        harness.figure("ms a step", "milliseconds", ".1f"),
        ("sent a step", lambda row: quantity(row["bytes_per_step"], "B")),
        harness.figure("link / sent", "link_bytes_of_reported", ".3f"),
        (f"steps to {target:g} %", lambda row: str(row["steps_to_target"] or "-")),
        ("seconds", seconds),
        harness.figure("MB of rank 0", "memory_MB", ".0f"),
    ]


# -- one rank -----------------------------------------------------------------------------------------------------


def train(setting: argparse.Namespace) -> harness.Row:
    """Train under one strategy until the target accuracy or the number of steps is reached."""
    import hvdx

    hvdx.init()
    model, data, test, _ = harness.mlp(setting)
    distribute = None if setting.spelling == "alone" else hvdx.keras.Distribute(setting.spelling)
    watch = _Watch(model, setting.target, distribute)
    model.fit(
        data.repeat(),
        steps_per_epoch=_EVERY,
        epochs=-(-setting.steps // _EVERY),
        validation_data=test if setting.target <= 100 else None,
        shuffle=False,
        verbose=0,
        callbacks=[harness.callback(watch)] if distribute is None else [distribute, harness.callback(watch)],
    )
    return result(watch, distribute)


class _Watch:
    """Watch of a `fit` that times steps, compares the link's counter with hvdx', and stops at the target accuracy.

    Args:
        model: the model in training.
        target: accuracy in %.
        distribute: callback of hvdx, or None.
    """

    def __init__(self, model: "keras.Model", target: float, distribute: "Distribute | None") -> None:
        self.steps: list[float] = []
        self.reached: tuple[int, float] | None = None
        self.counted = np.zeros(2)
        self._model, self._target, self._distribute = model, target, distribute
        self._before = np.zeros(2)
        self._end = time.perf_counter()

    def sent(self) -> np.ndarray:
        """Return the bytes sent according to the interface, and according to hvdx."""
        return np.array([harness.link_bytes("tx"), self._distribute.cost().sent if self._distribute else 0], float)

    def on_epoch_begin(self, epoch: int, logs: harness.Logs = None) -> None:
        self._before = self.sent()
        self._end = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
        now = time.perf_counter()
        self.steps.append(now - self._end)
        if batch == _EVERY - 1 and len(self.steps) > _EVERY:
            # The first steps open channels and measure the link.
            self.counted += self.sent() - self._before
        self._end = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: harness.Logs = None) -> None:
        accuracy = 100 * (logs or {}).get("val_accuracy", 0.0)
        seconds = sum(self.steps[_COMPILING:])
        if accuracy >= self._target and self.reached is None:
            self.reached = len(self.steps), seconds
            self._model.stop_training = True


def result(watch: _Watch, distribute: "Distribute | None") -> harness.Row:
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
