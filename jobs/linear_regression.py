"""Linear regression by map-reduce: the sum of the workers' gradients equals the gradient of one machine.

Batch gradient descent on m examples (400 by default) takes the step

    theta := theta - alpha / m * sum over i of (h(x_i) - y_i) * x_i,    h(x) = theta . x

K workers hold m / K examples each. Every worker sums over its own examples (map), the K partial sums are added
(reduce), and every worker takes the same step. Then every worker also trains alone with all examples, in NumPy, and
compares the two parameter vectors: in double precision they differ only by the order of the additions.

    python jobs/linear_regression.py                         # one worker
    mpirun -n 4 python jobs/linear_regression.py             # four workers with 100 examples each
    horovodrun -np 4 python jobs/linear_regression.py        # the same
    mpirun -n 3 python jobs/linear_regression.py             # 134, 133 and 133 examples: shares may differ

Open MPI 5 needs `horovodrun --binding-args="--bind-to none --map-by slot" -np 4 ...`. The exit status is 1 if the
parameters differ by more than `--tolerance`.
"""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import hvdx.keras as hvd
from hvdx.report import table


def main() -> int:
    """Train on all workers and on one machine, and compare; return 1 if the parameters differ."""
    options = parse_arguments()
    hvd.init()
    x, y = make_examples(options.examples, options.features, options.seed)

    mine = np.array_split(np.arange(options.examples), hvd.size())[hvd.rank()]
    together = train_together(x[mine], y[mine], options.examples, options.steps, options.learning_rate)
    alone = train_alone(x, y, options.steps, options.learning_rate)

    # Every worker compares its own copy; the largest difference counts.
    differences = hvd.allgather_object(np.abs(together - alone).max())
    largest = float(np.max(differences))
    same = largest <= options.tolerance
    if hvd.rank() == 0:
        print(f"{options.examples} examples on {describe_shares(options.examples, hvd.size())}, {options.steps} steps")
        names = [f"theta[{j}]" for j in range(len(alone))]
        rows = [[n, f"{a:.12f}", f"{b:.12f}"] for n, a, b in zip(names, alone, together, strict=True)]
        print(table.render(rows, header=["", "one machine", "all workers"]))
        result = "same parameters as one machine" if same else "NOT the parameters of one machine"
        print(f"{result}: largest difference {largest:.1e} (tolerance {options.tolerance:.0e})")
    return 0 if same else 1


def train_together(x: np.ndarray, y: np.ndarray, examples: int, steps: int, rate: float) -> np.ndarray:
    """Run gradient descent over all workers.

    Args:
        x: inputs of this worker's examples, float64[n, j].
        y: targets of this worker's examples, float64[n].
        examples: number of examples on all workers.
        steps: number of steps.
        rate: learning rate alpha.

    Returns:
        The parameters theta, float64[j].
    """
    x, y = tf.constant(x), tf.constant(y)
    theta = tf.Variable(tf.zeros(x.shape[1], tf.float64))

    @tf.function
    def step() -> None:
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            # Half of the square, since its derivative is (h(x) - y) x. A sum and no mean, so that every example has the
            # same weight on every worker.
            loss = 0.5 * tf.reduce_sum(tf.square(tf.linalg.matvec(x, theta) - y))
        (gradient,) = tape.gradient(loss, [theta])
        theta.assign_sub(rate / examples * gradient)

    for _ in range(steps):
        step()
    found: np.ndarray = theta.numpy()
    return found


def train_alone(x: np.ndarray, y: np.ndarray, steps: int, rate: float) -> np.ndarray:
    """Run gradient descent with all examples: x float64[m, j] and y float64[m] give theta, float64[j]."""
    theta = np.zeros(x.shape[1])
    for _ in range(steps):
        theta -= rate / len(x) * ((x @ theta - y) @ x)
    return theta


def make_examples(examples: int, features: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make points near a plane: x, float64[m, 1 + features] with ones in its first column, and y, float64[m]."""
    random = np.random.default_rng(seed)
    x = np.column_stack([np.ones(examples), random.normal(size=(examples, features))])
    plane = random.uniform(-3, 3, size=1 + features)
    return x, x @ plane + random.normal(scale=0.1, size=examples)


def describe_shares(examples: int, workers: int) -> str:
    """Describe the workers' shares of the examples.

    Example:
        >>> describe_shares(400, 3)
        '3 workers of 133 to 134 examples'
    """
    fewest, most = examples // workers, -(-examples // workers)
    each = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"{workers} worker{'s' * (workers > 1)} of {each} examples"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Linear regression on several workers, checked against one machine.",
        epilog="For four workers, start it with mpirun -n 4 or horovodrun -np 4.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--examples", type=int, default=400, help="number of examples on all workers together")
    parser.add_argument("--features", type=int, default=3, help="inputs of an example, not counting the constant 1")
    parser.add_argument("--steps", type=int, default=200, help="steps of gradient descent")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="alpha in the formula")
    seed = os.environ.get("HVDX_SEED", "0")
    parser.add_argument(
        "--seed", type=int, default=seed, help="seed of the random examples (default: $HVDX_SEED, else 0)"
    )
    parser.add_argument("--tolerance", type=float, default=1e-9, help="largest accepted difference")
    options = parser.parse_args()
    for name in ("examples", "features", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected 1 or more, got {getattr(options, name)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
