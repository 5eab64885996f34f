"""Train a small transformer on the sources of Python's standard library, on one or more processes.

    python jobs/language_model.py                             one process
    mpirun -n 2 python jobs/language_model.py                 two processes that average their gradients
    mpirun -n 2 python jobs/language_model.py --split 2       the same, with the MLP of each block split over both
    HVDX_STRATEGY=threshold mpirun -n 2 python jobs/language_model.py

The model predicts each character from those before it. Every tenth file is held out from training; its loss is in nats
per character. The batch size is per process: a step of two processes with batch 16 uses 32 windows of text.
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
    import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_argument_group("data and model")
    what.add_argument(
        "--folder",
        metavar="DIR",
        help="folder of Python files to train on (default: the modules of Python's standard library)",
    )
    what.add_argument(
        "--characters", type=int, default=None, metavar="N", help="train only on the first N characters of the text"
    )
    what.add_argument("--layers", type=int, default=3, metavar="N", help="transformer blocks (default: 3)")
    what.add_argument("--width", type=int, default=192, metavar="N", help="width of a block (default: 192)")
    what.add_argument("--heads", type=int, default=4, metavar="N", help="attention heads of a block (default: 4)")
    what.add_argument(
        "--context", type=int, default=64, metavar="N", help="characters in a window of text (default: 64)"
    )
    how = parser.add_argument_group("training")
    how.add_argument(
        "--strategy",
        metavar="SPEC",
        help="strategy that combines the processes' work, such as all_reduce:compression=fp16 "
        "(default: $HVDX_STRATEGY, else all_reduce)",
    )
    how.add_argument(
        "--split",
        metavar="M",
        help="split the MLP of each block over groups of M processes (default: $HVDX_SPLIT, else 1)",
    )
    how.add_argument("--epochs", type=int, default=3, metavar="N", help="epochs (default: 3)")
    how.add_argument("--steps", type=int, default=100, metavar="N", help="steps in an epoch (default: 100)")
    how.add_argument("--batch", type=int, default=16, metavar="N", help="windows per step and process (default: 16)")
    how.add_argument(
        "--learning-rate",
        "--rate",
        type=float,
        default=0.001,
        metavar="X",
        help="learning rate of AdamW (default: 0.001)",
    )
    how.add_argument(
        "--seed",
        type=int,
        default=os.environ.get("HVDX_SEED", "0"),
        metavar="N",
        help="seed of the weights and of the order of the windows (default: $HVDX_SEED, else 0)",
    )
    how.add_argument(
        "--held-out", type=int, default=256, metavar="N", help="windows in the held-out loss (default: 256)"
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--save",
        metavar="FILE.keras",
        help="write the trained model as a plain Keras model, which loads without hvdx",
    )
    out.add_argument("--history", metavar="FILE.json", help="write the losses of each epoch to FILE.json")
    out.add_argument("--digest", action="store_true", help="print a digest of the final weights of every process")
    out.add_argument("--quiet", action="store_true", help="show no progress bar")
    args = parser.parse_args(argv)
    if args.heads < 1 or args.width % args.heads:
        parser.error(f"--width: expected a multiple of --heads ({args.heads}), got {args.width}")
    return args


def build(vocabulary: int, context: int, layers: int, width: int, heads: int, learning_rate: float) -> "keras.Model":
    """Build and compile the transformer, with layer normalisation at the start of each branch.

    Args:
        vocabulary: number of different characters.
        context: characters in a window.
        layers: number of blocks.
        width: width of a block; its MLP has 4 * `width` hidden units.
        heads: attention heads of a block.
        learning_rate: learning rate of AdamW.
    """
    import keras
    from keras import ops
    from keras.layers import Dense, Embedding, LayerNormalization, MultiHeadAttention

    import hvdx

    tokens = keras.Input((context,), dtype="int32")
    # Keras' Adam squares each row of an embedding's gradient by itself. With a single row of positions for the whole
    # batch, two workers would not take the steps of one.
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    x = Embedding(vocabulary, width)(tokens) + Embedding(context, width)(positions)
    for _ in range(layers):
        inner = LayerNormalization()(x)
        x = x + MultiHeadAttention(heads, width // heads)(inner, inner, use_causal_mask=True)
        inner = LayerNormalization()(x)
        if keras.backend.backend() == "tensorflow":
            # These are plain `Dense` layers, too, unless `hvdx.init` has formed groups that split them.
            first = hvdx.keras.layers.SplitDense(4 * width, activation="gelu", gather_output=False)
            second = hvdx.keras.layers.SplitDense(width, input_is_split=True)
        else:
            first, second = Dense(4 * width, activation="gelu"), Dense(width)
        x = x + second(first(inner))
    network = keras.Model(tokens, Dense(vocabulary)(LayerNormalization()(x)))
    network.compile(
        optimizer=keras.optimizers.AdamW(learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return network


def windows(text: "np.ndarray", context: int) -> "tuple[np.ndarray, np.ndarray]":
    """Return windows of a text and the characters that follow each of theirs, views of uint8[windows, context].

    Args:
        text: codes of the characters, uint8[n]; each of the first n - context begins a window.
        context: characters in a window.

    Example:
        >>> import numpy as np
        >>> windows(np.arange(4, dtype=np.uint8), 2)[1].tolist()
        [[1, 2], [2, 3]]
    """
    import numpy as np

    both = np.lib.stride_tricks.sliding_window_view(text, context + 1)
    return both[:, :-1], both[:, 1:]


def main(argv: list[str] | None = None) -> int:
    """Run the job, and return its exit code."""
    args = arguments(argv)
    import hvdx
    from hvdx.jobs.data import VOCABULARY, load_text
    from hvdx.report.table import render

    hvdx.init(split=args.split)
    import keras
    import numpy as np

    try:
        text = load_text(args.folder, args.characters)
    except FileNotFoundError as error:
        if hvdx.rank() == 0:
            print(f"language_model: {error}", file=sys.stderr)
        return 2
    keras.utils.set_random_seed(args.seed)
    model = build(VOCABULARY, args.context, args.layers, args.width, args.heads, args.learning_rate)
    train = hvdx.shard(windows(text.train, args.context), args.batch, steps=args.steps, seed=args.seed)
    x, y = windows(text.held_out, args.context)
    spread = np.linspace(0, len(x) - 1, args.held_out).astype(int)
    held_out = hvdx.shard((x[spread], y[spread]), args.batch, shuffle=False, drop_remainder=False)
    if hvdx.rank() == 0:
        print(
            f"text: {text.files} files, {len(text.train):,} characters; {text.held_out_files} files, "
            f"{len(text.held_out):,} characters held out\n"
            f"{model.count_params():,} parameters on each of {hvdx.size()} worker(s), {args.steps} steps an epoch",
            flush=True,
        )
    distribute = hvdx.keras.Distribute(args.strategy)
    begin = time.perf_counter()
    history = model.fit(
        train,
        validation_data=held_out,
        epochs=args.epochs,
        shuffle=False,
        verbose=0 if args.quiet else (1 if sys.stdout.isatty() else 2),
        callbacks=[distribute],
    ).history
    seconds = time.perf_counter() - begin
    plain = hvdx.keras.gather(model)
    if hvdx.rank() == 0:
        seen = args.epochs * args.steps * args.batch * hvdx.size() * args.context
        results = [
            ("held-out loss, nats per character", f"{history['val_loss'][-1]:.4f}"),
            ("training loss", f"{history['loss'][-1]:.4f}"),
        ]
        print(render([*results, ("characters a second", f"{seen / seconds:,.0f}")]))
        if args.quiet:
            # Without --quiet, fit has printed it.
            print(distribute.summary())
        if args.save:
            plain.save(args.save)
        if args.history:
            Path(args.history).write_text(json.dumps(history))
    if args.digest:
        bits = b"".join(weight.tobytes() for weight in plain.get_weights())
        print(f"weights of rank {hvdx.rank()}: {hashlib.sha256(bits).hexdigest()[:16]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
