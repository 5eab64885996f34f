"""Synchronous training of a tiny network on a parabola: one added line, and the loss curve of one process.

The data are fifty points of y = x^2 with a little noise. The network has one hidden layer of five tanh units, and
trains for 2000 steps of batch gradient descent. K workers hold 50 / K points each and compute gradients from their own
points; every step uses the sum of these gradients. Then rank 0 trains a copy alone, with the same initial weights and
all points, and compares the two loss curves.

    python jobs/parabola.py                       # one worker
    mpirun -n 4 python jobs/parabola.py           # four workers: 13, 13, 12 and 12 points
    horovodrun -np 4 python jobs/parabola.py      # the same
    python jobs/parabola.py --plot parabola.png   # also draw the curves; needs matplotlib

Open MPI 5 needs `horovodrun --binding-args="--bind-to none --map-by slot" -np 4 ...`. The exit status is 1 if the
curves differ by more than `--tolerance`.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import hvdx
from hvdx.report import table

# Rows of the printed table.
_SHOWN = 8


def main() -> int:
    """Train on all workers and on rank 0 alone, and compare; return 1 if the curves differ."""
    options = parse_arguments()
    hvdx.init()
    if hvdx.size() > options.points:
        raise SystemExit(
            f"parabola: --points: expected at least one for each of the {hvdx.size()} workers, got {options.points}."
        )
    x, y = make_points(options.points, options.noise, options.seed)
    keras.utils.set_random_seed(options.seed)
    model = build_network(options.points, options.learning_rate, options.every)
    copy = build_network(options.points, options.learning_rate, options.every)
    copy.set_weights(model.get_weights())

    mine = np.array_split(np.arange(options.points), hvdx.size())[hvdx.rank()]
    # By default, Keras averages the loss over a worker's points, and hvdx averages gradients over workers. If shares
    # have 13, 13, 12 and 12 points, the mean of these means is not the mean over all points. So each worker's loss is a
    # sum divided by all 50 points (see build_network), and the gradients are summed.
    added_line = hvdx.keras.Distribute(hvdx.AllReduce(op="sum"))
    together = train(model, x[mine], y[mine], options, (x, y), [added_line])

    largest = 0.0
    if hvdx.rank() == 0:
        # Rank 0 alone trains the copy: that nothing combines its gradients is intended here.
        os.environ["HVDX_ALLOW_SEPARATE"] = "1"
        alone = train(copy, x, y, options, (x, y), [])
        differences = np.abs(together - alone) / np.abs(alone)
        largest = float(differences.max())
        print(f"{options.points} points on {hvdx.size()} worker{'s' * (hvdx.size() > 1)}, {options.steps} steps")
        show(np.arange(1, len(alone) + 1) * options.every, alone, together, differences)
        result = "same loss curve as one process" if largest <= options.tolerance else "NOT one process's loss curve"
        print(f"{result}: largest relative difference {largest:.1e} (tolerance {options.tolerance:.0e})")
        if options.plot:
            plot(options.plot, x, y, model, alone, together, options.every)
            print(f"wrote {options.plot}")
    # Give every worker the same exit status.
    return int(hvdx.keras.broadcast_object(largest > options.tolerance, 0))


def build_network(points: int, learning_rate: float, steps_at_once: int) -> keras.Model:
    """Build a network with one input, five tanh units and one output; its loss is the sum of squares over `points`.

    A call of the training function runs `steps_at_once` steps: one of these steps takes less time than a call of Keras.
    """
    normal = {"kernel_initializer": keras.initializers.RandomNormal(stddev=1.0)}
    normal |= {"bias_initializer": keras.initializers.RandomNormal(stddev=1.0)}
    network = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(5, activation="tanh", **normal), keras.layers.Dense(1, **normal)]
    )
    network.compile(
        optimizer=keras.optimizers.SGD(learning_rate),
        loss=keras.losses.MeanSquaredError(reduction="sum"),
        loss_weights=1 / points,
        steps_per_execution=steps_at_once,
    )
    return network


def train(
    model: keras.Model,
    x: np.ndarray,
    y: np.ndarray,
    options: argparse.Namespace,
    everything: tuple[np.ndarray, np.ndarray],
    callbacks: Sequence[keras.callbacks.Callback],
) -> np.ndarray:
    """Run batch gradient descent: every step uses all of `x`.

    Args:
        model: compiled model, trained in place.
        x, y: points of this worker, float32[n, 1].
        options: `steps`, and `every`, the steps between two losses.
        everything: points of all workers, for the loss curve.
        callbacks: callbacks of `fit`.

    Returns:
        The loss over all points after each `every` steps, float64[steps / every].
    """
    history = model.fit(
        tf.data.Dataset.from_tensors((x, y)).repeat(),
        steps_per_epoch=options.every,
        epochs=options.steps // options.every,
        validation_data=everything,
        validation_batch_size=len(everything[0]),
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return np.array(history.history["val_loss"])


def make_points(points: int, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make a noisy parabola: x, float32[n, 1] from -2 to 2, and y, float32[n, 1]."""
    x = np.linspace(-2, 2, points)[:, None]
    y = np.square(x) + np.random.default_rng(seed).normal(scale=noise, size=x.shape)
    return x.astype(np.float32), y.astype(np.float32)


def show(steps: np.ndarray, alone: np.ndarray, together: np.ndarray, differences: np.ndarray) -> None:
    """Print a few points of both curves."""
    rows = [
        [str(steps[i]), f"{alone[i]:.7f}", f"{together[i]:.7f}", f"{differences[i]:.1e}"]
        for i in np.unique(np.linspace(0, len(steps) - 1, _SHOWN).astype(int))
    ]
    print(table.render(rows, header=["step", "loss, one process", "loss, all workers", "relative difference"]))


def plot(
    path: str,
    x: np.ndarray,
    y: np.ndarray,
    model: keras.Model,
    alone: np.ndarray,
    together: np.ndarray,
    every: int,
) -> None:
    """Draw the loss curves, and the points with the fitted network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    steps = np.arange(1, len(alone) + 1) * every
    left.semilogy(steps, alone, label="one process", linewidth=4, alpha=0.4)
    left.semilogy(steps, together, label=f"{hvdx.size()} workers")
    left.set(xlabel="step", ylabel="mean squared error")
    left.legend()
    right.plot(x, y, ".", label="points")
    right.plot(x, np.asarray(model(x)), label="network")
    right.set(xlabel="x", ylabel="y")
    right.legend()
    figure.savefig(path, bbox_inches="tight")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a tiny network on y = x^2 on several workers, checked against one process.",
        epilog="For four workers, start it with mpirun -n 4 or horovodrun -np 4.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=2000, help="steps of gradient descent, a multiple of --every")
    parser.add_argument("--every", type=int, default=50, help="steps between two points of the loss curve")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="learning rate of gradient descent")
    parser.add_argument("--points", type=int, default=50, help="number of points on all workers together")
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of the noise on y")
    seed = os.environ.get("HVDX_SEED", "0")
    parser.add_argument(
        "--seed", type=int, default=seed, help="seed of the noise and of the weights ($HVDX_SEED, else 0)"
    )
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest accepted relative difference")
    parser.add_argument("--plot", metavar="FILE.png", help="draw both curves and the fit; needs matplotlib")
    options = parser.parse_args()
    if options.every < 1 or options.steps < 1 or options.steps % options.every:
        parser.error(f"--steps: expected a positive multiple of --every ({options.every}), got {options.steps}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: matplotlib is not installed. Get it with: pip install matplotlib")
    return options


if __name__ == "__main__":
    sys.exit(main())
