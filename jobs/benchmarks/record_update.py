"""Record the input of a threshold codec in a training step: residual plus update, layer by layer.

    python jobs/benchmarks/record_update.py --step 300 --output update.npz
    hvdx bench wire --update update.npz

One process trains the network of jobs/fashion_mnist.py once for each density. It passes every update through the codec,
as in decentralised training. In the chosen step it saves the elements that reach tau, as float32.
"""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Record residual plus update of one training step, for `hvdx bench wire`.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", choices=("fashion-mnist", "digits"), default="fashion-mnist", help="data set")
    parser.add_argument("--data-folder", help="folder of Fashion-MNIST's files, if not one of the usual ones")
    parser.add_argument("--hidden", type=int, default=1024, help="units of each hidden layer")
    parser.add_argument("--optimizer", choices=("sgd", "adam", "adamw"), default="sgd", help="optimiser of the updates")
    parser.add_argument("--batch", type=int, default=64, help="samples per step")
    parser.add_argument("--step", type=int, default=300, help="step to record")
    parser.add_argument(
        "--densities", type=float, nargs="+", default=[1e-3, 1e-2, 1 / 16], metavar="P", help="target densities"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of the samples")
    parser.add_argument("--output", default="update.npz", help="file to write")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train up to the step, once for each density, and save the elements that were sent in it."""
    args = arguments(argv)
    if args.step < 1:
        print(f"record_update: --step: expected at least 1, got {args.step}", file=sys.stderr)
        return 2
    import numpy as np

    from hvdx.jobs.data import load

    data = load(args.data, args.data_folder)
    saved = {"densities": np.array(args.densities)}
    for i, density in enumerate(args.densities):
        total, tau, saved["sizes"], saved["names"] = record(data, density, args)
        index = np.flatnonzero(np.abs(total) >= tau)
        saved |= {f"gaps{i}": np.diff(index, prepend=0).astype(np.uint32), f"values{i}": total[index], f"tau{i}": tau}
    settings = f"{args.hidden} hidden units, {args.optimizer}, batch {args.batch}, step {args.step}"
    np.savez_compressed(args.output, what=np.array(f"{args.data}, {settings}"), **saved)
    print(f"{args.output}: {total.size} elements in {len(saved['sizes'])} variables, {len(args.densities)} densities")
    return 0


def record(data, density: float, args: argparse.Namespace):
    """Train with this density; return the last step's residual plus update and tau, and variables' sizes and names."""
    import keras
    import numpy as np

    from hvdx.codec import Threshold
    from hvdx.jobs.fashion_mnist import build

    keras.utils.clear_session()
    keras.utils.set_random_seed(args.seed)
    network = build(data, "mlp", args.hidden, args.optimizer, None)
    variables = network.trainable_variables
    weights = [keras.ops.convert_to_numpy(v).copy() for v in variables]
    codec = Threshold(target_density=density)
    state = codec.init([w.size for w in weights])
    order = np.random.default_rng(args.seed)
    for step in range(1, args.step + 1):
        chosen = order.integers(0, len(data.train_x), args.batch)
        network.train_on_batch(data.train_x[chosen], data.train_y[chosen])
        update = [keras.ops.convert_to_numpy(v) - w for v, w in zip(variables, weights, strict=True)]
        total, tau = state.residual + np.concatenate([u.reshape(-1) for u in update]), state.taus[0]
        message, state = codec.encode(update, state)
        codec.decode([message], weights)
        for variable, weight in zip(variables, weights, strict=True):
            variable.assign(weight)
        if step % 50 == 0 or step == args.step:
            print(f"density {density:.4g}, step {step}: sent {state.density:.4f}, {len(message)} bytes", flush=True)
    return total, tau, np.array([w.size for w in weights]), np.array([v.path for v in variables])


if __name__ == "__main__":
    sys.exit(main())
