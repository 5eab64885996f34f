"""What each way of combining work costs on a network: milliseconds a step, and seconds until a network has learnt.

    python jobs/benchmarks/network.py                                   two hosts at 100mbit, short
    python jobs/benchmarks/network.py --hosts 2,4 --bandwidth 100mbit,1gbit --json network.json

Emulated hosts (`hvdx lab`) train a dense network of 1.86 million parameters on Fashion-MNIST, 64 pictures a step on
each, SGD with momentum, the same seed under every strategy; each in processes of its own, since Horovod's thread would
slow down what comes after it. "Alone" is the same training with nobody to talk to. The time to an accuracy is that of
the training steps, without evaluation, and without the first two steps, in which everything is compiled.

The training itself does not depend on the bandwidth: where a step is so slow that reaching the accuracy would take more
than --patience seconds, only some steps are timed there, and their number is taken from the fastest network.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

#: What is compared, by default: a name, and the strategy; "alone" is no strategy at all.
STRATEGIES = {
    "alone": "alone",
    "Horovod fp32": "all_reduce",
    "Horovod fp16": "all_reduce:compression=fp16",
    "threshold": "threshold",
}
#: Steps between two evaluations.
_EVERY = 20
# Steps that are not counted: tracing, compiling.
_COMPILING = 2


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or with --worker one rank of one run; see `--help`."""
    options = arguments(argv)
    return worker(options) if options.worker else compare(options)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2", help="numbers of emulated hosts, such as 2,4 (default: 2)")
    parser.add_argument("--bandwidth", default="100mbit", help="of each link, such as 100mbit,1gbit (default: 100mbit)")
    parser.add_argument(
        "--strategies",
        help="strategies in place of the default ones, each as `name=spelling`, separated by semicolons",
    )
    parser.add_argument("--target", type=float, default=85.0, help="test accuracy to reach, in %% (default: 85)")
    parser.add_argument("--most-steps", type=int, default=1500, help="give up after so many steps (default: 1500)")
    parser.add_argument(
        "--timed-steps", type=int, default=40, help="steps that are timed where it is only about time (default: 40)"
    )
    parser.add_argument(
        "--patience", type=float, default=60.0, help="longest training that is run in full, in seconds (default: 60)"
    )
    parser.add_argument("--hidden", type=int, default=1024, help="units in each of two hidden layers (default: 1024)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--worker", metavar="STRATEGY", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# -- the comparison -----------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> int:
    """Run every strategy on every network, and print a table for each."""
    chosen = STRATEGIES
    if options.strategies:
        pairs = (item.partition("=") for item in options.strategies.split(";"))
        chosen = {name.strip(): spelling.strip() for name, _, spelling in pairs}
    rows: list[dict[str, Any]] = []
    for hosts in map(int, options.hosts.split(",")):
        learnt: dict[str, int] = {}
        # The fastest first: it tells how many steps a strategy needs.
        for bandwidth in sorted(options.bandwidth.split(","), key=bits, reverse=True):
            for name, spelling in chosen.items():
                row = one(name, spelling, hosts, bandwidth, learnt, options)
                rows.append(row)
                print(line(row), flush=True)
            show([r for r in rows if (r["hosts"], r["bandwidth"]) == (hosts, bandwidth)], options)
            if options.json:
                Path(options.json).write_text(json.dumps(record(rows, options), indent=1) + "\n")
    return 0


def one(
    name: str, spelling: str, hosts: int, bandwidth: str, learnt: dict[str, int], options: argparse.Namespace
) -> dict[str, Any]:
    """One strategy on one network: in full, or where that takes too long, some steps of it."""
    row = {"strategy": name, "spelling": spelling, "hosts": hosts, "bandwidth": bandwidth}
    quick = launch(spelling, hosts, bandwidth, options, steps=options.timed_steps, target=101.0)
    expected = learnt.get(name, 500) * quick["milliseconds"] / 1e3
    if spelling == "alone":
        return row | quick
    if name in learnt and expected > options.patience:
        return row | quick | {"steps_to_target": learnt[name], "seconds_to_target": expected, "extrapolated": True}
    full = launch(spelling, hosts, bandwidth, options, steps=options.most_steps, target=options.target)
    if full["steps_to_target"]:
        learnt[name] = full["steps_to_target"]
    return row | full


def launch(
    spelling: str, hosts: int, bandwidth: str, options: argparse.Namespace, steps: int, target: float
) -> dict[str, Any]:
    """Start emulated hosts, train on them, and read what rank 0 wrote and what the links counted."""
    with tempfile.TemporaryDirectory() as folder:
        out, links = Path(folder) / "rank0.json", Path(folder) / "links.json"
        command = [
            *(sys.executable, "-m", "hvdx", "lab", "-n", str(hosts), "--bandwidth", bandwidth, "--json", str(links)),
            *("--", sys.executable, __file__, "--worker", spelling, "--out", str(out)),
            *("--most-steps", str(steps), "--target", str(target)),
            *("--hidden", str(options.hidden), "--seed", str(options.seed)),
        ]
        return figures_of("network", command, out) | {"links": json.loads(links.read_text())["links"]}


def figures_of(job: str, command: list[str], out: Path) -> dict[str, Any]:
    """Run a command, and read what it wrote.

    Args:
        job: who runs it, for the message.
        command: what to run.
        out: the JSON file that it writes.

    Raises:
        SystemExit: it failed, or wrote nothing; with all that it printed.
    """
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not out.exists():
        sys.exit(f"{job}: {' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(out.read_text())


def bits(bandwidth: str) -> float:
    """Bits a second of a rate such as 100mbit; infinity for none.

    Example:
        >>> bits("100mbit")
        100000000.0
    """
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3), ("bit", 1.0)):
        if bandwidth.endswith(unit):
            return float(bandwidth.removesuffix(unit)) * factor
    return float("inf")


def line(row: dict[str, Any]) -> str:
    """One run, while others are still going."""
    return f"{row['hosts']} hosts, {row['bandwidth']}: {row['strategy']}: {row['milliseconds']:.1f} ms a step"


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the table of one network."""
    from hvdx.report.table import quantity, render

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
        "link / that",
        f"steps to {options.target:g} %",
        "seconds",
        "MB",
    ]
    print(f"\n{rows[0]['hosts']} hosts, {rows[0]['bandwidth']} a link")
    print(render(cells, header=header))
    print(
        "MB: resident memory of rank 0 at its largest; *: steps from the fastest network, times ms a step\n", flush=True
    )


def record(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """What is kept of a comparison."""
    return {"command": "python jobs/benchmarks/network.py " + " ".join(sys.argv[1:]), "cores": os.cpu_count(),
            "target": options.target, "rows": rows}  # fmt: skip


# -- one rank -----------------------------------------------------------------------------------------------------


def worker(options: argparse.Namespace) -> int:
    """Train under one strategy until the target is reached, or the steps are over."""
    import hvdx

    hvdx.init()
    import keras

    from hvdx.jobs.data import load
    from hvdx.jobs.fashion_mnist import build

    alone = options.worker == "alone"
    data = load("fashion-mnist")
    keras.utils.set_random_seed(options.seed)
    model = build(data, "mlp", options.hidden, "sgd", None)
    train = hvdx.shard((data.train_x, data.train_y), 64, seed=options.seed).repeat()
    test = hvdx.shard((data.test_x, data.test_y), 500, shuffle=False, drop_remainder=False)
    distribute = None if alone else hvdx.keras.Distribute(options.worker)
    watch = make_watch(options.target, distribute)
    in_full = options.target <= 100
    model.fit(
        train,
        steps_per_epoch=_EVERY,
        epochs=-(-options.most_steps // _EVERY),
        validation_data=test if in_full else None,
        shuffle=False,
        verbose=0,
        callbacks=[watch] if distribute is None else [distribute, watch],
    )
    if hvdx.rank() == 0:
        Path(options.out).write_text(json.dumps(result(watch, distribute)))
    return 0


def make_watch(target: float, distribute: Any) -> Any:
    """A callback that times the steps, notes the accuracies, holds the link's counter against hvdx' own, and stops."""
    import keras

    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")

    class Watch(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[float] = []
            self.curve: list[tuple[int, float, float]] = []
            self.reached: tuple[int, float] | None = None
            self.counted = np.zeros(2)
            self._before = np.zeros(2)
            self._end = time.perf_counter()

        def sent(self) -> np.ndarray:
            """Bytes that the interface has sent, and that hvdx says it has."""
            here = int(counter.read_text()) if counter.exists() else 0
            return np.array([here, distribute.cost().sent if distribute else 0], float)

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
            self.curve.append((len(self.steps), seconds, accuracy))
            if accuracy >= target and self.reached is None:
                self.reached = len(self.steps), seconds
                self.model.stop_training = True

    return Watch()


def result(watch: Any, distribute: Any) -> dict[str, Any]:
    """The figures of a run."""
    # The first step of each epoch waits for ranks that were still evaluating.
    timed = [s for i, s in enumerate(watch.steps) if i >= _EVERY and i % _EVERY] or watch.steps[_COMPILING:]
    figures = {
        "milliseconds": 1e3 * statistics.median(timed),
        "steps": len(watch.steps),
        "steps_to_target": watch.reached[0] if watch.reached else None,
        "seconds_to_target": watch.reached[1] if watch.reached else None,
        "curve": watch.curve,
        "bytes_per_step": 0,
        "bytes_sent": 0,
        "link_bytes_of_reported": float(watch.counted[0] / watch.counted[1]) if watch.counted[1] else None,
        "memory_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    if distribute is not None:
        counters = distribute.counters
        figures |= {"bytes_per_step": counters.bytes_per_exchange, "bytes_sent": counters.bytes_sent,
                    "telemetry": [vars(t) for t in counters.telemetry]}  # fmt: skip
    return figures


if __name__ == "__main__":
    sys.exit(main())
