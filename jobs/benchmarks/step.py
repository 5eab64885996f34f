"""Time of a training step through hvdx, compared in one run with a hand-written Horovod loop.

Every variant trains the same network on the same random batches. The variants take turns of a few steps in rounds, in a
new order in every round, so that other load on the machine affects all of them equally. A variant's ratio is the median
over the rounds of (its median step) / (median step of the hand-written Horovod loop in the same round). Horovod's
thread also polls during the steps over MPI; with --without-horovod there is no such thread.

    mpirun -n 2 python jobs/benchmarks/step.py                    # four to five minutes on two cores
    mpirun -n 2 python jobs/benchmarks/step.py --quick            # about half of that; the spread is larger
    mpirun -n 2 python jobs/benchmarks/step.py --sizes 500k --json steps.json
    mpirun -n 2 python jobs/benchmarks/step.py --without-horovod  # ratios to steps without communication
    horovodrun -np 2 python jobs/benchmarks/step.py
    python jobs/benchmarks/step.py                                # one worker: the cost of hvdx without communication

Open MPI 5 needs `horovodrun --binding-args="--bind-to none --map-by slot" -np 2 ...`. If ranks share one machine, the
figures show the cost of the software and not of a network. `hvdx.init` gives each rank its share of the cores.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Turns off hvdx's warning about the variants that do not communicate.
os.environ.setdefault("HVDX_ALLOW_SEPARATE", "1")

import keras
import numpy as np
import tensorflow as tf

import hvdx
from hvdx.jobs.benchmarks import harness
from hvdx.keras.fit.data import untuned
from hvdx.report import table

_INPUTS, _CLASSES, _BATCHES = 784, 10, 8
_RAW = "Horovod, hand-written loop"
_OPTIMIZER = "hvdx, DistributedOptimizer"
_LOOP_ALONE = "no communication, hand-written loop"
# Untimed first steps, which trace the training functions and allocate Horovod's buffers.
_WARM_UP = 3
# Smallest numbers for a meaningful median.
_FEWEST_ROUNDS, _FEWEST_STEPS = 5, 2


@dataclass
class Variant:
    """One way to take a step.

    Attributes:
        name: name in the table.
        wire: dtype of the gradients on the network.
        step: function that takes one step, and returns when the loss is computed.
        close: function to call after the last step.
        rounds: seconds of each timed step, round by round.
    """

    name: str
    wire: str
    step: Callable[[], object]
    close: Callable[[], None] = lambda: None
    rounds: list[list[float]] = field(default_factory=list)


def main() -> int:
    """Measure every size, and print a table for each."""
    options = parse_arguments()
    # TensorFlow would warn about retracing, because every variant has its own training function.
    tf.get_logger().setLevel("ERROR")
    hvdx.init()
    rows: list[harness.Row] = []
    for size in options.sizes:
        measured = measure(size, options)
        rows += measured
        if hvdx.rank() == 0:
            show(measured)
    if hvdx.rank() == 0:
        harness.write(options.json, {"rows": rows}, hvdx.size())
    return 0


def measure(size: int, options: argparse.Namespace) -> list[harness.Row]:
    """Time all variants with a network of about `size` parameters; return a row for each, the same on all ranks."""
    keras.utils.set_random_seed(0)
    network = build_network(size)
    data = make_data(options.batch)
    variants = make_variants(network, data, not options.without_horovod)
    for variant in variants:
        wait_for_all_ranks()
        for _ in range(_WARM_UP):
            variant.step()
    rounds, steps = choose_rounds(variants, options)
    say(f"\n{network.count_params():,} parameters: {rounds} rounds of {steps} steps, {len(variants)} variants")
    for number in range(rounds):
        # Seeded, so that all ranks take the variants in the same order.
        for variant in random.Random(number).sample(variants, len(variants)):
            variant.rounds.append(time_steps(variant.step, steps))
    for variant in variants:
        variant.close()
    check_against_fit(network, data, variants[0], 2 * steps, default_strategy(not options.without_horovod))
    return summarise(variants, network.count_params(), options.batch)


def make_variants(network: keras.Model, data: tf.data.Dataset, horovod: bool) -> list[Variant]:
    """Make all variants, which share the network's weights; each has its own optimiser.

    Args:
        network, data: network and batches.
        horovod: False omits the variants that need Horovod.
    """
    by_fit = FitSteps(share_weights(network), data, [hvdx.keras.Distribute(default_strategy(horovod))])
    variants = [Variant("hvdx, model.fit with Distribute", "float32", by_fit, by_fit.close)]
    if hvdx.size() == 1:
        variants.append(Variant(_OPTIMIZER, "float32", hvdx_loop(network, data, "all_reduce")))
    else:
        wires = {"float32": "none", "float16": "fp16", "bfloat16": "bf16"}
        engines = {_OPTIMIZER: "horovod", f"{_OPTIMIZER} over MPI": "mpi"}
        variants += [
            Variant(name, wire, hvdx_loop(network, data, f"all_reduce:compression={compression},engine={engine}"))
            for name, engine in engines.items()
            for wire, compression in wires.items()
            if horovod or engine == "mpi"
        ]
    if hvdx.size() > 1 and horovod:
        variants += [
            Variant(_RAW, "float32", horovod_loop(network, data, "none")),
            Variant(_RAW, "float16", horovod_loop(network, data, "fp16")),
        ]
    fit_alone = FitSteps(share_weights(network), data, [])
    return [
        *variants,
        Variant("no communication, model.fit", "-", fit_alone, fit_alone.close),
        Variant(_LOOP_ALONE, "-", hand_loop(network, data, make_optimizer(), lambda gradients: gradients)),
    ]


def default_strategy(horovod: bool) -> str:
    """Return the default strategy of `Distribute()` with or without Horovod."""
    return f"all_reduce:engine={'horovod' if horovod else 'mpi'}"


def hvdx_loop(network: keras.Model, data: tf.data.Dataset, strategy: str) -> Callable[[], object]:
    """Make a hand-written loop with hvdx's optimiser."""
    optimizer = hvdx.keras.DistributedOptimizer(make_optimizer(), strategy=strategy)
    return hand_loop(network, data, optimizer, lambda gradients: gradients)


def horovod_loop(network: keras.Model, data: tf.data.Dataset, compression: str) -> Callable[[], object]:
    """Make a hand-written loop with Horovod's own collective, the yardstick."""
    import horovod.tensorflow as hvd

    def average(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        averaged: list[tf.Tensor] = hvd.grouped_allreduce(
            gradients,
            op=hvd.Average,
            compression=getattr(hvd.Compression, compression),
            name=f"bench.{compression}.{network.count_params()}",
            ignore_name_scope=True,
        )
        return averaged

    return hand_loop(network, data, make_optimizer(), average)


def hand_loop(
    network: keras.Model,
    data: tf.data.Dataset,
    optimizer: keras.optimizers.Optimizer,
    combine: Callable[[list[tf.Tensor]], list[tf.Tensor]],
) -> Callable[[], float]:
    """Return a function that takes one step of a custom training loop, as users write it."""
    loss_of = make_loss()
    variables = network.trainable_variables
    optimizer.build(variables)

    @tf.function
    def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, network(x, training=True))
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(combine(gradients), variables)
        return loss

    batches = iter(data)
    return lambda: float(train(*next(batches)))


class FitSteps:
    """`Model.fit` in single steps, so that it can take turns with other variants.

    It makes the calls of `fit` in the same order: the callbacks' hooks, and the training function on an iterator.

    Args:
        model: compiled model.
        data: endless batches.
        callbacks: callbacks of `fit`.
    """

    def __init__(self, model: keras.Model, data: tf.data.Dataset, callbacks: Sequence[keras.callbacks.Callback]):
        self._model = model
        self._batches = iter(data)
        self._number = 0
        model.stop_training = False
        self._hooks = keras.callbacks.CallbackList(
            list(callbacks), add_history=True, model=model, verbose=0, epochs=1, steps=sys.maxsize
        )
        model.make_train_function()
        self._hooks.on_train_begin()
        model.reset_metrics()
        self._hooks.on_epoch_begin(0)

    def __call__(self) -> None:
        """Take one step."""
        self._hooks.on_train_batch_begin(self._number)
        logs = self._model.train_function(self._batches)
        self._hooks.on_train_batch_end(self._number, logs)
        self._number += 1

    def close(self) -> None:
        """End the fit."""
        self._hooks.on_train_end()


class StepTimer(keras.callbacks.Callback):
    """Callback that records the time at the end of each step of a real `fit`."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: harness.Logs = None) -> None:
        """Record the time."""
        self.ends.append(time.perf_counter())


def check_against_fit(network: keras.Model, data: tf.data.Dataset, stepped: Variant, steps: int, strategy: str) -> None:
    """Run a real `fit`, and print its step time beside that of `FitSteps`."""
    timer = StepTimer()
    share_weights(network).fit(
        data,
        steps_per_epoch=_WARM_UP + steps,
        shuffle=False,
        verbose=0,
        callbacks=[hvdx.keras.Distribute(strategy), timer],
    )
    real = np.diff(timer.ends)[_WARM_UP:]
    say(
        f"  a real fit of {len(timer.ends)} steps after the rounds: median {1e3 * np.median(real):.1f} ms a step; "
        f"fit in single steps in the rounds: {1e3 * np.median(np.concatenate(stepped.rounds)):.1f} ms"
    )


def choose_rounds(variants: Sequence[Variant], options: argparse.Namespace) -> tuple[int, int]:
    """Return the numbers of rounds and of timed steps per turn that fit into the time limit, as measured by rank 0."""
    once = sum(float(np.median(time_steps(variant.step, _WARM_UP))) for variant in variants)
    # Less one, since each turn begins with an untimed step.
    rounds, steps = options.rounds, min(options.steps, round(options.seconds / (options.rounds * once)) - 1)
    if steps < _FEWEST_STEPS:
        steps = _FEWEST_STEPS
        rounds = min(rounds, max(_FEWEST_ROUNDS, round(options.seconds / ((steps + 1) * once))))
    agreed: tuple[int, int] = hvdx.keras.broadcast_object((rounds, steps), 0)
    return agreed


def time_steps(step: Callable[[], object], steps: int) -> list[float]:
    """Return the seconds of each of `steps` steps, after an untimed one."""
    wait_for_all_ranks()
    step()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def wait_for_all_ranks() -> None:
    """Wait for all ranks."""
    hvdx.keras.allgather_object(None)


def summarise(variants: Sequence[Variant], parameters: int, batch: int) -> list[harness.Row]:
    """Return rows with medians, quartiles and ratios of one size."""
    yardstick = (_RAW, "float32") if any(v.name == _RAW for v in variants) else (_LOOP_ALONE, "-")
    (base,) = (v for v in variants if (v.name, v.wire) == yardstick)
    reference = np.array([np.median(r) for r in base.rounds])
    rows = []
    for variant in variants:
        milliseconds = 1e3 * np.concatenate(variant.rounds)
        medians = np.array([np.median(r) for r in variant.rounds])
        fast, low, median, high = np.percentile(milliseconds, [10, 25, 50, 75])
        ratio_low, ratio, ratio_high = harness.spread(medians / reference)
        rows.append(
            {
                "variant": variant.name,
                "parameters": parameters,
                "wire": variant.wire,
                "ranks": hvdx.size(),
                "batch": batch,
                "steps": len(milliseconds),
                "rounds": len(medians),
                "median_ms": median,
                "iqr_ms": high - low,
                "tenth_percentile_ms": fast,
                "ratio": ratio,
                "ratio_quartiles": [ratio_low, ratio_high],
                "yardstick": ", ".join(yardstick).removesuffix(", -"),
            }
        )
    return rows


def show(rows: Sequence[harness.Row]) -> None:
    """Print the table."""
    columns = [
        ("variant", lambda row: row["variant"]),
        ("parameters", lambda row: table.quantity(row["parameters"], "").strip()),
        ("on the wire", lambda row: row["wire"]),
        harness.figure("ranks", "ranks", "d"),
        harness.figure("steps", "steps", "d"),
        harness.figure("median ms", "median_ms", ".2f"),
        harness.figure("IQR", "iqr_ms", ".2f"),
        harness.figure("10 %", "tenth_percentile_ms", ".2f"),
        harness.figure("ratio", "ratio", ".3f"),
        ("its quartiles", lambda row: "{:.3f}-{:.3f}".format(*row["ratio_quartiles"])),
    ]
    print(harness.table(rows, columns))
    print(f"batch {rows[0]['batch']} on each rank, SGD with momentum; IQR: interquartile range of the steps, in ms;")
    print(
        f"10 %: 10th percentile in ms, which other load disturbs least; ratio to: {rows[0]['yardstick']}",
        flush=True,
    )


def build_network(size: int) -> keras.Model:
    """Build a network with three equal hidden layers and about `size` parameters."""
    # size = 2 w^2 + (inputs + classes + 3) w + classes
    linear = _INPUTS + _CLASSES + 3
    width = max(1, round((-linear + (linear**2 + 8 * (size - _CLASSES)) ** 0.5) / 4))
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((_INPUTS,)), *hidden, keras.layers.Dense(_CLASSES)])


def share_weights(network: keras.Model) -> keras.Model:
    """Return a new compiled model on the layers of another, with its own optimiser and training function."""
    model = keras.Model(network.inputs, network.outputs)
    model.compile(optimizer=make_optimizer(), loss=make_loss(), jit_compile=False)
    return model


def make_optimizer() -> keras.optimizers.Optimizer:
    """Return SGD with momentum; its small learning rate keeps the work of a step constant during the run."""
    return keras.optimizers.SGD(1e-5, momentum=0.9)


def make_loss() -> keras.losses.Loss:
    """Return the loss of all variants."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_data(batch: int) -> tf.data.Dataset:
    """Return endless batches in memory, float32[batch, inputs] and int64[batch], different on each rank."""
    made = np.random.default_rng(hvdx.rank())
    x = made.normal(size=(_BATCHES, batch, _INPUTS)).astype(np.float32)
    y = made.integers(_CLASSES, size=(_BATCHES, batch))
    return untuned(tf.data.Dataset.from_tensor_slices((x, y)).repeat().prefetch(2))


def say(text: str) -> None:
    """Print a line on rank 0, and flush."""
    if hvdx.rank() == 0:
        print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--sizes", type=harness.several(harness.size), default="2M,20M", help="parameters of the networks")
    add("--batch", type=int, default=64, help="samples per step and rank")
    add("--rounds", type=int, default=15, help="rounds, in each of which every variant takes a turn")
    add("--steps", type=int, default=10, help="timed steps per turn; fewer if --seconds is too short")
    add("--seconds", type=float, default=30, help="time for the rounds of one size; at least 5 rounds of 2 steps")
    add("--quick", action="store_true", help="5 rounds in 8 seconds for each size")
    add("--without-horovod", action="store_true", help="do not start Horovod, and omit the variants that need it")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 5, 8.0
    if min(options.batch, options.rounds, options.steps) < 1:
        parser.error("--batch, --rounds, --steps: expected 1 or more")
    if min(options.sizes) < _INPUTS:
        parser.error(f"--sizes: expected numbers of at least {_INPUTS}, such as 500k,2M")
    return options


if __name__ == "__main__":
    sys.exit(main())
