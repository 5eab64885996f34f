"""Train a small network on images, on one or more processes.

    python jobs/fashion_mnist.py                              one process
    mpirun -n 2 python jobs/fashion_mnist.py                  two processes that average their gradients
    HVDX_STRATEGY=all_reduce:compression=fp16 mpirun -n 2 python jobs/fashion_mnist.py --data fashion-mnist

The batch size is per process: a step of two processes with batch 64 uses 128 samples, like one process with batch 128.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

    from hvdx.jobs.data import Data

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_argument_group("data and model")
    what.add_argument(
        "--data",
        choices=["digits", "fashion-mnist"],
        default="digits",
        help="digits: 1,797 images of 8x8 from scikit-learn (default); fashion-mnist: 70,000 images of 28x28",
    )
    what.add_argument(
        "--folder",
        metavar="DIR",
        help="folder of Fashion-MNIST's four .gz files (default: those of Debian and Keras)",
    )
    what.add_argument(
        "--model",
        choices=["mlp", "cnn"],
        default="mlp",
        help="dense or convolutional network (default: mlp)",
    )
    what.add_argument(
        "--hidden",
        type=int,
        default=None,
        metavar="N",
        help="units in each of the MLP's two hidden layers (default: 128 for digits, 1024 for fashion-mnist)",
    )
    how = parser.add_argument_group("training")
    how.add_argument(
        "--strategy",
        metavar="SPEC",
        help="strategy that combines the processes' work, such as all_reduce:compression=fp16 "
        "(default: $HVDX_STRATEGY, else all_reduce)",
    )
    how.add_argument("--epochs", type=int, default=3, metavar="N", help="passes over the data (default: 3)")
    how.add_argument("--batch", type=int, default=64, metavar="N", help="samples per step and process (default: 64)")
    how.add_argument(
        "--optimizer",
        choices=["sgd", "adam", "adamw"],
        default="sgd",
        help="optimiser (default: sgd, with momentum 0.9)",
    )
    how.add_argument(
        "--learning-rate",
        type=float,
        default=None,
        metavar="X",
        help="learning rate (default: 0.05 for sgd, 0.001 for the others)",
    )
    how.add_argument(
        "--seed",
        type=int,
        default=os.environ.get("HVDX_SEED", "0"),
        metavar="N",
        help="seed of the weights and of the order of the data (default: $HVDX_SEED, else 0)",
    )
    how.add_argument("--samples", type=int, default=None, metavar="N", help="train only on the first N samples")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--save",
        metavar="FILE.keras",
        help="write the trained model as a plain Keras model, which loads without hvdx",
    )
    out.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="save checkpoints in DIR, and resume from the newest one there; "
        "on SIGUSR1 or SIGTERM, save and end with code 75",
    )
    out.add_argument(
        "--every",
        default="1 epoch",
        metavar="HOW_OFTEN",
        help='interval of checkpoints: "2 epochs", "500 steps", "10 minutes" (default: 1 epoch)',
    )
    out.add_argument("--history", metavar="FILE.json", help="write loss and accuracy of each epoch to FILE.json")
    out.add_argument("--digest", action="store_true", help="print a digest of the final weights of every process")
    out.add_argument("--quiet", action="store_true", help="show no progress bar")
    return parser.parse_args(argv)


def build(data: "Data", model: str, hidden: int | None, optimizer: str, learning_rate: float | None) -> "keras.Model":
    """Build and compile the network."""
    import keras
    from keras import layers

    shape = data.train_x.shape[1:]
    if model == "mlp":
        hidden = hidden or (128 if data.name == "digits" else 1024)
        body = [
            layers.Flatten(),
            layers.Dense(hidden, activation="relu"),
            layers.Dense(hidden, activation="relu"),
        ]
    else:
        body = [
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
        ]
    network = keras.Sequential([keras.Input(shape), *body, layers.Dense(10)])
    rate = learning_rate or (0.05 if optimizer == "sgd" else 0.001)
    network.compile(
        optimizer={
            "sgd": lambda: keras.optimizers.SGD(rate, momentum=0.9),
            "adam": lambda: keras.optimizers.Adam(rate),
            "adamw": lambda: keras.optimizers.AdamW(rate),
        }[optimizer](),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def main(argv: list[str] | None = None) -> int:
    """Run the job, and return its exit code."""
    args = arguments(argv)
    import hvdx
    from hvdx.jobs.data import load
    from hvdx.report.table import render

    hvdx.init()
    import keras

    try:
        data = load(args.data, args.folder)
    except (FileNotFoundError, ValueError) as error:
        if hvdx.rank() == 0:
            print(f"fashion_mnist: {error}", file=sys.stderr)
        return 2
    keras.utils.set_random_seed(args.seed)
    model = build(data, args.model, args.hidden, args.optimizer, args.learning_rate)
    train_x, train_y = data.train_x[: args.samples], data.train_y[: args.samples]
    train = hvdx.shard((train_x, train_y), args.batch, seed=args.seed)
    test = hvdx.shard((data.test_x, data.test_y), 256, shuffle=False, drop_remainder=False)
    if hvdx.rank() == 0:
        print(
            f"{data.name}: {len(train_y):,} samples, {model.count_params():,} parameters, {hvdx.size()} worker(s), "
            f"{int(train.cardinality())} steps an epoch",
            flush=True,
        )
    callbacks = [distribute := hvdx.keras.Distribute(args.strategy)]
    if args.checkpoint:
        callbacks.append(hvdx.keras.Checkpoint(args.checkpoint, every=args.every))
    begin = time.perf_counter()
    history = model.fit(
        train,
        validation_data=test,
        epochs=args.epochs,
        shuffle=False,
        verbose=0 if args.quiet else (1 if sys.stdout.isatty() else 2),
        callbacks=callbacks,
    ).history
    if not history:
        return 0
    seconds = time.perf_counter() - begin
    if hvdx.rank() == 0:
        seen = len(history["loss"]) * int(train.cardinality()) * args.batch * hvdx.size()
        results = [
            ("test accuracy", f"{100 * history['val_accuracy'][-1]:.2f} %"),
            ("training loss", f"{history['loss'][-1]:.4f}"),
        ]
        print(render([*results, ("samples a second", f"{seen / seconds:,.0f}")]))
        if args.quiet:
            # Without --quiet, fit has printed it.
            print(distribute.summary())
        if args.save:
            model.save(args.save)
        if args.history:
            Path(args.history).write_text(json.dumps(history))
    if args.digest:
        bits = b"".join(weight.tobytes() for weight in model.get_weights())
        print(f"weights of rank {hvdx.rank()}: {hashlib.sha256(bits).hexdigest()[:16]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
