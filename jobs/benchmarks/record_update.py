"""Record the input of a threshold codec in training steps: residual plus update, layer by layer.

    python jobs/benchmarks/record_update.py --step 300 --output update.npz
    hvdx bench wire --update update.npz

One process trains the network of jobs/fashion_mnist.py, or with `--data text` that of jobs/language_model.py, once for
each density. It passes every update through the codec, as in decentralised training. In the chosen steps it saves the
elements that reach tau, as float32.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras
    import numpy as np

# Function that draws a batch.
Samples = Callable[[], "tuple[np.ndarray, np.ndarray]"]

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Record residual plus update of training steps, for `hvdx bench wire`.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", choices=("fashion-mnist", "digits", "text"), default="fashion-mnist", help="data set")
    parser.add_argument("--data-folder", help="folder of the data set's files, if not one of the usual ones")
    parser.add_argument("--hidden", type=int, help="units of each hidden layer (default: 1024; of a text's blocks: 64)")
    parser.add_argument(
        "--optimizer", choices=("sgd", "adam", "adamw"), default="sgd", help="optimiser; that of a text is AdamW"
    )
    parser.add_argument("--batch", type=int, default=64, help="samples per step")
    parser.add_argument("--step", type=int, nargs="+", default=[300], help="steps to record")
    parser.add_argument(
        "--densities", type=float, nargs="+", default=[1e-3, 1e-2, 1 / 16], metavar="P", help="target densities"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of the samples")
    parser.add_argument("--output", default="update.npz", help="file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train up to the last step, once for each density, and save the elements that were sent in the chosen steps."""
    args = arguments(argv)
    if min(args.step) < 1:
        print(f"record_update: --step: expected at least 1, got {min(args.step)}", file=sys.stderr)
        return 2
    import numpy as np

    steps = sorted(set(args.step))
    saved: dict[str, np.ndarray] = {
        "densities": np.repeat(args.densities, len(steps)),
        "steps": np.tile(steps, len(args.densities)),
    }
    i = 0
    for density in args.densities:
        for total, tau, saved["sizes"], saved["names"] in record(density, args):
            index = np.flatnonzero(np.abs(total) >= tau)
            gaps = np.diff(index, prepend=0).astype(np.uint32)
            saved |= {f"gaps{i}": gaps, f"values{i}": total[index], f"tau{i}": np.array(tau)}
            i += 1
    hidden, optimizer = (args.hidden or 64, "adamw") if args.data == "text" else (args.hidden or 1024, args.optimizer)
    settings = f"{hidden} hidden units, {optimizer}, batch {args.batch}, step {' '.join(map(str, steps))}"
    saved["what"] = np.array(f"{args.data}, {settings}")
    np.savez_compressed(args.output, **saved)  # type: ignore[arg-type]
    print(f"{args.output}: {sum(saved['sizes'])} elements in {len(saved['sizes'])} variables, {i} updates")
    return 0


def record(
    density: float, args: argparse.Namespace
) -> "Iterator[tuple[np.ndarray, np.float32, np.ndarray, np.ndarray]]":
    """Train with this density; yield residual plus update, tau, and variables' sizes and names in each chosen step."""
    import keras
    import numpy as np

    from hvdx.codec import Threshold

    keras.utils.clear_session()
    keras.utils.set_random_seed(args.seed)
    network, samples = (language_model if args.data == "text" else classifier)(args)
    variables = network.trainable_variables
    weights = [keras.ops.convert_to_numpy(v).copy() for v in variables]
    codec = Threshold(target_density=density)
    state = codec.init([w.size for w in weights])
    for step in range(1, max(args.step) + 1):
        network.train_on_batch(*samples())
        update = [keras.ops.convert_to_numpy(v) - w for v, w in zip(variables, weights, strict=True)]
        total, tau = state.residual + np.concatenate([u.reshape(-1) for u in update]), state.tau
        message, state = codec.encode(update, state)
        codec.decode([message], weights)
        for variable, weight in zip(variables, weights, strict=True):
            variable.assign(weight)
        if step % 50 == 0 or step in args.step:
            print(f"density {density:.4g}, step {step}: sent {state.density:.4f}, {len(message)} bytes", flush=True)
        if step in args.step:
            yield total, tau, np.array([w.size for w in weights]), np.array([v.path for v in variables])


def classifier(args: argparse.Namespace) -> "tuple[keras.Model, Samples]":
    """Return the network of jobs/fashion_mnist.py, and a function that draws a batch."""
    import numpy as np

    from hvdx.jobs.data import load
    from hvdx.jobs.fashion_mnist import build

    data, order = load(args.data, args.data_folder), np.random.default_rng(args.seed)

    def samples() -> tuple[np.ndarray, np.ndarray]:
        chosen = order.integers(0, len(data.train_x), args.batch)
        return data.train_x[chosen], data.train_y[chosen]

    return build(data, "mlp", args.hidden or 1024, args.optimizer, None), samples


def language_model(args: argparse.Namespace) -> "tuple[keras.Model, Samples]":
    """Return a network of jobs/language_model.py with two blocks, and a function that draws a batch of windows."""
    import numpy as np

    from hvdx.jobs.data import VOCABULARY, load_text
    from hvdx.jobs.language_model import build

    text, order, context = load_text(args.data_folder).train, np.random.default_rng(args.seed), 64

    def samples() -> tuple[np.ndarray, np.ndarray]:
        begins = order.integers(0, len(text) - context - 1, args.batch)
        codes = text[begins[:, None] + np.arange(context + 1)].astype(np.int32)
        return codes[:, :-1], codes[:, 1:]

    return build(VOCABULARY, context, 2, args.hidden or 64, 4, 1e-3), samples


if __name__ == "__main__":
    sys.exit(main())
