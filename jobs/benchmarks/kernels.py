"""Speed of the threshold kernels on this machine's cores, compared with their minimal memory traffic.

    hvdx bench kernels

Encoding reads a residual and an update, and writes the residual: 12 bytes per element, like np.add(r, g, out=r). This
np.add is the baseline, measured in turns with the codec on the same number of threads. The goals apply to the functions
that a training step calls: the codec's `encode`, which reads the update once more to check it, and its `decode`,
including checksums. Sums reach tau at random places. Before each turn the residual is reset, so that all turns have
equal inputs.
"""

import argparse
import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hvdx.codec import Threshold
from hvdx.errors import ConfigError
from hvdx.jobs.benchmarks import harness
from hvdx.kernels import cpu
from hvdx.kernels.pieces import aligned
from hvdx.kernels.threads import cut, default_threads, spread
from hvdx.kernels.tiles import Runs
from hvdx.report.table import render

DENSITIES = (1e-4, 1e-3, 1e-2, 1 / 16, 0.1)
#: Goals for the speed of encoding relative to np.add, by the largest density of each goal.
GOALS = {1e-3: 0.90, 1e-2: 0.60}
#: Goal: decoding this number of messages at this density takes no longer than encoding one.
MESSAGES, MESSAGES_AT = 16, 1e-3
#: Bytes per element that encoding and np.add move.
BYTES = 12
#: Goal: memory in addition to the message, as a fraction of the update's size.
MEMORY = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--elements", type=int, default=1 << 24, metavar="N", help="float32 elements of an update")
    parser.add_argument("--densities", type=float, nargs="+", default=list(DENSITIES), metavar="P", help="shares sent")
    parser.add_argument("--threads", type=int, nargs="+", metavar="T", help="numbers of threads (default: 1 and all)")
    parser.add_argument("--rounds", type=int, default=15, help="timed turns of each kernel")


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or JSON; return 1 if a goal is missed, else 0."""
    import hvdx

    if min(args.elements, args.rounds, *(args.threads or [1])) < 1 or not all(0 <= p < 1 for p in args.densities):
        raise ConfigError("bench kernels: expected at least 1 element, round and thread, and densities below 1.")
    threads = args.threads or sorted({1, default_threads()})
    quiet = args.json == "-"
    figures = []
    for p in args.densities:
        case = Case(args.elements, p)
        for t in threads:
            figures.append(measure(case, t, args.rounds))
            if not quiet:
                print(f"measured density {p:.4g} on {t} thread(s)", file=sys.stderr, flush=True)
    missed = [text for figure in figures for text in shortfalls(figure)]
    document = {
        "hvdx": hvdx.__version__,
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "elements": args.elements,
        "rounds": args.rounds,
        "figures": figures,
        "goals_missed": missed,
    }
    harness.show(args.json, document, as_text)
    return 1 if missed else 0


class Case:
    """Update of which a given share reaches tau, with a codec and its state."""

    def __init__(self, n: int, p: float) -> None:
        rng = np.random.default_rng(0)
        self.n, self.density, self.runs = n, p, Runs(np.array([n]), np.ones(1, np.float32))
        self.start, self.update, self.out = (aligned(n) for _ in range(3))
        self.start[:] = rng.uniform(-0.4, 0.4, n)
        self.update[:] = rng.normal(0, 1e-3, n)
        hit = rng.random(n) < p
        self.update[hit] = rng.choice(np.array([-1.5, 1.5], np.float32), int(hit.sum()))
        self.out[:] = 0
        self.begin(1)

    def begin(self, threads: int) -> None:
        """Make a new codec and state for this number of threads."""
        self.codec = Threshold(tau=1.0, threads=threads)
        self.state = self.codec.init([self.n])
        self.residual = self.state.residual

    def encode(self) -> np.ndarray:
        """Encode as a training step does, and return the message."""
        message, self.state = self.codec.encode([self.update], self.state)
        return message

    def decode(self, messages: list[np.ndarray]) -> None:
        """Decode as a training step does, adding the mean of the messages to `out`."""
        self.codec.decode(messages, [self.out], 1 / len(messages))

    def encode_trusted(self, work: cpu.Workspace) -> None:
        """Encode without the check of the update, which training never does."""
        cpu.encode([self.update], self.residual, self.runs, trusted=True, threads=work.threads, workspace=work)

    def reset(self) -> None:
        """Reset the residual to its initial values."""
        self.residual[:] = self.start


def measure(case: Case, threads: int, rounds: int) -> dict:
    """Time all kernels in turns, at one density and number of threads."""
    case.begin(threads)
    work, borders = cpu.Workspace(case.n, 1, threads=threads), cut(case.n, threads, 64)

    def add() -> None:
        def share(i: int) -> None:
            part = slice(borders[i], borders[i + 1])
            np.add(case.residual[part], case.update[part], out=case.residual[part])

        spread(share, threads, threads)

    case.reset()
    message = case.encode()
    turns: dict[str, Callable[[], object]] = {
        "add": add,
        "encode": case.encode,
        "encode_trusted": lambda: case.encode_trusted(work),
        "decode": lambda: case.decode([message]),
        "decode_many": lambda: case.decode([message] * MESSAGES),
    }
    seconds = take_turns(turns, case, rounds)
    # Encoding in NumPy is slow, so it gets only three rounds.
    seconds |= take_turns({"numpy": lambda: encode_in_numpy(case)}, case, min(rounds, 3)) if threads == 1 else {}
    base = np.array(seconds["add"])
    figure = {
        "density": case.density,
        "threads": threads,
        "elements": case.n,
        "entries": int((np.abs(case.start + case.update) >= 1).sum()),
        "message_bytes": len(message),
        "seconds": {name: float(np.median(times)) for name, times in seconds.items()},
        "add_bytes_per_second": BYTES * case.n / float(np.median(base)),
        "ratios": {
            name: [float(q) for q in np.quantile(base / np.array(times), [0.25, 0.5, 0.75])]
            for name, times in seconds.items()
            if name.startswith("encode")
        },
        "decode_many_per_encode": float(np.median(np.array(seconds["decode_many"]) / np.array(seconds["encode"]))),
        "extra_memory_bytes": extra_memory(case),
    }
    if "numpy" in seconds:
        figure["ratios"]["numpy"] = [float(np.median(base) / np.median(seconds["numpy"]))] * 3
    return figure


def take_turns(turns: dict[str, Callable[[], object]], case: Case, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each turn, round by round, without the first round."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for r in range(rounds + 1):
        for name, turn in turns.items():
            case.reset()
            begin = time.perf_counter()
            turn()
            if r:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def encode_in_numpy(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Encode with NumPy only: positions from flatnonzero, 32 bits each."""
    r = case.residual
    r += case.update
    index = np.flatnonzero(np.abs(r) >= 1)
    signs = np.sign(r[index])
    r[index] -= signs
    return index.astype(np.int32), signs.astype(np.int8)


# PR_SET_THP_DISABLE of prctl(2).
_THP_DISABLE = 41


def extra_memory(case: Case) -> int | None:
    """Return the peak bytes of memory that encoding uses besides its arguments: scratch, buffers and the message.

    It is the growth of this process's resident memory, the minimum of three turns. Huge pages are turned off, since
    each adds 2 MB when a byte of it is touched. The result is None if the system does not report resident memory.
    """
    peaks, library = [], ctypes.CDLL(None)
    try:
        library.prctl(_THP_DISABLE, 1, 0, 0, 0)
        for _ in range(3):
            case.reset()
            # Free memory that the allocator kept from earlier turns, which would hide the need of this one.
            case.state.scratch.clear()
            library.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = harness.memory("VmHWM")
            message = case.encode()
            peaks.append(harness.memory("VmHWM") - before)
            del message
    except (OSError, AttributeError):
        return None
    finally:
        if hasattr(library, "prctl"):
            library.prctl(_THP_DISABLE, 0, 0, 0, 0)
    return min(peaks)


def shortfalls(figure: dict) -> list[str]:
    """Describe the goals that a figure misses."""
    p, t = figure["density"], figure["threads"]
    missed = []
    for most, goal in GOALS.items():
        reached = figure["ratios"]["encode"][1]
        if p <= most and (most == min(GOALS) or p > min(GOALS)) and reached < goal:
            missed.append(f"encode at density {p:.4g} on {t} thread(s): {reached:.2f} of np.add, not {goal:.2f}")
    extra = figure["extra_memory_bytes"]
    if extra is not None and extra > figure["message_bytes"] + MEMORY * 4 * figure["elements"]:
        missed.append(f"memory at density {p:.4g} on {t} thread(s): {extra} bytes, not the message and {MEMORY:.0%}")
    if p == MESSAGES_AT and figure["decode_many_per_encode"] > 1:
        missed.append(f"decoding {MESSAGES} on {t} thread(s): {figure['decode_many_per_encode']:.2f} encodes, not 1")
    return missed


def as_text(document: dict) -> str:
    """Return the figures as a table."""
    n = document["elements"]
    rows = []
    for f in document["figures"]:
        seconds, ratios = f["seconds"], f["ratios"]
        encode = ratios["encode"]
        entry = f["entries"] or 1
        rows.append(
            [
                f"{f['density']:.4g}",
                str(f["threads"]),
                f"{f['add_bytes_per_second'] / 1e9:.1f}",
                f"{BYTES * n / seconds['encode'] / 1e9:.1f}",
                f"{encode[1]:.2f} ({encode[0]:.2f}-{encode[2]:.2f})",
                f"{ratios['encode_trusted'][1]:.2f}",
                f"{ratios['numpy'][1]:.3f}" if "numpy" in ratios else "",
                f"{f['message_bytes'] / seconds['decode'] / 1e9:.2f}",
                f"{1e9 * seconds['decode'] / entry:.1f}",
                f"{f['decode_many_per_encode']:.2f}",
                memory(f, n),
            ]
        )
    header = ["density", "threads", "np.add", "encode", "of np.add (quartiles)", "without the check", "NumPy's way"]
    header += ["decode", "ns an entry", f"{MESSAGES} decoded / encode", "memory beside message"]
    lines = [
        f"{document['machine']}; {n:,} float32; medians of {document['rounds']} rounds.",
        "encode and decode are the functions that a training step calls, with update check and checksums.",
        f"np.add and encode in GB/s of {BYTES} bytes per element, decode in GB/s of message,",
        "memory as a share of the update.",
        "",
        render(rows, header),
        "",
        "goals: encode at least 0.90 of np.add at density <= 0.001 and 0.60 at 0.01; "
        f"{MESSAGES} messages of density 0.001 decoded in no more than one encode;",
        "memory at most the message and 1 % of the update:",
        *([f"  missed: {text}" for text in document["goals_missed"]] or ["  met"]),
    ]
    return "\n".join(lines)


def memory(figure: dict, n: int) -> str:
    """Return the memory in addition to the message, in percent of the update's size."""
    if figure["extra_memory_bytes"] is None:
        return "-"
    return f"{100 * max(figure['extra_memory_bytes'] - figure['message_bytes'], 0) / (4 * n):.2f} %"


def _processor() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
