"""Train a network whose large layers are split over the processes, while its other layers are data-parallel.

    python jobs/hybrid.py                                                   one process, nothing is split
    hvdx run -n 2 python jobs/hybrid.py --split 2                           dense layers split over two processes
    hvdx run -n 4 python jobs/hybrid.py --split 2 --strategy threshold      two groups of two processes
    hvdx run -n 2 python jobs/hybrid.py --split 2 --model embedding         a split table and a split softmax

The network "cnn" is like AlexNet: convolutions, then dense layers of 4096, 4096 and 10 units, which hold 99 % of the
weights. The network "embedding" classifies lists of ids: a table of 2 million rows, and a softmax over 50,000 classes.
The batch size is per process. `docs/split-layers.md` explains what the processes exchange.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    import keras
    import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# The first steps trace the training function and open channels.
_WARM_UP = 2


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    how = parser.add_argument_group("training")
    how.add_argument(
        "--split",
        metavar="M",
        help="number of processes that share a split layer, or node: those of a host (default: $HVDX_SPLIT, else 1)",
    )
    how.add_argument(
        "--strategy", metavar="SPEC", help="strategy that combines gradients (default: $HVDX_STRATEGY, else all_reduce)"
    )
    how.add_argument("--steps", type=int, default=20, metavar="N", help="training steps, 3 or more (default: 20)")
    how.add_argument("--batch", type=int, default=32, metavar="N", help="samples per step and process (default: 32)")
    how.add_argument("--learning-rate", type=float, default=0.01, metavar="X", help="learning rate (default: 0.01)")
    how.add_argument(
        "--seed",
        type=int,
        default=os.environ.get("HVDX_SEED", "0"),
        metavar="N",
        help="seed of weights and data (default: $HVDX_SEED, else 0)",
    )
    how.add_argument(
        "--draw",
        choices=["whole", "shard"],
        help="draw initial weights of split layers whole, then cut; or each part alone "
        "(default: whole for cnn, shard for embedding)",
    )
    what = parser.add_argument_group("model")
    what.add_argument("--model", choices=["cnn", "embedding"], default="cnn", help="network (default: cnn)")
    what.add_argument(
        "--width",
        type=int,
        metavar="N",
        help="units of the hidden dense layers (default: 4096 for cnn, 128 for embedding)",
    )
    cnn = parser.add_argument_group("with --model cnn")
    cnn.add_argument(
        "--data", choices=["fashion-mnist", "digits"], default="fashion-mnist", help="images (default: fashion-mnist)"
    )
    cnn.add_argument("--folder", metavar="DIR", help="folder of Fashion-MNIST's four .gz files")
    cnn.add_argument(
        "--channels", type=int, default=160, metavar="N", help="channels of the last convolution (default: 160)"
    )
    cnn.add_argument(
        "--layers",
        choices=["pair", "single"],
        default="pair",
        help="the two large layers: a pair without an exchange between them, or two single layers (default: pair)",
    )
    table = parser.add_argument_group("with --model embedding")
    table.add_argument("--rows", type=int, default=2_000_000, metavar="N", help="rows of the table (default: 2000000)")
    table.add_argument("--columns", type=int, default=32, metavar="N", help="columns of the table (default: 32)")
    table.add_argument("--classes", type=int, default=50_000, metavar="N", help="classes (default: 50000)")
    table.add_argument("--length", type=int, default=16, metavar="N", help="ids in a sample (default: 16)")
    out = parser.add_argument_group("output")
    out.add_argument("--summary", action="store_true", help="also print what each layer sends and holds")
    out.add_argument("--save", metavar="FILE.keras", help="write the trained model as a plain Keras model")
    args = parser.parse_args(argv)
    if args.steps <= _WARM_UP:
        parser.error(f"--steps: expected {_WARM_UP + 1} or more, since the first {_WARM_UP} are not timed")
    return args


# -- data -------------------------------------------------------------------------------------------------------------


def images(args: argparse.Namespace) -> "tuple[np.ndarray, np.ndarray]":
    """Return the training images and their classes."""
    from hvdx.jobs.data import load

    data = load(args.data, args.folder)
    return data.train_x, data.train_y


def lists_of_ids(args: argparse.Namespace) -> "tuple[np.ndarray, np.ndarray]":
    """Make samples of ids whose class depends on them.

    Each sample has a topic, which follows Zipf's law as words do. Its ids come from the rows of the topic, and the
    topic determines the class.

    Returns:
        int32[samples, length] ids and int32[samples] classes.
    """
    import numpy as np

    random = np.random.default_rng(args.seed)
    topics = max(args.rows // args.length, 1)
    topic = random.zipf(1.2, max(20_000, 8 * args.batch)) % topics
    offsets = random.integers(args.length, size=(len(topic), args.length))
    ids = (topic[:, None] * args.length + offsets) % args.rows
    return ids.astype(np.int32), (topic % args.classes).astype(np.int32)


class Figures(TypedDict):
    """Figures of a training on one process: milliseconds and bytes of a step, and bytes of memory."""

    strategy: str
    milliseconds: float
    loss: float
    layers_sent: float
    strategy_sent: float
    held: float
    resident: float


# -- models -----------------------------------------------------------------------------------------------------------


def cnn(args: argparse.Namespace, shape: tuple[int, ...]) -> "keras.Model":
    """Build the network for images: data-parallel convolutions, two split layers, and a small layer."""
    import keras
    from keras import layers

    from hvdx.keras.layers import SplitDense

    width = args.width or 4096
    draw: Literal["whole", "shard"] = args.draw or "whole"
    first, second = ({"gather_output": False}, {"input_is_split": True}) if args.layers == "pair" else ({}, {})
    network = keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(3, 2),
            layers.Conv2D(96, 3, padding="same", activation="relu"),
            layers.Conv2D(96, 3, padding="same", activation="relu"),
            layers.Conv2D(args.channels, 3, padding="same", activation="relu"),
            layers.Flatten(),
            SplitDense(width, activation="relu", draw=draw, **first),
            SplitDense(width, activation="relu", draw=draw, **second),
            # Ten columns are not worth splitting.
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(keras.optimizers.SGD(args.learning_rate, momentum=0.9), loss)
    return network


def embedding(args: argparse.Namespace) -> "keras.Model":
    """Build the network for lists of ids: a split table, a small dense layer, and a split softmax."""
    import keras
    from keras import layers

    from hvdx.keras.layers import SplitDense, SplitEmbedding, SplitSparseCategoricalCrossentropy

    draw: Literal["whole", "shard"] = args.draw or "shard"
    network = keras.Sequential(
        [
            keras.Input((args.length,), dtype="int32"),
            SplitEmbedding(args.rows, args.columns, draw=draw),
            layers.GlobalAveragePooling1D(),
            layers.Dense(args.width or 128, activation="relu"),
            # No rank has the logits of all classes; the loss combines them.
            SplitDense(args.classes, gather_output=False, draw=draw),
        ]
    )
    network.compile(keras.optimizers.SGD(args.learning_rate, momentum=0.9), SplitSparseCategoricalCrossentropy())
    return network


# -- training ---------------------------------------------------------------------------------------------------------


def clock() -> "keras.callbacks.Callback":
    """Make a callback that records the end of each step."""
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.ends.append(time.perf_counter())

    return Clock()


def train(
    args: argparse.Namespace,
    x: "np.ndarray",
    y: "np.ndarray",
    callbacks: "Sequence[keras.callbacks.Callback]" = (),
) -> "tuple[keras.Model, Figures]":
    """Build a network and train it on all processes.

    Args:
        args: result of `arguments`.
        x, y: samples and their classes; the same on all processes.
        callbacks: further callbacks.

    Returns:
        The model, and the figures of this process; bytes and milliseconds are those of a step.
    """
    import keras
    import numpy as np

    import hvdx

    keras.utils.set_random_seed(args.seed)
    model = cnn(args, x.shape[1:]) if args.model == "cnn" else embedding(args)
    if args.summary and hvdx.rank() == 0:
        hvdx.keras.summary(model, batch=args.batch)
    distribute, timer, before = hvdx.keras.Distribute(args.strategy), clock(), hvdx.keras.layers.bytes_sent()
    history = model.fit(
        hvdx.shard((x, y), args.batch, seed=args.seed).repeat(),
        steps_per_epoch=args.steps,
        shuffle=False,
        verbose=0,
        callbacks=[distribute, timer, *callbacks],
    ).history
    held = [np.prod(v.shape) * np.dtype(v.dtype).itemsize for v in [*model.weights, *model.optimizer.variables]]
    return model, {
        "strategy": repr(distribute.strategy),
        "milliseconds": 1e3 * median(np.diff(timer.ends)[_WARM_UP - 1 :]),
        "loss": history["loss"][-1],
        "layers_sent": (hvdx.keras.layers.bytes_sent() - before) / args.steps,
        "strategy_sent": distribute.counters.bytes_per_exchange,
        "held": float(sum(held)),
        "resident": float(resident()),
    }


def resident() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def table(args: argparse.Namespace, figures: Figures, ranks: int) -> str:
    """Return the table that is printed at the end of a run."""
    from hvdx.report.table import quantity, render

    rows = [
        ("workers", str(ranks)),
        ("strategy", figures["strategy"] if ranks > 1 else "none (one process)"),
        ("training loss, mean of all steps", f"{figures['loss']:.4f}"),
        ("milliseconds a step", f"{figures['milliseconds']:.1f}"),
        ("bytes sent a step, split layers", quantity(figures["layers_sent"], "B")),
        ("bytes sent a step, strategy", quantity(figures["strategy_sent"], "B")),
        ("weights and optimiser, this worker", quantity(figures["held"], "B")),
        ("resident memory, this worker", quantity(figures["resident"], "B")),
    ]
    return render(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job, and return its exit code."""
    args = arguments(argv)
    import hvdx

    hvdx.init(split=args.split)
    try:
        x, y = images(args) if args.model == "cnn" else lists_of_ids(args)
    except (FileNotFoundError, ValueError) as error:
        if hvdx.rank() == 0:
            print(f"hybrid: {error}", file=sys.stderr)
        return 2
    model, figures = train(args, x, y)
    if hvdx.rank() == 0:
        print(table(args, figures, hvdx.size()), flush=True)
    if args.save:
        # All processes gather the whole weights; one writes them.
        plain = hvdx.keras.gather(model)
        if hvdx.rank() == 0:
            plain.save(args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
