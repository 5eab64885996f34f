"""Seconds to a target against the number of workers: one worker alone, then emulated hosts under each strategy.

    python jobs/benchmarks/scaling.py --json scaling.json                     1 to 8 hosts at 100mbit: an hour
    python jobs/benchmarks/scaling.py --models lm --hosts 1,2 --seeds 1       a short run
    python jobs/benchmarks/scaling.py --json scaling.json --show              the tables of the recorded runs

The networks are an MLP and a CNN with batch normalisation, trained by SGD with momentum on Fashion-MNIST to a test
accuracy, and a transformer, trained by AdamW on the sources of Python's standard library to a held-out loss. Each host
(`hvdx lab`) has one worker with one thread. All trainings run to the target.

Emulated hosts share cores, so a worker computes the more slowly the more of them there are. The computing of each step
therefore takes a fixed time, --computing: the worker waits after its last gradient, as for an accelerator. "Late" is
the share of steps in which it computed for longer. The seconds are those of the training steps, waits included, without
evaluations and the first two steps, in which everything is compiled.

Learning rates are tuned first, in runs without waits and without limits on the links, with a seed of their own: for one
worker, all-reduce and averaging at each number of hosts, the one of --rates that needs the fewest steps. fp16,
Horovod and `Threshold` train at the rate of all-reduce.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdx.jobs.benchmarks import harness

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from hvdx.keras import Distribute

    #: Network, batches of this worker, and the worker's share of the test data.
    Training = tuple[keras.Model, tf.data.Dataset, tf.data.Dataset]

# Steps between two evaluations, and between two averages of the weights. An average at the end of an epoch, because the
# epoch is shorter than the period, would not be in the time of a step.
_EVERY = 10
#: Name of the row without an exchange.
ALONE = "one worker"
#: Compared strategies by name. MPI carries all dense vectors except those of "horovod": Horovod's thread takes a core
#: that the emulated hosts share.
STRATEGIES = {
    "horovod": "all_reduce:engine=horovod",
    "all-reduce": "all_reduce:engine=mpi",
    "fp16": "all_reduce:engine=mpi,compression=fp16",
    "averaging": f"parameter_averaging:engine=mpi,period={_EVERY}",
    "threshold": "threshold",
}
# Strategies that need no Horovod.
_DEFAULT = [name for name in STRATEGIES if name != "horovod"]
_STRATEGIES_HELP = f"strategies on 2 or more hosts: {', '.join(STRATEGIES)}, or others, such as threshold:overhead=0.05"
# Strategies whose rates are tuned; the others train at that of all-reduce.
_TUNED = (ALONE, "all-reduce", "averaging")
# Seed of the runs that tune.
_TUNING = 1000
# Uncounted first steps, which trace and compile.
_COMPILING = 2


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        target: test accuracy in %, or held-out loss in nats per character.
        batch: samples in a step of a worker.
        tested: samples of an evaluation.
        rates: learning rates to choose from.
        build: function from the setting of a training to the training.
    """

    target: float
    batch: int
    tested: int
    rates: tuple[float, ...]
    build: "Callable[[argparse.Namespace, Task], Training]"

    def reached(self, logs: harness.Logs) -> bool:
        """Return whether the metrics of an epoch reach the target."""
        found = logs or {}
        if "val_accuracy" in found:
            return 100 * found["val_accuracy"] >= self.target
        return found["val_loss"] <= self.target


def main(argv: list[str] | None = None) -> int:
    """Run the missing trainings and print the tables, or run one worker."""
    parser = harness.parser(__doc__)
    add, words = parser.add_argument, harness.several(str)
    add("--models", type=words, default="mlp,lm", metavar="NAME,...", help=f"networks: {', '.join(TASKS)}")
    add("--hosts", type=harness.several(int), default="1,2,4,8", metavar="N,...", help="numbers of emulated hosts")
    add("--bandwidth", type=words, default="100mbit", metavar="RATE,...", help="bandwidths of the links")
    add("--strategies", type=words, default=",".join(_DEFAULT), metavar="NAME,...", help=_STRATEGIES_HELP)
    add("--rates", type=harness.several(float), metavar="X,...", help="learning rates to choose from, for all models")
    add("--computing", type=float, default=100.0, metavar="MS", help="time in which a worker computes its gradients")
    add("--seeds", type=int, default=3, metavar="N", help="number of seeds")
    add(
        "--most-steps", type=int, default=3000, metavar="N", help="steps after which a training ends without the target"
    )
    add("--show", action="store_true", help="only print the tables of the runs in the --json file")
    return harness.run(parser, compare, train, argv)


# -- the comparison -----------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> int:
    """Tune the rates, run every training that is missing, and print a table for each network and link."""
    shared = {"computing_ms": options.computing}
    rows = harness.finished(options.json, **shared)
    places = [] if options.show else [(model, hosts) for model in options.models for hosts in options.hosts]
    for model, hosts in places:
        names = [ALONE] if hosts == 1 else options.strategies

        def launch(bandwidth: str, runs: list[harness.Row], model: str = model, hosts: int = hosts) -> None:
            case = {"model": model, "hosts": hosts, "bandwidth": bandwidth}
            missing = [run for run in runs if not any((case | run).items() <= row.items() for row in rows)]
            if not missing:
                return
            pause = 0.0 if bandwidth == "none" else options.computing / 1e3
            setting = {"model": model, "runs": missing, "pause": pause, "steps": options.most_steps}
            found = harness.launch(__file__, setting, hosts, bandwidth if hosts > 1 else "").ranks[0]["runs"]
            rows.extend(case | run | figures for run, figures in zip(missing, found, strict=True))
            for row in rows[-len(missing) :]:
                print(_line(row), file=sys.stderr, flush=True)
            harness.write(options.json, shared | {"rows": rows})

        rates = options.rates or TASKS[model].rates
        # Most strategies train at the rate of all-reduce.
        tuned = [name for name in _TUNED if name in names or (name == "all-reduce" and hosts > 1)]
        launch("none", [_run(name, rate, _TUNING) for name in tuned for rate in rates])
        best = {name: _best(rows, model, hosts, name, rates) for name in tuned}
        for bandwidth in options.bandwidth if hosts > 1 else ["alone"]:
            chosen = [(name, best[name if name in best else "all-reduce"]) for name in names]
            launch(bandwidth, [_run(name, rate, seed) for name, rate in chosen for seed in range(options.seeds)])
    show(rows)
    return 0


def _run(name: str, rate: float, seed: int) -> harness.Row:
    return {"strategy": name, "rate": rate, "seed": seed}


def _line(row: harness.Row) -> str:
    at = "tuning" if row["seed"] == _TUNING else f"{row['bandwidth']}, seed {row['seed']}"
    reached = f"{row['steps_to_target']} steps, {row['seconds']:.1f} s" if row["steps_to_target"] else "not reached"
    return f"{row['model']}, {row['hosts']} x {row['strategy']}, rate {row['rate']:g}, {at}: {reached}"


def _best(rows: Iterable[harness.Row], model: str, hosts: int, name: str, rates: Sequence[float]) -> float:
    """Return the rate that needed the fewest steps."""
    case = {"model": model, "hosts": hosts, "strategy": name, "seed": _TUNING}
    found = {row["rate"]: row["steps_to_target"] or np.inf for row in rows if case.items() <= row.items()}
    return min(rates, key=lambda rate: found.get(rate, np.inf))


def show(rows: Sequence[harness.Row]) -> None:
    """Print a table for each network and link: seconds to the target, and how often faster than one worker."""
    for model, bandwidth in dict.fromkeys((r["model"], r["bandwidth"]) for r in rows if r["hosts"] > 1):
        if bandwidth == "none":
            continue
        print(f"\n{model}, {bandwidth}, target {TASKS[model].target:g}")
        print(harness.table(summary(rows, model, bandwidth), _COLUMNS))


def summary(rows: Iterable[harness.Row], model: str, bandwidth: str) -> list[harness.Row]:
    """Return a row for each number of hosts and strategy, with the means, least and most of its seeds.

    Args:
        rows: rows of the JSON file.
        model: name of the network.
        bandwidth: bandwidth of the links.
    """
    mine = [r for r in rows if r["model"] == model and r["seed"] != _TUNING and r["bandwidth"] in (bandwidth, "alone")]
    result, alone = [], 0.0
    for hosts, name in dict.fromkeys((r["hosts"], r["strategy"]) for r in sorted(mine, key=lambda r: r["hosts"])):
        runs = [r for r in mine if (r["hosts"], r["strategy"]) == (hosts, name)]
        complete = all(r["steps_to_target"] for r in runs)
        seconds = [r["seconds"] for r in runs]
        mean = float(np.mean(seconds)) if complete else None
        alone = mean or alone if name == ALONE else alone
        steps = float(np.mean([r["steps_to_target"] for r in runs])) if complete else None
        result.append(
            {
                "hosts": hosts,
                "strategy": name,
                "rate": runs[0]["rate"],
                "seeds": len(runs),
                "steps": steps,
                "ms": float(np.mean([1e3 * r["seconds"] / r["steps"] for r in runs])),
                "bytes": float(np.mean([r["bytes_per_step"] for r in runs])),
                "seconds": mean,
                "least": min(seconds),
                "most": max(seconds),
                "faster": alone / mean if mean else None,
                "late": max(r["late"] for r in runs),
            }
        )
    return result


_COLUMNS = [
    ("workers", lambda row: str(row["hosts"])),
    ("strategy", lambda row: row["strategy"]),
    harness.figure("rate", "rate", "g"),
    harness.figure("steps", "steps", ".0f"),
    harness.figure("ms a step", "ms", ".1f"),
    harness.figure("kB a step", "bytes", ".1f", 1e-3),
    harness.figure("seconds", "seconds", ".1f"),
    ("range", lambda row: f"{row['least']:.1f} to {row['most']:.1f}" if row["seconds"] else ""),
    harness.figure("faster", "faster", ".2f"),
    harness.figure("late", "late", ".2f"),
]


# -- one rank -----------------------------------------------------------------------------------------------------


def train(setting: argparse.Namespace) -> harness.Row:
    """Run the trainings of a launch one after another."""
    import hvdx

    hvdx.init()
    return {"runs": [train_once(argparse.Namespace(**vars(setting) | run)) for run in setting.runs]}


def train_once(setting: argparse.Namespace) -> harness.Row:
    """Train one network until the target, or for the largest number of steps."""
    import keras

    import hvdx

    task = TASKS[setting.model]
    keras.utils.set_random_seed(setting.seed)
    network, data, test = task.build(setting, task)
    spelling = STRATEGIES.get(setting.strategy, setting.strategy)
    distribute = None if setting.strategy == ALONE else hvdx.keras.Distribute(spelling)
    watch = _Watch(task, network, setting.pause, distribute)
    model = paced(network, watch.computed)
    watch.model = model
    model.fit(
        data.repeat(),
        steps_per_epoch=_EVERY,
        epochs=-(-setting.steps // _EVERY),
        validation_data=test,
        shuffle=False,
        verbose=0,
        callbacks=[harness.callback(watch)] if distribute is None else [distribute, harness.callback(watch)],
    )
    return watch.result()


def paced(network: "keras.Model", computed: Callable[[], None]) -> "keras.Model":
    """Return a network with a function that is called in each step, after the last gradient.

    Args:
        network: compiled model. The result shares its layers and optimiser.
        computed: the function. What uses the gradients waits for its end.
    """
    import keras
    import tensorflow as tf

    def wait() -> np.float32:
        computed()
        return np.float32(0)

    class Paced(keras.Model):
        def train_step(self, data: "tuple[tf.Tensor, tf.Tensor]") -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=predicted)
            gradients = tape.gradient(loss, [v.value for v in self.trainable_variables])
            # Gradients of tables are rows and their numbers.
            with tf.control_dependencies(tf.nest.flatten(gradients, expand_composites=True)):
                waited = tf.numpy_function(wait, [], tf.float32)
            with tf.control_dependencies([waited]):
                gradients = tf.nest.map_structure(tf.identity, gradients, expand_composites=True)
            self.optimizer.apply(gradients, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, predicted)
            return {metric.name: metric.result() for metric in self.metrics}

    model = Paced(network.inputs, network.outputs)
    metrics = ["accuracy"] if "accuracy" in str(network.get_compile_config().get("metrics")) else None
    model.compile(optimizer=network.optimizer, loss=network.loss, metrics=metrics, jit_compile=False)
    return model


class _Watch:
    """Watch of a `fit` that lets computing take its time, times steps, and stops at the target.

    Args:
        task: what is trained.
        model: the model in training.
        pause: seconds that the computing of a step takes at least.
        distribute: callback of hvdx, or None.
    """

    def __init__(self, task: Task, model: "keras.Model", pause: float, distribute: "Distribute | None") -> None:
        self.model = model
        self._task, self._pause, self._distribute = task, pause, distribute
        self._steps: list[float] = []
        self._computing: list[float] = []
        self._reached: int | None = None
        self._begin = self._end = time.perf_counter()

    def computed(self) -> None:
        """Wait until the time of computing is over."""
        self._computing.append(time.perf_counter() - self._begin)
        time.sleep(max(0.0, self._pause - self._computing[-1]))

    def on_epoch_begin(self, epoch: int, logs: harness.Logs = None) -> None:
        self._end = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: harness.Logs = None) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
        now = time.perf_counter()
        self._steps.append(now - self._end)
        self._end = now

    def on_epoch_end(self, epoch: int, logs: harness.Logs = None) -> None:
        if self._task.reached(logs):
            self._reached = len(self._steps)
            self.model.stop_training = True

    def result(self) -> harness.Row:
        """Return the figures of the training."""
        counters = self._distribute.counters if self._distribute else None
        return {
            "steps": len(self._steps),
            "steps_to_target": self._reached,
            "seconds": sum(self._steps[_COMPILING:]),
            "bytes_per_step": counters.bytes_sent / len(self._steps) if counters else 0,
            "computing_ms": 1e3 * median(self._computing[_COMPILING:]),
            "late": float(np.mean([s > self._pause for s in self._computing[_COMPILING:]])) if self._pause else 0.0,
        }


# -- what is trained ------------------------------------------------------------------------------------------------


def images(setting: argparse.Namespace, task: Task) -> "Training":
    """Build a network for Fashion-MNIST, and shard its data."""
    import hvdx
    from hvdx.jobs.data import load
    from hvdx.jobs.fashion_mnist import build

    data = load("fashion-mnist")
    network = build(data, setting.model, 256 if setting.model == "mlp" else None, "sgd", setting.rate)
    train = hvdx.shard((data.train_x, data.train_y), task.batch, seed=setting.seed)
    test = (data.test_x[: task.tested], data.test_y[: task.tested])
    return network, train, hvdx.shard(test, 500, shuffle=False, drop_remainder=False)


def text(setting: argparse.Namespace, task: Task) -> "Training":
    """Build a transformer, and shard windows of its text."""
    import hvdx
    from hvdx.jobs.data import load_text
    from hvdx.jobs.language_model import windows

    texts = load_text()
    network = harness.transformer(setting.rate)
    train = hvdx.shard(windows(texts.train, harness.CONTEXT), task.batch, steps=setting.steps, seed=setting.seed)
    x, y = windows(texts.held_out, harness.CONTEXT)
    spread = np.linspace(0, len(x) - 1, task.tested).astype(int)
    return network, train, hvdx.shard((x[spread], y[spread]), 32, shuffle=False, drop_remainder=False)


#: Tasks by name.
TASKS = {
    "mlp": Task(84.0, 32, 10_000, (0.01, 0.02, 0.05), images),
    "cnn": Task(84.0, 16, 2_000, (0.01, 0.02, 0.05), images),
    "lm": Task(2.4, 4, harness.WINDOWS, (0.002, 0.004), text),
}

if __name__ == "__main__":
    sys.exit(main())
