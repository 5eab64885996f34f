"""Parameter averaging on a slow network: accuracy, bytes and seconds for several periods.

    python jobs/benchmarks/averaging_network.py                                      four hosts at 100mbit
    python jobs/benchmarks/averaging_network.py --periods 1,16 --epochs 1 --hosts 2  a short run
    python jobs/benchmarks/averaging_network.py --json averaging.json                also write the figures

Emulated hosts (`hvdx lab`) train a dense network of 1.86 million parameters on Fashion-MNIST, 64 images per step on
each, SGD with momentum, the same seed. Accuracy does not depend on bandwidth, so each variant trains once in full over
fast links, and its steps are timed over slow links: whole periods without the first one. Seconds are the number of
steps times the mean step. "Sent" is the number of bytes that hvdx counts, "link" ("auto" in the JSON file) the number
that the network interface of rank 0 counts, and "dense" the number that a ring all-reduce of the weights sends in a
step. With momenta, twice as many are expected.
"""

import argparse
import itertools
import sys
import time
from statistics import mean

from hvdx.jobs.benchmarks import harness
from hvdx.report.table import quantity

# Bandwidth of the fast links, which do not delay the workers.
_FAST = "10gbit"


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, or one of its workers."""
    parser = harness.parser(__doc__)
    parser.add_argument("--hosts", type=int, default=4, help="number of emulated hosts")
    parser.add_argument("--bandwidth", default="100mbit", help="bandwidth of each slow link")
    parser.add_argument(
        "--periods",
        type=harness.several(int),
        default="1,4,16,64",
        metavar="K,K,...",
        help="steps between two averages",
    )
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data")
    parser.add_argument("--target", type=float, default=85.0, help="test accuracy to reach, in %%")
    parser.add_argument("--hidden", type=int, default=1024, help="units in each of two hidden layers")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data")
    return harness.run(parser, compare, train, argv)


# -- the comparison ---------------------------------------------------------------------------------------------------


def ways(periods: list[int]) -> list[harness.Row]:
    """List the compared ways: the dense baseline, and each period with and without the optimiser's state."""
    found = [{"name": "all_reduce", "spelling": "all_reduce", "period": 1, "state": False}]
    for period in periods:
        for state in (True, False):
            spelling = f"parameter_averaging:period={period},average_optimizer={str(state).lower()}"
            name = f"every {period}, {'with' if state else 'own'} momenta"
            found.append({"name": name, "spelling": spelling, "period": period, "state": state})
    return found


def compare(options: argparse.Namespace) -> int:
    """Train each way over fast links, time its steps over slow ones, and print the table."""
    rows: list[harness.Row] = []
    for way in ways(options.periods):
        learnt = launch(way["spelling"], _FAST, options)
        steps = max(2 * way["period"], 12)
        timed = launch(way["spelling"], options.bandwidth, options, steps)
        # Whole periods, without the first one, in which everything is compiled.
        begin = max(way["period"], steps // 2 // way["period"] * way["period"])
        milliseconds = 1e3 * mean(timed["seconds"][begin:])
        rows.append(way | {key: learnt[key] for key in ("curve", "sent", "auto", "steps")} | {"ms": milliseconds})
        last = rows[-1]["curve"][-1]
        print(f"{way['name']}: {milliseconds:.0f} ms a step, {last[1]:.2f} % after {last[0]} steps", flush=True)
    show(rows, options)
    harness.write(options.json, {"parameters": parameters(options), "rows": rows})
    return 0


def launch(spelling: str, bandwidth: str, options: argparse.Namespace, steps: int = 0) -> harness.Row:
    """Train on emulated hosts, and return the figures of rank 0."""
    setting = {"spelling": spelling, "steps": steps, "epochs": options.epochs, "hidden": options.hidden}
    return harness.launch(__file__, setting | {"seed": options.seed}, options.hosts, bandwidth).ranks[0]


def parameters(options: argparse.Namespace) -> int:
    """Return the number of weights and biases of the network."""
    sizes = (784, options.hidden, options.hidden, 10)
    return sum((a + 1) * b for a, b in itertools.pairwise(sizes))


def show(rows: list[harness.Row], options: argparse.Namespace) -> None:
    """Print the table."""
    dense = 4 * parameters(options) * 2 * (options.hosts - 1) / options.hosts

    def expected(row: harness.Row) -> float:
        return float(dense / row["period"] * (2 if row["state"] else 1))

    def reached(row: harness.Row) -> str:
        steps = next((steps for steps, accuracy in row["curve"] if accuracy >= options.target), None)
        return f"{steps * row['ms'] / 1e3:.0f}" if steps else "-"

    def accuracy(epoch: int) -> harness.Column:
        return f"epoch {epoch + 1}", lambda row: f"{row['curve'][epoch][1]:.2f}"

    columns = [
        ("way", lambda row: row["name"]),
        ("sent a step", lambda row: quantity(row["sent"] / row["steps"], "B")),
        ("/ expected", lambda row: f"{row['sent'] / row['steps'] / expected(row):.3f}"),
        ("link / sent", lambda row: f"{row['auto'] / row['sent']:.3f}"),
        harness.figure("ms a step", "ms", ".1f"),
        *map(accuracy, range(len(rows[0]["curve"]))),
        ("s in all", lambda row: f"{row['steps'] * row['ms'] / 1e3:.0f}"),
        (f"s to {options.target:g}", reached),
    ]
    print(f"\n{options.hosts} hosts, {options.bandwidth} a link; dense: {quantity(dense, 'B')} a step")
    print(harness.table(rows, columns))
    print("expected: dense / period, twice that with momenta; averages at the ends of epochs are not included")


# -- one rank ---------------------------------------------------------------------------------------------------------


def train(setting: argparse.Namespace) -> harness.Row:
    """Train all epochs with validation, or, if `steps` is given, that number of steps without validation."""
    import hvdx

    hvdx.init()
    model, data, test, _ = harness.mlp(setting)
    distribute, watch = hvdx.keras.Distribute(setting.spelling), _Watch()
    model.fit(
        data.repeat() if setting.steps else data,
        epochs=1 if setting.steps else setting.epochs,
        steps_per_epoch=setting.steps or None,
        validation_data=None if setting.steps else test,
        shuffle=False,
        verbose=0,
        callbacks=[distribute, harness.callback(watch)],
    )
    figures = {"seconds": watch.seconds, "curve": watch.curve, "auto": watch.link, "steps": len(watch.seconds)}
    return figures | {"sent": distribute.counters.bytes_sent}


class _Watch:
    """Watch of a `fit` that times steps, and records the accuracy and the bytes of the link after each epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self.link = 0
        self._first: int | None = None
        self._end = 0.0

    def on_epoch_begin(self, epoch: int, logs: harness.Logs = None) -> None:
        if self._first is None:
            self._first = harness.link_bytes("tx")
        self._end = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
        self.seconds.append(time.perf_counter() - self._end)
        self._end = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: harness.Logs = None) -> None:
        self.curve.append((len(self.seconds), 100 * (logs or {}).get("val_accuracy", 0.0)))
        self.link = harness.link_bytes("tx") - (self._first or 0)


if __name__ == "__main__":
    sys.exit(main())
