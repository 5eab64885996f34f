"""Speed of the threshold kernels on this machine's cores, compared with their minimal memory traffic.

    hvdx bench kernels

Encoding reads a residual and an update, and writes the residual: 12 bytes per element, like np.add(r, g, out=r). This
np.add is the baseline, measured in turns with hvdx on the same number of threads. The figures are those of the calls of
a training step: the exchange's `prepare`, which encodes, and `deliver`, which sets the result to the sum of the
messages of several workers. Sums reach tau at random places. Before each turn the residual is reset, so that all turns
have equal inputs.
"""

import argparse
import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from hvdx import codec as codecs
from hvdx.comm import Channel, Received
from hvdx.comm.local import LocalComm
from hvdx.errors import ConfigError
from hvdx.jobs.benchmarks import harness
from hvdx.kernels.cpu import cut, default_threads, spread
from hvdx.kernels.pieces import aligned
from hvdx.strategies import StepInput, TensorSpec, Threshold
from hvdx.strategies.host_exchange import Outgoing
from hvdx.strategies.step import MessageExchange
from hvdx.strategies.threshold.encoder import ThresholdEncoder

T = TypeVar("T")

DENSITIES = (1e-4, 1e-3, 1e-2, 1 / 16, 0.1)
#: Goals for the speed of encoding relative to np.add, by the largest density of each goal.
GOALS = {1e-3: 0.75, 1e-2: 0.55}
#: Number of workers whose messages `deliver` decodes.
MESSAGES = 4
#: Goal for encoding and decoding together, as a multiple of np.add's time, at this density.
STEP, STEP_AT = 2.2, 1e-2
#: Lookahead for a momentum of 0.9.
LOOKAHEAD = 3.0
#: Goal: encoding this number of small arrays takes at most this multiple of the time of one array.
ARRAYS, ARRAYS_COST = 5000, 1.3
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


class Copies(LocalComm):
    """Communicator of one rank that receives its own message several times, as if from several workers."""

    size = MESSAGES

    def all_gather_object(self, value: T, what: str) -> list[T]:
        return [value] * MESSAGES

    def channel(self, what: str) -> Channel:
        channel = super().channel(what)
        alone = channel.exchange

        def exchange(header: Sequence[int], message: np.ndarray | None = None) -> Received:
            got = alone(header, message)
            return Received(np.repeat(got.headers, MESSAGES, 0), got.messages * MESSAGES, got.waited, got.seconds)

        channel.exchange = exchange  # type: ignore[method-assign]
        return channel


class Case:
    """Update of which a given share reaches tau."""

    def __init__(self, n: int, p: float) -> None:
        rng = np.random.default_rng(0)
        self.n, self.density = n, p
        self.start, self.update = aligned(n), aligned(n)
        self.start[:] = rng.uniform(-0.4, 0.4, n)
        self.update[:] = rng.normal(0, 1e-3, n)
        hit = rng.random(n) < p
        self.update[hit] = rng.choice(np.array([-1.5, 1.5], np.float32), int(hit.sum()))
        # A step adds 1 + lookahead times the update, so these have the same entries.
        self.smaller = self.update / np.float32(1 + LOOKAHEAD)
        self.arrays = [a.copy() for a in np.array_split(self.smaller, min(ARRAYS, n))]


class Step:
    """Exchange of a training step, with the arrays that it exchanges."""

    def __init__(self, case: Case, arrays: list[np.ndarray], threads: int, lookahead: float) -> None:
        specs = [TensorSpec(f"v{i}", a.shape, 4) for i, a in enumerate(arrays)]
        self.case, self.arrays = case, arrays
        self.exchange = cast(
            "MessageExchange", Threshold(tau=1.0, threads=threads, lookahead=lookahead).open(Copies(), specs)
        )
        self.reset()
        self.sent = self.encode()

    @property
    def residual(self) -> np.ndarray:
        """Return the residual, float32[n]."""
        return np.asarray(cast("ThresholdEncoder", self.exchange.encoder).state.residual)

    def reset(self) -> None:
        """Reset the residual to its initial values."""
        self.residual[:] = self.case.start

    def encode(self) -> Outgoing:
        """Encode the arrays."""
        return self.exchange.prepare(StepInput(self.arrays))

    def decode(self) -> Sequence[object]:
        """Decode the message of the first call of `encode`, once for each worker."""
        return self.exchange.deliver(self.sent)


def measure(case: Case, threads: int, rounds: int) -> harness.Row:
    """Time all calls in turns, at one density and number of threads."""
    plain = Step(case, [case.update], threads, 0.0)
    ahead = Step(case, [case.smaller], threads, LOOKAHEAD)
    small = Step(case, case.arrays, threads, LOOKAHEAD)
    residual, borders = plain.residual, cut(case.n, threads, 64)

    def add() -> None:
        def share(i: int) -> None:
            part = slice(borders[i], borders[i + 1])
            np.add(residual[part], case.update[part], out=residual[part])

        spread(share, threads, threads)

    steps = [plain, ahead, small]
    turns: dict[str, Callable[[], object]] = {
        "add": add,
        "encode": plain.encode,
        "encode_ahead": ahead.encode,
        "encode_arrays": small.encode,
        "decode": ahead.decode,
    }
    seconds = take_turns(turns, steps, rounds)
    # Encoding in NumPy is slow, so it gets only three rounds.
    if threads == 1:
        seconds |= take_turns({"numpy": lambda: encode_in_numpy(residual, case.update)}, steps, min(rounds, 3))
    times = {name: np.array(each) for name, each in seconds.items()}
    figure: harness.Row = {
        "density": case.density,
        "threads": threads,
        "elements": case.n,
        "entries": int((np.abs(case.start + case.update) >= 1).sum()),
        "message_bytes": plain.sent.encoded.message.size if plain.sent.encoded else 0,
        "seconds": {name: float(np.median(each)) for name, each in times.items()},
        "add_bytes_per_second": BYTES * case.n / float(np.median(times["add"])),
        "ratios": {
            name: [float(q) for q in np.quantile(times["add"] / times[name], [0.25, 0.5, 0.75])]
            for name in ("encode", "encode_ahead", "encode_arrays")
        },
        "step_per_add": float(np.median((times["encode_ahead"] + times["decode"]) / times["add"])),
        "arrays_per_one": float(np.median(times["encode_arrays"] / times["encode_ahead"])),
        "extra_memory_bytes": extra_memory(case, threads),
    }
    if threads == 1:
        figure["ratios"]["numpy"] = [float(np.median(times["add"]) / np.median(times["numpy"]))] * 3
    return figure


def take_turns(turns: dict[str, Callable[[], object]], steps: list[Step], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each turn, round by round, without the first round."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for r in range(rounds + 1):
        for name, turn in turns.items():
            for step in steps:
                step.reset()
            begin = time.perf_counter()
            turn()
            if r:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def encode_in_numpy(r: np.ndarray, update: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode with NumPy only: positions from flatnonzero, 32 bits each."""
    r += update
    index = np.flatnonzero(np.abs(r) >= 1)
    signs = np.sign(r[index])
    r[index] -= signs
    return index.astype(np.int32), signs.astype(np.int8)


# PR_SET_THP_DISABLE of prctl(2).
_THP_DISABLE = 41


def extra_memory(case: Case, threads: int) -> int | None:
    """Return the peak bytes of memory that encoding uses besides its arguments: scratch, buffers and the message.

    It is the growth of this process's resident memory, the minimum of three turns. Huge pages are turned off, since
    each adds 2 MB when a byte of it is touched. The result is None if the system does not report resident memory.
    """
    peaks, library = [], ctypes.CDLL(None)
    codec = codecs.Threshold(tau=1.0, threads=threads)
    state = codec.init([case.n])
    try:
        library.prctl(_THP_DISABLE, 1, 0, 0, 0)
        for _ in range(3):
            np.copyto(np.asarray(state.residual), case.start)
            # Free memory that the allocator kept from earlier turns, which would hide the need of this one.
            state.scratch.clear()
            library.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = harness.memory("VmHWM")
            message, state = codec.encode([case.update], state)
            peaks.append(harness.memory("VmHWM") - before)
            del message
    except (OSError, AttributeError):
        return None
    finally:
        if hasattr(library, "prctl"):
            library.prctl(_THP_DISABLE, 0, 0, 0, 0)
    return min(peaks)


def shortfalls(figure: harness.Row) -> list[str]:
    """Describe the goals that a figure misses."""
    p, t = figure["density"], figure["threads"]
    missed = []
    for most, goal in GOALS.items():
        if p <= most and (most == min(GOALS) or p > min(GOALS)):
            for name, what in (("encode", "lookahead 0"), ("encode_ahead", f"lookahead {LOOKAHEAD:.0f}")):
                reached = figure["ratios"][name][1]
                if reached < goal:
                    missed.append(f"encode at density {p:.4g}, {what}, {t} thread(s): {reached:.2f}, not {goal:.2f}")
            cost = figure["arrays_per_one"]
            if cost > ARRAYS_COST:
                missed.append(f"{ARRAYS} arrays at density {p:.4g}, {t} thread(s): {cost:.2f}, not {ARRAYS_COST}")
    if p == STEP_AT and figure["step_per_add"] > STEP:
        missed.append(f"encode and decode at density {p:.4g}, {t} thread(s): {figure['step_per_add']:.2f}, not {STEP}")
    extra = figure["extra_memory_bytes"]
    if extra is not None and extra > figure["message_bytes"] + MEMORY * 4 * figure["elements"]:
        missed.append(f"memory at density {p:.4g} on {t} thread(s): {extra} bytes, not the message and {MEMORY:.0%}")
    return missed


def as_text(document: harness.Row) -> str:
    """Return the figures as a table."""
    n = document["elements"]

    def speed(name: str, what: str) -> harness.Column:
        return what, lambda f: "{1:.2f} ({0:.2f}-{2:.2f})".format(*f["ratios"][name])

    columns = [
        harness.figure("density", "density", ".4g"),
        harness.figure("threads", "threads", "d"),
        harness.figure("np.add", "add_bytes_per_second", ".1f", 1e-9),
        speed("encode", "encode"),
        speed("encode_ahead", f"with lookahead {LOOKAHEAD:.0f}"),
        ("NumPy's way", lambda f: f"{f['ratios']['numpy'][1]:.3f}" if "numpy" in f["ratios"] else ""),
        harness.figure(f"{ARRAYS} arrays", "arrays_per_one", ".2f"),
        (f"decode {MESSAGES}", lambda f: f"{f['seconds']['decode'] / f['seconds']['add']:.2f}"),
        harness.figure("both", "step_per_add", ".2f"),
        ("ns an entry", lambda f: f"{1e9 * f['seconds']['decode'] / (MESSAGES * f['entries'] or 1):.1f}"),
        ("memory beside message", lambda f: memory(f, n)),
    ]
    lines = [
        f"{document['machine']}; {n:,} float32; medians of {document['rounds']} rounds.",
        "The calls of a training step, with update check and checksums. np.add: GB/s of 12 bytes per element.",
        "Speed of encoding relative to np.add, with quartiles. Time of encoding many arrays, relative to one.",
        "Time of decoding, and of both, relative to np.add. Memory as a share of the update.",
        "",
        harness.table(document["figures"], columns),
        "",
        "goals: encode at least 0.75 of np.add at density <= 0.001 and 0.55 at 0.01; there, "
        f"{ARRAYS} arrays at most {ARRAYS_COST} times one array;",
        f"both at most {STEP} times np.add at {STEP_AT}; memory at most the message and 1 % of the update:",
        *([f"  missed: {text}" for text in document["goals_missed"]] or ["  met"]),
    ]
    return "\n".join(lines)


def memory(figure: harness.Row, n: int) -> str:
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
