"""Bits per entry on the wire, compared with the entropy of an entry's position and sign.

    hvdx bench wire

For independent positions of density p, every code needs at least H(p) / p bits per position and 1 bit per sign, where H
is the binary entropy. The positions of real updates are not independent: rows of a layer without input send no
entries, and other rows send many. A code that adapts to this may need fewer bits.
"""

import argparse
from pathlib import Path

import numpy as np

from hvdx.codec import Threshold
from hvdx.errors import ConfigError
from hvdx.jobs.benchmarks import harness
from hvdx.report.table import render

#: Default densities and sizes; and the goals, for independent positions at GOAL_SIZE and for the recorded step.
DENSITIES = (1e-4, 1e-3, 1e-2, 1 / 16, 0.1)
SIZES = (1_000_000, 10_000_000)
GOAL_SIZE, GOAL, GOAL_REAL = 10_000_000, 1.02, 1.00
#: Density at which the layers of the recorded step are also measured separately.
LAYERS_AT = 1e-2
RECORDED = Path(__file__).with_name("recorded_update.npz")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="elements of an update")
    parser.add_argument("--densities", type=float, nargs="+", default=list(DENSITIES), metavar="P", help="shares sent")
    parser.add_argument(
        "--update", default=str(RECORDED), metavar="FILE", help="file that jobs/benchmarks/record_update.py saved"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random positions")


def run(args: argparse.Namespace) -> int:
    """Measure, and print tables or JSON; return 1 if a goal is missed, else 0."""
    import hvdx

    if min(args.sizes) < 1 or not all(0 < p < 1 for p in args.densities):
        raise ConfigError("bench wire: expected --sizes of at least 1, and --densities between 0 and 1.")
    independent = [measure_independent(n, p, args.seed) for n in args.sizes for p in args.densities]
    try:
        recorded = measure_recorded(args.update)
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"bench wire: --update {args.update}: {error}. Expected a file that jobs/benchmarks/record_update.py wrote."
        ) from error
    missed = [r for r in independent if r["elements"] == GOAL_SIZE and r["ratio"] > GOAL]
    missed += [r for r in recorded["all"] if r["ratio"] >= GOAL_REAL]
    document = {"hvdx": hvdx.__version__, "independent": independent, "recorded": recorded, "goals_missed": len(missed)}
    harness.show(args.json, document, as_text)
    return 1 if missed else 0


def entropy(p: float) -> float:
    """Return the bits per entry for independent positions of density p and random signs.

    Example:
        >>> round(entropy(0.01), 2)
        9.08
    """
    return float((-p * np.log2(p) - (1 - p) * np.log2(1 - p)) / p + 1)


def measure_independent(n: int, p: float, seed: int) -> harness.Row:
    """Measure the bits per entry of one message with p * n entries at random positions."""
    rng = np.random.default_rng(seed)
    index = np.sort(rng.choice(n, max(round(p * n), 1), replace=False))
    update = np.zeros(n, np.float32)
    update[index] = rng.choice(np.array([-1, 1], np.float32), len(index))
    rice, plain = (8 * message_size([update], 1.0, coding) / len(index) for coding in ("rice", "none"))
    return {
        "elements": n,
        "density": p,
        "entries": len(index),
        "entropy": entropy(p),
        "bits": rice,
        "ratio": rice / entropy(p),
        "plain": plain,
        "deeplearning4j": 32 + 8 * 16 / len(index),
        "elias_fano": elias_fano(len(index), n),
        "zstd": zstd(index),
    }


def message_size(update: list[np.ndarray], tau: float, coding: str = "rice") -> int:
    """Return the bytes of the whole message of an update."""
    codec = Threshold(tau=tau, index_coding=coding)  # type: ignore[arg-type]
    return len(codec.encode(update, codec.init([u.size for u in update]))[0])


def elias_fano(entries: int, n: int) -> float:
    """Return the bits per entry of an Elias-Fano code of positions below n, plus a sign (Elias 1974; Fano 1971)."""
    low = max(int(np.floor(np.log2(n / entries))), 0)
    return low + (entries + (n >> low) + 1) / entries + 1


def zstd(index: np.ndarray) -> float | None:
    """Return the bits per entry of zstd (default level) on int32 positions, plus a sign; None without zstandard."""
    try:
        import zstandard
    except ImportError:
        return None
    return 8 * len(zstandard.ZstdCompressor().compress(index.astype(np.int32).tobytes())) / len(index) + 1


def measure_recorded(path: str) -> harness.Row:
    """Measure the bits per entry of a recorded step at each density, in one message and layer by layer."""
    everything, by_layer = [], []
    with np.load(path) as saved:
        sizes, names, what = saved["sizes"].tolist(), saved["names"].tolist(), str(saved["what"])
        for i, density in enumerate(saved["densities"].tolist()):
            total = np.zeros(sum(sizes), np.float32)
            total[np.cumsum(saved[f"gaps{i}"], dtype=np.int64)] = saved[f"values{i}"]
            layers, tau = np.split(total, np.cumsum(sizes)[:-1]), float(saved[f"tau{i}"])
            figure: harness.Row = {"density": density} | compare_with_entropy(layers, tau)
            everything.append(figure | ({"step": int(saved["steps"][i])} if "steps" in saved else {}))
            if density == LAYERS_AT:
                by_layer = [
                    {"layer": name, "elements": layer.size} | compare_with_entropy([layer], tau)
                    for name, layer in zip(names, layers, strict=True)
                ]
    return {"what": what, "elements": sum(sizes), "all": everything, "layers": by_layer}


def compare_with_entropy(update: list[np.ndarray], tau: float) -> dict[str, float]:
    """Return the entries, the share of entries of at least 2 tau, and bits per entry compared with the entropy."""
    size = np.abs(np.concatenate(update))
    entries = int((size >= tau).sum())
    if not entries:
        return {"entries": 0, "multiples": 0.0, "bits": 0.0, "entropy": 0.0, "ratio": 0.0}
    bits = 8 * message_size(update, tau) / entries
    ideal = entropy(entries / size.size) if entries < size.size else 1.0
    multiples = float((size >= 2 * np.float32(tau)).sum() / entries)
    return {"entries": entries, "multiples": multiples, "bits": bits, "entropy": ideal, "ratio": bits / ideal}


def as_text(document: harness.Row) -> str:
    """Return the figures as tables."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = [
        [f"{r['elements']:,}", f"{r['density']:.4g}", *(number(r[k]) for k in ("entropy", "bits")), f"{r['ratio']:.4f}"]
        + [number(r[k]) for k in ("elias_fano", "plain", "deeplearning4j", "zstd")]
        for r in document["independent"]
    ]
    header = ["elements", "density", "entropy", "hvdx", "ratio"]
    header += ["Elias-Fano", "index_coding=none", "DL4J", "zstd int32"]
    recorded = document["recorded"]
    columns = ["entries", "entropy", "hvdx", "ratio", "m > 1"]

    def cells(r: harness.Row) -> list[str]:
        return [
            str(r["entries"]),
            number(r["entropy"]),
            number(r["bits"]),
            f"{r['ratio']:.3f}",
            f"{r['multiples']:.1%}",
        ]

    def step(r: harness.Row) -> list[str]:
        return [f"{r['density']:.4g}", str(r.get("step", "-")), *cells(r)]

    layers = [[r["layer"], f"{r['elements']:,}", *cells(r)] for r in recorded["layers"]]
    return "\n".join(
        [
            "Bits per entry, including sign and all headers.",
            "",
            "independent positions:",
            render(rows, header),
            "",
            f"a recorded step ({recorded['what']}; {recorded['elements']:,} elements):",
            render([step(r) for r in recorded["all"]], ["density aimed at", "step", *columns]),
            "",
            f"its layers at density {LAYERS_AT}, each in its own message:",
            render(layers, ["layer", "elements", *columns]),
            "",
            goals_line(document),
        ]
    )


def goals_line(document: harness.Row) -> str:
    """Return a line about the goals that the figures cover."""
    missed = document["goals_missed"]
    reached = "met" if not missed else f"{missed} missed"
    asked = [f"< {GOAL_REAL:.2f} for the whole recorded step"]
    if any(r["elements"] == GOAL_SIZE for r in document["independent"]):
        asked.insert(0, f"ratio <= {GOAL} at {GOAL_SIZE:,} elements")
    return f"goals: {', '.join(asked)}: {reached}"
