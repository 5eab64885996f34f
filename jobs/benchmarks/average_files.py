"""Speed of `hvdx average` compared with plain reads of its inputs, and its memory.

    python jobs/benchmarks/average_files.py --json docs/benchmarks/average-files.json

Three files are made in each format (by the framework that the table names) and averaged by a new process in each round.
Between two averages, the files are read in two plain ways. Reading them whole, with Python's file.read(), is the
yardstick of the goal. Reading them block by block, into one buffer that stays in the cache, gives a lower bound of the
time. In these rounds the files are in the page cache, and the table shows medians; a last run reads them from the disk.
Averaging includes writing the result and fsync; "no sync" excludes fsync. Memory is the peak resident size of the
averaging process, above its size after the imports.
"""

import argparse
import importlib.util
import os
import platform
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from hvdx.jobs.benchmarks import harness

if TYPE_CHECKING:
    import keras

Array = Callable[[], np.ndarray]
#: Goals: least ratio of the speed to plain reads of whole files, and largest memory above the imports in MB.
GOALS = {"ratio": 0.5, "memory_MB": 1500.0}
_FILES = 3
_SIDE = 2048
_BLOCK = 1 << 20


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, or one of its worker processes."""
    parser = harness.parser(__doc__)
    parser.add_argument("--formats", default=",".join(MAKERS), metavar="F,F,...", help="formats to measure")
    parser.add_argument("--size", type=float, default=1.0, metavar="GB", help="size of each file")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each format")
    parser.add_argument("--folder", metavar="DIR", help="folder for the files; a temporary folder by default")
    return harness.run(parser, compare, work, argv)


def work(setting: argparse.Namespace) -> dict[str, float]:
    """Make a file, or average files, in a worker process."""
    if hasattr(setting, "make"):
        make_one(setting.make, Path(setting.path), setting.size)
        return {}
    return average_once([Path(path) for path in setting.average], setting.cold)


def compare(options: argparse.Namespace) -> int:
    """Measure every format, and print the table; return 1 if a goal is missed or nothing was measured."""
    rows = [row for name in options.formats.split(",") if (row := measure(name, options))]
    if not rows:
        return 1
    print(f"\n{harness.table(rows, _COLUMNS)}\n\n{_NOTE}\n")
    met = _check_goals(rows)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "kernel": platform.release()}
    sizes = {"GB": options.size, "files": _FILES, "rounds": options.rounds}
    harness.write(options.json, versions | sizes | {"rows": rows})
    return 0 if met else 1


def measure(name: str, options: argparse.Namespace) -> harness.Row | None:
    """Make the files of one format, and measure; return None if its framework is missing."""
    if name not in MAKERS:
        raise SystemExit(f"average_files: --formats: expected some of {', '.join(MAKERS)}; got {name}.")
    suffix, framework, _ = MAKERS[name]
    if framework and importlib.util.find_spec(framework) is None:
        print(f"{name}: skipped, {framework} is not installed")
        return None
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="hvdx-bench-") as folder:
        paths = [Path(folder) / f"{i}{suffix}" for i in range(_FILES)]
        for path in paths:
            harness.launch(__file__, {"make": name, "path": str(path), "size": options.size})
        out = Path(folder) / f"mean{suffix}"
        reads: dict[str, list[float]] = {"whole": [], "blocks": []}
        runs = []
        for number in range(options.rounds):
            for how, taken in reads.items():
                taken.append(_read(paths, how))
            runs.append(_averaged(paths, out))
            print(f"{name}: round {number + 1}: {runs[-1]['seconds']:.2f} s, read whole in {reads['whole'][-1]:.2f} s")
        _drop_from_cache(paths)
        cold_read = _read(paths, "whole")
        cold = _averaged(paths, out, cold=True)
    seconds, plain = median(run["seconds"] for run in runs), median(reads["whole"])
    return {
        "format": name,
        "made_by": framework or "hvdx",
        "read_whole_s": plain,
        "read_blocks_s": median(reads["blocks"]),
        "average_s": seconds,
        "no_sync_s": median(run["seconds"] - run["sync"] for run in runs),
        "spread_s": [min(run["seconds"] for run in runs), max(run["seconds"] for run in runs)],
        "read_whole_spread_s": [min(reads["whole"]), max(reads["whole"])],
        "ratio": plain / seconds,
        "ratio_no_sync": plain / median(run["seconds"] - run["sync"] for run in runs),
        "ratio_blocks_no_sync": median(reads["blocks"]) / median(run["seconds"] - run["sync"] for run in runs),
        "cold_read_s": cold_read,
        "cold_average_s": cold["seconds"],
        "cold_ratio": cold_read / cold["seconds"],
        "memory_MB": max(run["memory_MB"] for run in [*runs, cold]),
    }


def average_once(paths: Sequence[Path], cold: bool) -> dict[str, float]:
    """Average in this process.

    Args:
        paths: inputs, and the output as the last one.
        cold: True drops the inputs from the page cache first.

    Returns:
        Total seconds, seconds in fsync, and peak memory above the imports in MB.
    """
    from hvdx.averaging import average
    from hvdx.averaging.formats import open_network

    # Imports the modules of the format.
    open_network(paths[0]).close()
    synced, real = [0.0], os.fsync

    def timed(handle: int) -> None:
        begin = time.perf_counter()
        real(handle)
        synced[0] += time.perf_counter() - begin

    os.fsync = timed  # type: ignore[assignment]
    if cold:
        _drop_from_cache(paths[:-1])
    before = harness.memory("VmRSS")
    begin = time.perf_counter()
    average(paths[:-1], paths[-1])
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "sync": synced[0], "memory_MB": (harness.memory("VmHWM") - before) / 1e6}


def make_one(name: str, path: Path, size: float) -> None:
    """Make one file of about `size` GB, with a seed from its name."""
    seed = int(path.name.split(".")[0])
    count = max(round(size * 1e9 / (4 * _SIDE * _SIDE)), 1)
    generator = np.random.default_rng(seed)
    MAKERS[name][2](path, lambda: generator.standard_normal((_SIDE, _SIDE), np.float32), count)
    for piece in _pieces(path):
        handle = os.open(piece, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def _make_safetensors(path: Path, array: Array, count: int) -> None:
    from hvdx.averaging.safetensors import save

    save(path, {f"layers.{i}.weight": array() for i in range(count)})


def _make_pytorch(path: Path, array: Array, count: int) -> None:
    import torch

    torch.save({f"layers.{i}.weight": torch.from_numpy(array()) for i in range(count)}, path)


def _make_mxnet(path: Path, array: Array, count: int) -> None:
    with path.open("wb") as file:
        file.write(struct.pack("<QQQ", 0x112, 0, count))
        for _ in range(count):
            # Version 2, dense storage, two dimensions, on the CPU, float32.
            file.write(struct.pack("<Iiiqqiii", 0xF993FAC9, 0, 2, _SIDE, _SIDE, 1, 0, 0))
            file.write(array().data)
        file.write(struct.pack("<Q", count))
        for i in range(count):
            name = f"dense{i}.weight".encode()
            file.write(struct.pack("<Q", len(name)) + name)


def _keras_model(array: Array, count: int) -> "keras.Model":
    import keras

    layers = [keras.layers.Dense(_SIDE, use_bias=False) for _ in range(count)]
    model = keras.Sequential([keras.Input((_SIDE,)), *layers])
    for layer in layers:
        layer.kernel.assign(array())
    return model


def _make_weights(path: Path, array: Array, count: int) -> None:
    _keras_model(array, count).save_weights(path)


def _make_keras(path: Path, array: Array, count: int) -> None:
    _keras_model(array, count).save(path)


def _make_checkpoint(path: Path, array: Array, count: int) -> None:
    import tensorflow as tf

    tf.train.Checkpoint(layers=[tf.Variable(array()) for _ in range(count)]).write(str(path))


#: By format: suffix of the files, framework that makes them ("" for hvdx), and the function that makes one.
MAKERS: dict[str, tuple[str, str, Callable[[Path, Array, int], None]]] = {
    "safetensors": (".safetensors", "", _make_safetensors),
    "pt": (".pt", "torch", _make_pytorch),
    "params": (".params", "", _make_mxnet),
    "weights.h5": (".weights.h5", "keras", _make_weights),
    "keras": (".keras", "keras", _make_keras),
    "checkpoint": (".ckpt", "tensorflow", _make_checkpoint),
}


def _pieces(path: Path) -> list[Path]:
    """Return the file, or the files of a checkpoint."""
    return [path] if path.exists() else sorted(path.parent.glob(f"{path.name}.*"))


def _read(paths: Sequence[Path], how: str) -> float:
    """Return the seconds for a plain read of all files; `how` is "whole" or "blocks"."""
    begin = time.perf_counter()
    for piece in (piece for path in paths for piece in _pieces(path)):
        if how == "whole":
            with piece.open("rb") as file:
                file.read()
        else:
            buffer = bytearray(_BLOCK)
            with piece.open("rb", buffering=0) as raw:
                while raw.readinto(buffer):
                    pass
    return time.perf_counter() - begin


def _averaged(paths: Sequence[Path], out: Path, cold: bool = False) -> dict[str, float]:
    try:
        return harness.launch(__file__, {"average": [*map(str, paths), str(out)], "cold": cold}).ranks[0]
    finally:
        for piece in _pieces(out):
            piece.unlink(missing_ok=True)


def _drop_from_cache(paths: Sequence[Path]) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk."""
    for piece in (piece for path in paths for piece in _pieces(path)):
        handle = os.open(piece, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


_COLUMNS = [
    ("format", lambda row: row["format"]),
    ("made by", lambda row: row["made_by"]),
    harness.figure("read whole, s", "read_whole_s", ".2f"),
    harness.figure("in blocks", "read_blocks_s", ".2f"),
    harness.figure("average", "average_s", ".2f"),
    harness.figure("no sync", "no_sync_s", ".2f"),
    harness.figure("ratio", "ratio", ".2f"),
    harness.figure("cold", "cold_ratio", ".2f"),
    harness.figure("blocks", "ratio_blocks_no_sync", ".2f"),
    harness.figure("MB", "memory_MB", ".0f"),
]
_NOTE = "ratio: read whole / average; cold: the same from disk; blocks: in blocks / no sync; MB: above the imports."


def _check_goals(rows: Sequence[harness.Row]) -> bool:
    """Print whether each format meets its goals; return True if all do."""
    met = True
    for row in rows:
        good = row["ratio"] >= GOALS["ratio"] and row["memory_MB"] < GOALS["memory_MB"]
        met &= good
        print(
            f"{'ok' if good else 'MISSED'}  {row['format']}: {row['ratio']:.2f} of the speed of plain reads (goal "
            f"{GOALS['ratio']}), {row['memory_MB']:.0f} MB (goal below {GOALS['memory_MB']:.0f})"
        )
    return met


if __name__ == "__main__":
    sys.exit(main())
