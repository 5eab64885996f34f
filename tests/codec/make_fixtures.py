"""Write the pinned messages in tests/fixtures/wire. Use --force only for a new version of the format.

    python -m tests.codec.make_fixtures            adds missing messages
    python -m tests.codec.make_fixtures --force    writes all of them again

Each message is a file NAME.bin; NAME.json describes its input and its meaning. Files with "codec" hold whole messages,
made from an update and, if the codec has one, a residual. Files with "tiles" hold tiles of the kernels, made from
entries.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.codec import make
from hvdx.kernels import reference
from hvdx.kernels.tiles import LAYOUT, Layout

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "wire"
SMALL = Layout(region=128, tile_max=24, tile_min=8, group=12, group_regions=3)


def sparse(vector: np.ndarray) -> dict[str, Any]:
    """Return a float32 vector as JSON, with the values that are not 0.0."""
    at = np.flatnonzero(vector.view(np.uint32))
    return {"n": vector.size, "at": at.tolist(), "values": [float(v) for v in vector[at]]}


def dense(parts: dict[str, Any]) -> np.ndarray:
    """Return the vector of a description by `sparse`."""
    vector = np.zeros(parts["n"], np.float32)
    vector[parts["at"]] = parts["values"]
    return vector


def whole(
    name: str, arrays: list[list[float]], residual: list[float] | None = None, **options: Any
) -> tuple[bytes, dict[str, Any]]:
    """Return a codec's message and its description."""
    update = [np.array(a, np.float32) for a in arrays]
    sizes = [u.size for u in update]
    codec = make(name, **options)
    state = codec.init(sizes)
    if residual:
        state = codec.restore(state.arrays() | {"residual": np.array(residual, np.float32)}, sizes)
    before = state.arrays().get("residual")
    message, state = codec.encode(update, state)
    out = [np.zeros(size, np.float32) for size in sizes]
    codec.decode([message], out)
    described = {
        "codec": name,
        "options": options,
        "update": [sparse(u) for u in update],
        "decoded": [sparse(o) for o in out],
    }
    if before is not None:
        described |= {"residual": sparse(before), "residual after": sparse(state.arrays()["residual"])}
    return message.tobytes(), described


def tiles(
    n: int, index: list[int], m: list[int], rice: bool = True, layout: Layout = LAYOUT
) -> tuple[bytes, dict[str, Any]]:
    """Return tiles and their description; every third entry is negative."""
    negative = [i % 3 == 0 for i in range(len(index))]
    data = reference.write(np.array(index, np.int64), np.array(negative, bool), np.array(m, np.int64), n, rice, layout)
    return data.tobytes(), {
        "tiles": "rice" if rice else "none",
        "n": n,
        "layout": layout._asdict(),
        "index": index,
        "negative": "".join("01"[sign] for sign in negative),
        "m": m,
    }


NUMBERS = [[0, -0.0, 1, -2.5, 1 / 3, 65504, -6e-8, 1e-3], [], [2.0**-24 + 2.0**-20]]
WIDE = [[0, 1, -1.00390625, 3.38e38, 1e-40, -1.01171875, 1 / 3]]
UPDATE = [[0.1, 0.6, -1.1, 0, 0, 0.45], [], [-0.3, 0, 40.2, -0.2] + [0] * 60 + [1]]
RESIDUAL = [0.2, 0, 0, -0.4, -0.0, 0.1, -0.3, 0.4, 0.4, 0.4] + [0] * 60 + [-0.45]
# The scale of these gaps changes little from block to block, so keeping the parameter is sometimes cheaper.
DRIFTING = np.cumsum([1 + (i * i * 7919 + i * 104729) % (26 + 8 * (i // 64 % 3)) for i in range(390)]).tolist()
MIXED = sorted({7 * i for i in range(60)} | set(range(500, 640)) | {640 + 29 * i for i in range(30)})
SPREAD = [3, 130, 250, 385] + list(range(512, 522)) + list(range(700, 750)) + [900, 1300, 1301, 2000]
FAR = [7, 2**31, 2**32 - 1, 2**38, 2**38 + 1, 2**40 - 1]
LONG = Layout(2**26, 128, 16, 32, 8)
#: Messages with a tau for each array, which the codec reads, and has written for an option that was removed.
READ_ONLY = {"threshold-rice-variables", "threshold-none-variables"}


def fixtures() -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Return (message, description) by name."""
    made = {
        "none": whole("none", NUMBERS + WIDE),
        "fp16": whole("fp16", NUMBERS),
        "bf16": whole("bf16", NUMBERS + WIDE),
        "none-empty": whole("none", []),
    }
    made["tiles-rice-choices"] = tiles(DRIFTING[-1] + 1, DRIFTING, [1] * len(DRIFTING))
    for coding in ("rice", "none"):
        made |= {
            f"threshold-{coding}": whole("threshold", UPDATE, RESIDUAL, tau=0.5, index_coding=coding),
            f"threshold-{coding}-any-tau": whole("threshold", UPDATE, tau=0.3, index_coding=coding),
            f"threshold-{coding}-no-arrays": whole("threshold", [], tau=0.5, index_coding=coding),
            f"threshold-{coding}-nothing": whole("threshold", [[0] * 100], tau=0.5, index_coding=coding),
            f"tiles-{coding}-parameters": tiles(2000, MIXED, [1] * len(MIXED), coding == "rice"),
            f"tiles-{coding}-multiples": tiles(
                300, [*range(0, 200, 9), 201, 299], [1, 2, 1, 1, 3, 2**30, 70] + [1] * 18, coding == "rice"
            ),
            f"tiles-{coding}-escapes": tiles(
                70_000, [*range(9), 4000, 4001, 69_000, 69_001], [1] * 13, coding == "rice"
            ),
            f"tiles-{coding}-several-and-shared": tiles(
                2100, SPREAD, [1 + (i % 11 == 5) for i in range(len(SPREAD))], coding == "rice", SMALL
            ),
            f"tiles-{coding}-64-bit-gaps": tiles(2**40, FAR, [1, 1, 2, 1, 1, 5], coding == "rice", LONG),
        }
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.codec.make_fixtures", description=__doc__.splitlines()[0])
    parser.add_argument("--force", action="store_true", help="overwrite existing messages: the format has changed")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    made = fixtures()
    there = [name for name in made if (options.folder / f"{name}.bin").exists()]
    if len(there) == len(made) and not options.force:
        print(f"all {len(there)} messages exist and are pinned; --force writes them again", file=sys.stderr)
        return 1
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, (message, described) in made.items():
        if name not in there or options.force:
            (options.folder / f"{name}.bin").write_bytes(message)
            (options.folder / f"{name}.json").write_text(json.dumps(described, separators=(",", ":")) + "\n")
            print(f"{name}: {len(message)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
