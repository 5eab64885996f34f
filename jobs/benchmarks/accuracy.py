"""Accuracy under compression: several workers train a network, with each strategy and several seeds.

    python jobs/benchmarks/accuracy.py --json accuracy.json               4 workers, 2 networks, 3 seeds: hours
    python jobs/benchmarks/accuracy.py --models mlp --seeds 1 --epochs 3  a short run
    python jobs/benchmarks/accuracy.py --models lm --steps 600 --batch 8 --strategies "dense;1e-2;1e-2, sharded"

    python jobs/benchmarks/accuracy.py --models digits --optimizer adam --workers 2 --epochs 3 --seeds 5
    python jobs/benchmarks/accuracy.py --json accuracy.json --show        print the table of the recorded runs

The networks are an MLP and a CNN with batch normalisation, on Fashion-MNIST; a transformer of 0.11 M parameters on the
sources of Python's standard library, with AdamW, whose result is the held-out loss in nats per character; and an MLP of
85,000 parameters on scikit-learn's digits. One worker alone is --workers 1 --strategies dense.

The workers are virtual ranks in one process. They use the same codec, exchange and optimisers as under mpirun, but
share one copy of the weights; the copies of real ranks are equal, bit for bit. Only batch normalisation differs: the
workers update its statistics in turn, and do not average them at the end of an epoch. Runs that are in the JSON file
are not repeated, so an interrupted comparison can be resumed.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from hvdx.jobs.benchmarks import harness

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from hvdx.strategies import AllReduce, Strategy, Threshold

Batch = tuple[np.ndarray, np.ndarray]
Step = Callable[[Sequence[Batch]], None]
Tensors = list["tf.Tensor"]
#: Network, batches of each worker, steps of an epoch, and a function that evaluates.
Training = tuple["keras.Model", list[Iterator[Batch]], int, Callable[[], float]]
#: Networks that are trained.
MODELS = ("mlp", "cnn", "lm", "digits")
#: Learning rate of the transformer. That of the images is the job's.
RATE = 1e-3
#: Compared strategies by name.
STRATEGIES = {
    "dense": "all_reduce",
    "fp16": "all_reduce:compression=fp16",
    "3e-2": "threshold:target_density=0.03",
    "1e-2": "threshold:target_density=0.01",
    "1e-2, no warm-up": "threshold:target_density=0.01,warmup=none",
    "4e-3": "threshold:target_density=0.004",
    "2.8e-3": "threshold:target_density=0.0028",
    "1e-3": "threshold:target_density=0.001",
    "3e-4": "threshold:target_density=0.0003",
    "1.4e-3": "threshold:target_density=0.0014",
    "1e-2, no lookahead": "threshold:target_density=0.01,lookahead=0",
    "1e-2, own second moments": "threshold:target_density=0.01,second_moments=own",
    "3e-2, sharded": "threshold:target_density=0.03,exchange=sharded",
    "1e-2, sharded": "threshold:target_density=0.01,exchange=sharded",
    "1e-2, gradients": "threshold:target_density=0.01,placement=gradient",
}


def main(argv: list[str] | None = None) -> int:
    """Run the missing trainings, and print the table."""
    options = arguments(argv)
    file = Path(options.json) if options.json else None
    runs: list[harness.Row] = json.loads(file.read_text())["runs"] if file and file.exists() else []
    chosen = {"workers": options.workers, "epochs": options.epochs, "optimizer": options.optimizer}
    chosen |= {"batch": options.batch, "limit": options.steps, "every": options.every, "rate": options.rate}
    wanted = [
        {"model": model, "strategy": name, "spelling": STRATEGIES[name], "seed": seed} | chosen
        for model in options.models for seed in range(options.seeds) for name in options.strategies
    ]  # fmt: skip
    for run in runs:
        # Files that were written before there was a choice.
        for name, value in (("optimizer", "sgd"), ("batch", 64), ("limit", 0), ("every", 0), ("rate", RATE)):
            run.setdefault(name, value)
    missing = [w for w in wanted if not any(w.items() <= run.items() for run in runs)]
    for number, run in enumerate([] if options.show else missing, 1):
        begin = time.perf_counter()
        # In a new process, since TensorFlow keeps memory and state of earlier runs.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            runs.append(run | process.submit(train, run).result())
        last = runs[-1]
        print(
            f"{number} of {len(missing)}: {run['model']}, {run['strategy']}, seed {run['seed']}: "
            f"{last['accuracy'][-1]:.3f}, 1/{last['ratio']:.0f} of the bytes, {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        harness.write(options.json, {"runs": runs})
    show([r for r in runs if chosen.items() <= r.items()])
    return 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = harness.parser(__doc__)
    parser.add_argument("--models", type=harness.several(str), default="mlp,cnn", help=f"networks: {', '.join(MODELS)}")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data")
    parser.add_argument("--steps", type=int, default=0, help="steps, in place of --epochs; 0 for --epochs")
    parser.add_argument("--every", type=int, default=0, help="steps between two evaluations; 0 for those of a pass")
    parser.add_argument("--batch", type=int, default=64, help="samples in a step of a worker")
    parser.add_argument("--workers", type=int, default=4, help="number of virtual ranks")
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate of the transformer's AdamW")
    parser.add_argument(
        "--optimizer", default="sgd", choices=("sgd", "adam"), help="optimiser of images: sgd has momentum 0.9"
    )
    parser.add_argument(
        "--strategies", help=f"names separated by semicolons; all of them by default: {'; '.join(STRATEGIES)}"
    )
    parser.add_argument("--show", action="store_true", help="only print the table of the runs in the --json file")
    options = parser.parse_args(argv)
    options.strategies = [s.strip() for s in options.strategies.split(";")] if options.strategies else list(STRATEGIES)
    unknown = set(options.strategies) - set(STRATEGIES)
    if unknown or set(options.models) - set(MODELS):
        parser.error(f"unknown: {', '.join(unknown) or options.models}; strategies are {'; '.join(STRATEGIES)}")
    return options


# -- a run --------------------------------------------------------------------------------------------------------


def train(run: harness.Row) -> harness.Row:
    """Train one network under one strategy; return accuracies and bytes."""
    import keras

    from hvdx.strategies import parse

    workers = run["workers"]
    keras.utils.set_random_seed(run["seed"])
    network, shares, epoch, evaluate = (text if run["model"] == "lm" else images)(run)
    strategy = parse(run["spelling"])
    elements = sum(int(np.prod(v.shape)) for v in network.trainable_variables)
    make = host_step if strategy.runs == "host" else dense_step
    step, cost = make(network, strategy, workers)
    accuracy = []
    limit, every = run["limit"] or run["epochs"] * epoch, run["every"] or epoch
    for done in range(1, limit + 1):
        step([next(share) for share in shares])
        if done % every == 0 or done == limit:
            accuracy.append(evaluate())
    dense = 4.0 * elements * limit
    return {"accuracy": accuracy, "bytes": cost(), "ratio": dense / cost(), "elements": elements, "steps": epoch}


def images(run: harness.Row) -> Training:
    """Return an image network, the batches of each worker, the steps of an epoch, and the test accuracy in %."""
    import hvdx
    from hvdx.jobs.data import load
    from hvdx.jobs.fashion_mnist import build

    digits = run["model"] == "digits"
    workers, data = run["workers"], load("digits" if digits else "fashion-mnist")
    model, hidden = ("mlp", 256) if digits else (run["model"], None)
    network = build(data, model, hidden, run["optimizer"], None)
    shares = [
        iter(hvdx.shard((data.train_x, data.train_y), run["batch"], seed=run["seed"], rank=r, size=workers).repeat())
        for r in range(workers)
    ]

    def evaluate() -> float:
        return 100 * float(network.evaluate(data.test_x, data.test_y, batch_size=1000, verbose=0)[1])

    return network, shares, len(data.train_y) // (run["batch"] * workers), evaluate


def text(run: harness.Row) -> Training:
    """Return a transformer, the batches of each worker, the steps of an epoch, and the held-out loss."""
    from hvdx.jobs.data import load_text

    texts = load_text()
    network = harness.transformer(run["rate"])

    def batches(rank: int) -> Iterator[Batch]:
        random = np.random.default_rng([run["seed"], rank])
        while True:
            yield random_windows(texts.train, random, run["batch"])

    held_out = held_out_windows(texts.held_out)

    def evaluate() -> float:
        return float(network.evaluate(*held_out, batch_size=64, verbose=0))

    epoch = len(texts.train) // (run["batch"] * run["workers"] * harness.CONTEXT)
    return network, [batches(r) for r in range(run["workers"])], epoch, evaluate


def random_windows(characters: np.ndarray, random: np.random.Generator, count: int) -> Batch:
    """Return windows of text that begin anywhere, and for each character the next one."""
    return _windows(characters, random.integers(0, len(characters) - harness.CONTEXT - 1, count))


def held_out_windows(characters: np.ndarray) -> Batch:
    """Return `harness.WINDOWS` windows that are spread over a text, and for each character the next one."""
    return _windows(characters, np.linspace(0, len(characters) - harness.CONTEXT - 2, harness.WINDOWS).astype(np.int64))


def _windows(characters: np.ndarray, begins: np.ndarray) -> Batch:
    codes = characters[begins[:, None] + np.arange(harness.CONTEXT + 1)].astype(np.int32)
    return codes[:, :-1], codes[:, 1:]


def gradients_of(network: "keras.Model") -> "Callable[[np.ndarray, np.ndarray], list[tf.Tensor]]":
    """Return a graph function that computes one worker's gradients."""
    import tensorflow as tf

    @tf.function(reduce_retracing=True)
    def gradients(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = network.compute_loss(y=y, y_pred=network(x, training=True))
        found = tape.gradient(loss, [v.value for v in network.trainable_variables])
        return [tf.convert_to_tensor(g) for g in found]

    return cast("Callable[[np.ndarray, np.ndarray], list[tf.Tensor]]", gradients)


def dense_step(network: "keras.Model", strategy: "Strategy", workers: int) -> tuple[Step, Callable[[], float]]:
    """Return a step with mean gradients, exchanged in float32 or float16, and a function for one worker's bytes."""
    import tensorflow as tf

    half, gradients = cast("AllReduce", strategy).compression == "fp16", gradients_of(network)
    elements = sum(int(np.prod(v.shape)) for v in network.trainable_variables)
    taken = 0

    @tf.function
    def apply(everyone: list[list[tf.Tensor]]) -> None:
        kind = tf.float16 if half else tf.float32
        means = [
            tf.cast(tf.add_n([tf.cast(g, kind) for g in together]), tf.float32) / workers
            for together in zip(*everyone, strict=True)
        ]
        network.optimizer.apply(means, network.trainable_variables)

    def step(batches: Sequence[Batch]) -> None:
        nonlocal taken
        taken += 1
        apply([gradients(x, y) for x, y in batches])

    return step, lambda: taken * elements * (2.0 if half else 4.0)


def host_step(network: "keras.Model", strategy: "Strategy", workers: int) -> tuple[Step, Callable[[], float]]:
    """Return a step with an optimiser and exchange for each worker, and a function for one worker's mean bytes."""
    import keras
    import tensorflow as tf

    from hvdx.comm.local import virtual_world
    from hvdx.keras.adapters import second_moments
    from hvdx.keras.adapters.base import describe
    from hvdx.keras.adapters.updates import updates_of
    from hvdx.strategies import StepInput

    variables, gradients = network.trainable_variables, gradients_of(network)
    specs = [describe(v) for v in variables]
    # keras.optimizers.deserialize does not know all optimisers of Keras, Lamb among them.
    own = [type(network.optimizer).from_config(network.optimizer.get_config()) for _ in range(workers)]
    for optimizer in own:
        optimizer.build(variables)
    pool = ThreadPoolExecutor(workers)
    threshold = cast("Threshold", strategy)
    exchanges = list(pool.map(lambda c: threshold.open(c, specs), virtual_world(workers)))

    corrects = strategy.second_moments == "mean" and second_moments.divides(own[0])

    def make_update(optimizer: keras.optimizers.Optimizer) -> Callable[[Tensors], tuple[Tensors, Tensors]]:
        @tf.function
        def update(tensors: Tensors) -> tuple[Tensors, Tensors]:
            def step() -> None:
                optimizer._backend_update_step(tensors, variables, optimizer.learning_rate)

            changes = updates_of(optimizer, step, variables)
            sample = second_moments.sample(optimizer, tensors, variables) if corrects else []
            optimizer.iterations.assign_add(1)
            return changes, sample

        return cast("Callable[[Tensors], tuple[Tensors, Tensors]]", update)

    updates = [make_update(optimizer) for optimizer in own]
    rank_local = strategy.placement == "update"
    period = threshold.period if isinstance(threshold.period, int) else 1
    # Sums of each worker's updates since the last exchange, and their number of steps.
    apart = [[np.zeros(v.shape, np.float32) for v in variables] for _ in own]
    since = 0

    def take(rank: int, batch: Batch) -> Tensors:
        """Take a worker's step from its own weights; return a sample of its second moments."""
        # The workers share the variables.
        shared = [v.numpy() for v in variables] if rank_local else []
        share = exchanges[rank].unsent_share if period == 1 else 0.0
        unsent = [share * np.asarray(u) for u in exchanges[rank].unsent()]
        for variable, weight, mine, rest in zip(variables, shared, apart[rank], unsent, strict=False):
            variable.assign(weight + mine + rest)
        tensors, sample = gradients(*batch), list[tf.Tensor]()
        if rank_local:
            tensors, sample = updates[rank](tensors)
        for variable, weight in zip(variables, shared, strict=False):
            variable.assign(weight)
        for total, tensor in zip(apart[rank], tensors, strict=True):
            np.add(total, tensor.numpy(), out=total)
        return sample

    def step(batches: Sequence[Batch]) -> None:
        nonlocal since
        samples = [take(rank, batch) for rank, batch in enumerate(batches)]
        since += 1
        if since < period:
            return
        inputs = [
            StepInput(tensors, sample=[np.asarray(s) for s in sample] or None, steps=since)
            for tensors, sample in zip(apart, samples, strict=True)
        ]
        (combined, *_) = list(pool.map(lambda e, i: e.take(i), exchanges, inputs))
        since = 0
        for total in (total for totals in apart for total in totals):
            total[:] = 0
        if rank_local:
            for variable, change in zip(variables, combined, strict=True):
                variable.assign_add(change)
        else:
            network.optimizer.apply([tf.constant(c) for c in combined], variables)

    return step, lambda: float(np.mean([e.telemetry.messages for e in exchanges]))


# -- the table ----------------------------------------------------------------------------------------------------


def show(runs: Sequence[harness.Row]) -> None:
    """Print a Markdown table of means and standard deviations over the seeds."""
    print("\n| network | strategy | seeds | after 3 | last 3 | after all | against dense | bytes | of dense |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in dict.fromkeys(r["model"] for r in runs):
        dense = {r["seed"]: r for r in runs if (r["model"], r["strategy"]) == (model, "dense")}
        for name in dict.fromkeys(r["strategy"] for r in runs):
            mine = [r for r in runs if (r["model"], r["strategy"]) == (model, name)]
            if not mine:
                continue
            early, late = ([r["accuracy"][min(k, len(r["accuracy"]) - 1)] for r in mine] for k in (2, 99))
            calm = [float(np.mean(r["accuracy"][-3:])) for r in mine]
            shared = [r for r in mine if r["seed"] in dense]
            lost = [r["accuracy"][-1] - dense[r["seed"]]["accuracy"][-1] for r in shared]
            against = f"{np.mean(lost):+.2f}" if shared and name != "dense" else ""
            size, ratio = np.mean([r["bytes"] for r in mine]) / 1e6, np.mean([r["ratio"] for r in mine])
            print(
                f"| {model} | {name} | {len(mine)} | {spread(early)} | {spread(calm)} | {spread(late)} | "
                f"{against} | {size:,.1f} MB | 1/{ratio:.0f} |"
            )
    print(
        "\nbytes: messages of one worker, each counted once; test accuracy in %, or held-out loss of lm: mean over "
        "seeds ± standard deviation;"
    )
    print("after 3, last 3: of evaluations, one an epoch without --every; the mean of three varies less than one")


def spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation.

    Example:
        >>> spread([1.0, 3.0])
        '2.00 ± 1.41'
    """
    return f"{np.mean(values):.2f}" + (f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
