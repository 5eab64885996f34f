"""How fast the threshold kernels are on this machine's cores, beside the traffic that they cannot avoid.

    hvdx bench kernels

Encoding reads a residual and an update and writes the residual: 12 bytes an element, as np.add(r, g, out=r) does. That
is the baseline, measured in turns with the codec, on as many threads. What is held against the goals is what a training
step calls: the codec's `encode`, which reads the update once more to check it, and its `decode`, checksums included.
Sums reach tau at random places, and the residual is set back before each turn, so that each meets the same.
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
#: Ratios to np.add that encoding is to reach, by the largest density each is about.
GOALS = {1e-3: 0.90, 1e-2: 0.60}
#: This many messages of this density are to take no longer to decode than one takes to encode.
MESSAGES, MESSAGES_AT = 16, 1e-3
BYTES = 12
#: Memory beside the message, as a share of the update's.
MEMORY = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--elements", type=int, default=1 << 24, metavar="N", help="float32 elements of an update")
    parser.add_argument("--densities", type=float, nargs="+", default=list(DENSITIES), metavar="P", help="share sent")
    parser.add_argument("--threads", type=int, nargs="+", metavar="T", help="numbers of threads; 1 and all by default")
    parser.add_argument("--rounds", type=int, default=15, help="turns that each kernel takes")


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table or JSON: 0, or 1 where a goal is missed."""
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
    """An update of which a share reaches tau, and the codec and state that it meets."""

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
        """Make the codec and its state anew, for this number of threads."""
        self.codec = Threshold(tau=1.0, threads=threads)
        self.state = self.codec.init([self.n])
        self.residual = self.state.residual

    def encode(self) -> np.ndarray:
        """Encode as a training step does: the message."""
        message, self.state = self.codec.encode([self.update], self.state)
        return message

    def decode(self, messages: list[np.ndarray]) -> None:
        """Decode as a training step does: add the mean of the messages to `out`."""
        self.codec.decode(messages, [self.out], 1 / len(messages))

    def encode_trusted(self, work: cpu.Workspace) -> None:
        """Encode as nothing in a training does: without the check."""
        cpu.encode([self.update], self.residual, self.runs, trusted=True, threads=work.threads, workspace=work)

    def reset(self) -> None:
        """Put the residual back to what it was."""
        self.residual[:] = self.start


def measure(case: Case, threads: int, rounds: int) -> dict:
    """Time all kernels at one density and number of threads, in turns."""
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
    # NumPy's way is slow enough to be timed a few times only.
    seconds |= take_turns({"numpy": lambda: numpy_way(case)}, case, min(rounds, 3)) if threads == 1 else {}
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
    """Seconds of each turn, round by round; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for r in range(rounds + 1):
        for name, turn in turns.items():
            case.reset()
            begin = time.perf_counter()
            turn()
            if r:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def numpy_way(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Encoding as it is done without kernels: positions by flatnonzero, 32 bits each."""
    r = case.residual
    r += case.update
    index = np.flatnonzero(np.abs(r) >= 1)
    signs = np.sign(r[index])
    r[index] -= signs
    return index.astype(np.int32), signs.astype(np.int8)


# PR_SET_THP_DISABLE of prctl(2).
_THP_DISABLE = 41


def extra_memory(case: Case) -> int | None:
    """Bytes of memory that encoding touches at its peak beside its arguments: scratch, buffers and the message.

    The kernel's own count of this process's resident memory, the least of three turns, without huge pages, of which it
    gives 2 MB to whoever touches a byte; None where there is no such count.
    """
    peaks, library = [], ctypes.CDLL(None)
    try:
        library.prctl(_THP_DISABLE, 1, 0, 0, 0)
        for _ in range(3):
            case.reset()
            # What the allocator kept of earlier turns would hide what this one needs.
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
    """The goals that a figure misses, in words."""
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
    """The figures as a table."""
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
        "encode and decode are what a training step calls, with the check of the update and the checksums.",
        f"np.add and encode in GB/s of {BYTES} bytes an element, decode in GB/s of message,",
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
    """Memory beside the message, as a share of the update's."""
    if figure["extra_memory_bytes"] is None:
        return "-"
    return f"{100 * max(figure['extra_memory_bytes'] - figure['message_bytes'], 0) / (4 * n):.2f} %"


def _processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
