"""Time of a checkpoint compared with one plain write of the same bytes, and the time that training waits for it.

    python jobs/benchmarks/checkpoint.py                           20 million parameters, with momenta
    python jobs/benchmarks/checkpoint.py --parameters 1e6 --json out.json

Four durations are measured in turns, in several rounds:

    once        write the same bytes to one file, with fsync
    copy        copy the same bytes in memory
    checkpoint  from the decision to save until the checkpoint has its final name and is on the disk
    waited      the part of "checkpoint" for which training waits
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from hvdx.jobs.benchmarks import harness

if TYPE_CHECKING:
    import keras

    from hvdx.keras.checkpoint.writer import Writer


def model_of(parameters: int) -> "keras.Model":
    """Build a network of about this number of parameters, with momenta."""
    import keras

    units = max(round((parameters / 4) ** 0.5), 1)
    layers = [keras.layers.Dense(units) for _ in range(4)]
    model = keras.Sequential([keras.Input((units,)), *layers])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def write_once(folder: Path, arrays: Sequence[np.ndarray]) -> float:
    """Return the seconds for a write of the arrays to one file."""
    path = folder / "once"
    begin = time.perf_counter()
    with path.open("wb") as file:
        for array in arrays:
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return seconds


def copy_once(arrays: Sequence[np.ndarray]) -> float:
    """Return the seconds for a copy of the arrays into newly allocated memory, as a checkpoint uses."""
    begin = time.perf_counter()
    copies = [array.copy() for array in arrays]
    seconds = time.perf_counter() - begin
    del copies
    return seconds


def save_once(writer: "Writer", folder: Path, model: "keras.Model") -> tuple[float, float]:
    """Return the seconds that training waits, and the seconds until the checkpoint has its final name."""
    from hvdx.keras.checkpoint.contents import Data, snapshot
    from hvdx.keras.checkpoint.folder import Position
    from hvdx.keras.joining import join

    begin = time.perf_counter()
    writer.start(Position(1), snapshot(model, join(), Data([])))
    waited = time.perf_counter() - begin
    writer.finish()
    whole = time.perf_counter() - begin
    shutil.rmtree(folder / "ckpt")
    return waited, whole


def main(argv: list[str] | None = None) -> int:
    """Measure all times, and print the table."""
    parser = harness.parser(__doc__)
    parser.add_argument("--parameters", type=float, default=20e6, metavar="N", help="parameters of the model")
    parser.add_argument("--repeat", type=int, default=7, metavar="N", help="measurements of each time")
    parser.add_argument("--folder", metavar="DIR", help="folder for the files; a temporary folder by default")
    args = parser.parse_args(argv)
    from hvdx.keras.checkpoint.folder import Folder
    from hvdx.keras.checkpoint.writer import Writer
    from hvdx.keras.joining import join
    from hvdx.report.table import quantity, render

    model = model_of(round(args.parameters))
    arrays = [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
    size = sum(a.nbytes for a in arrays)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    writer = Writer(Folder(os.fspath(folder / "ckpt"), join()), keep=1)
    turns = []
    try:
        for turn in range(args.repeat + 1):
            measured = write_once(folder, arrays), copy_once(arrays), *save_once(writer, folder, model)
            if turn:  # the first turn is a warm-up
                turns.append(measured)
    finally:
        shutil.rmtree(folder)
    once, copies, waits, wholes = (list(values) for values in zip(*turns, strict=True))

    def ratio(upper: list[float], lower: list[float]) -> float:
        return median(a / b for a, b in zip(upper, lower, strict=True))

    figures = {
        "parameters": model.count_params(),
        "bytes": size,
        "repeat": args.repeat,
        **{
            f"{name} seconds": [round(v, 4) for v in values]
            for name, values in (("once", once), ("copy", copies), ("waited", waits), ("checkpoint", wholes))
        },
        "checkpoint / once": round(ratio(wholes, once), 3),
        "waited / copy": round(ratio(waits, copies), 3),
    }

    def row(name: str, values: list[float]) -> tuple[str, str]:
        low, high = min(values), max(values)
        return name, f"{1e3 * median(values):.0f} ms ({1e3 * low:.0f} to {1e3 * high:.0f})"

    rows = [
        ("parameters, bytes", f"{model.count_params():,}, {quantity(size, 'B')}"),
        row("the same bytes, written once", once),
        row("a checkpoint", wholes),
        ("checkpoint / once", f"{figures['checkpoint / once']:.2f}"),
        row("a copy in memory", copies),
        row("the training waits", waits),
        ("waited / copy", f"{figures['waited / copy']:.2f}"),
    ]
    print(render(rows))
    harness.write(args.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
