"""Position of this rank (training step, collective, line of the program), and the diagnosis of a stall.

Code that trains records its position here, at the cost of two assignments; code that waits does so in
`hvdx.comm.waiting`. The thread of `hvdx.comm.watchdog` reads both.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import numpy as np

from hvdx.comm import waiting

# Maximum number of stack lines in a report, and of characters in each of its texts: a report is one small message.
_MAX_LINES, _MAX_TEXT = 2, 100
# Maximum number of ranks that a message lists.
_MAX_ROWS = 16
# A rank counts as moving if its idle time is at most this part of the longest.
_MOVING = 0.5
# Frames in these packages do not belong to the user's program.
_LIBRARIES = ("hvdx", "keras", "tensorflow")
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

_place: tuple[str, tuple[int, ...]] = ("", ())
_moved = time.monotonic()
_serves = False
# Name of the object that is being compiled, by thread.
_compiles: dict[int, str] = {}
_first = False
# Functions in which TensorFlow traces a graph and runs it, and a time limit. The first run optimises the graph and
# compiles with XLA. On Python's stack it looks like a wait, so it counts as compiling until the time limit.
_TRACES, _RUNS, _FIRST_RUN_SECONDS = "func_graph_from_py_func", "quick_execute", 600.0


def step(place: str, order: tuple[int, ...] = ()) -> None:
    """Record the position of the training.

    Args:
        place: readable position, such as "step 120 of epoch 3"; "" outside a training.
        order: numbers that grow from position to position, the same on all ranks; () if there are none.

    Example:
        >>> step("step 120 of epoch 3", (2, 119))
        >>> here().place
        'step 120 of epoch 3'
        >>> step("")
    """
    global _place, _moved
    _place, _moved = (place, order), time.monotonic()


def signs(name: str) -> np.ndarray:
    """Return signs, float32[8] of 1 and -1, that differ for 255 of 256 pairs of positions or names.

    If ranks are at one position, the absolute values of the sums over N ranks are N; else some are smaller.

    Args:
        name: name of the collective.

    Example:
        >>> step("step 1 of epoch 1", (0, 0))
        >>> signs("adam")
        array([ 1.,  1., -1.,  1., -1.,  1., -1., -1.], dtype=float32)
    """
    bits = zlib.crc32(f"{name} {_place[1]}".encode()) >> np.arange(8) & 1
    return np.where(bits, np.float32(1), np.float32(-1))


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Record that this thread compiles, which is no stall.

    Args:
        what: readable name, such as "the kernels of Threshold".
    """
    global _moved
    _compiles[threading.get_ident()] = what
    _moved = time.monotonic()
    try:
        yield
    finally:
        _compiles.pop(threading.get_ident(), None)
        _moved = time.monotonic()


def first_step(first: bool) -> None:
    """Record whether a fit is in its first step, in which TensorFlow traces and compiles."""
    global _first
    _first = first


def serve(serves: bool) -> None:
    """Record whether this rank is a server rank, for which no collective of the workers waits."""
    global _serves
    _serves = serves


def training() -> bool:
    """Return whether a `fit` under `Distribute` has taken a step and has not ended."""
    return bool(_place[0])


def waits_for_all() -> bool:
    """Return whether a thread of this rank waits in a collective that needs every rank."""
    return any(for_all for _, for_all in waiting.present())


def may_stand() -> bool:
    """Return whether this rank waits for other ranks or compiles, so that it need not make progress."""
    return bool(waiting.present()) or bool(_compiled())


def last() -> float:
    """Return the time of the last record, here or of a wait, in seconds of `time.monotonic`."""
    return max(_moved, waiting.changed())


def idle() -> float:
    """Return the seconds since the last record."""
    return time.monotonic() - last()


def busy() -> bool:
    """Return whether this rank trains or waits for other ranks; otherwise a lack of progress is no stall."""
    if waiting.present():
        return True
    # The step stays set after an exception that the script caught. The rank trains only if Keras is on the stack.
    return bool(_place[0]) and any(_package(f) == "keras" for f in _frames(_main_frame()))


@dataclass(frozen=True)
class Report:
    """Position of a rank.

    Attributes:
        host: name of the host.
        place: training step, or "".
        order: see `step`.
        collective: name of the collective in which the rank waits, or "".
        idle: seconds since the last record.
        lines: stack lines of the program, innermost first, such as "train.py:42 in load".
        serves: True if the rank is a server.
        busy: True if the rank trains or waits.
        compiling: name of the object that is being compiled, or "".
    """

    host: str
    place: str = ""
    order: tuple[int, ...] = ()
    collective: str = ""
    idle: float = 0.0
    lines: tuple[str, ...] = ()
    serves: bool = False
    busy: bool = True
    compiling: str = ""

    def as_json(self) -> dict[str, object]:
        """Return the attributes as a dict for JSON."""
        return asdict(self)

    @staticmethod
    def of_json(values: Mapping[str, object]) -> "Report":
        """Restore a report from the result of `as_json`, in which JSON has turned tuples into lists."""
        read: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return Report(**read)

    def describe(self) -> str:
        """Describe the position in words."""
        if self.serves:
            return "serves the others"
        parts = [f"waits in {self.collective}"] if self.collective else []
        parts += [f"compiles {self.compiling}"] if self.compiling else []
        parts.append(self.place or ("" if parts else "in no training step"))
        text = ", ".join(filter(None, parts)) + f", for {self.idle:.0f} s"
        return text + (f"; at {' < '.join(self.lines)}" if self.lines else "")


def here() -> Report:
    """Return the position of this rank. May be called from any thread."""
    place, order = _place
    collective, _ = next(iter(waiting.present()), ("", False))
    compiles = "" if collective else _compiled()
    return Report(
        socket.gethostname(), place[:_MAX_TEXT], order, collective[:_MAX_TEXT], idle(), _lines(), _serves, busy(),
        compiles[:_MAX_TEXT],
    )  # fmt: skip


def _compiled() -> str:
    """Return the name of the object that this process compiles, or ""."""
    for what in list(_compiles.values()):
        return what
    frames = _frames(_main_frame())
    if any(f.f_code.co_name == _TRACES and _package(f) == "tensorflow" for f in frames):
        return "the training step" if _place[0] else "a function of TensorFlow's"
    running = _first and frames and frames[0].f_code.co_name == _RUNS and idle() < _FIRST_RUN_SECONDS
    return "the training step" if running and not _user_frames() else ""


def diagnose(reports: Mapping[int, Report | None], gone: Sequence[int] = ()) -> tuple[list[int], str]:
    """Find the ranks for which the others wait.

    Args:
        reports: report of each rank; None if the rank does not answer.
        gone: ranks that have left the world.

    Returns:
        The ranks, and the reason. If there are ranks, the reason continues a sentence that begins "rank 1 has"; if
        there are none, it is a complete clause.

    Example:
        >>> diagnose({0: Report("a", collective="the updates"), 1: Report("b", place="step 3 of epoch 1")})
        ([1], 'not reached the updates')
    """
    silent = [r for r, report in reports.items() if report is None and r not in gone]
    there = {r: report for r, report in reports.items() if report is not None and r not in gone}
    waits = {r: report.collective for r, report in there.items() if report.collective}
    if waits:
        names = Counter(waits.values())
        (most, count), *others = names.most_common()
        absent = [r for r, report in there.items() if not report.collective and not report.serves]
        missing = sorted({*silent, *gone, *absent})
        if missing:
            return missing, f"not reached {most}"
        if not others:
            who = "workers" if len(there) > count else "ranks"
            return [], f"all {who} wait in {most}, and none is missing"
        if others[0][1] < count:
            elsewhere = sorted(r for r, name in waits.items() if name != most)
            return elsewhere, f"joined another collective in place of {most}"
        return [], "the ranks are in different collectives"
    if silent:
        return silent, "not answered"
    still = {r: report for r, report in there.items() if report.place}
    longest = max((report.idle for report in still.values()), default=0.0)
    stuck = [r for r, report in still.items() if not report.compiling]
    if 0 < len(stuck) < len(still):
        return stuck, "fallen behind the others"
    stuck = [r for r, report in still.items() if report.idle > _MOVING * longest]
    if len(stuck) < len(still):
        return stuck, "stood still, while others continue"
    if len({report.place for report in still.values()}) > 1 and all(report.order for report in still.values()):
        last = min(report.order for report in still.values())
        behind = [r for r, report in still.items() if report.order == last]
        return behind, "fallen behind the others"
    places = sorted({report.place for report in still.values()})
    return [], f"all ranks are at {places[0]}" if len(places) == 1 else "no rank waits for another"


def message(
    reports: Mapping[int, Report | None], gone: Sequence[int], seconds: float, hosts: Sequence[str] = ()
) -> str:
    """Return the warning about a stall: a headline with the diagnosis, and a line for each rank.

    Args:
        reports, gone: see `diagnose`.
        seconds: duration of the stall.
        hosts: host names by rank, for ranks that do not answer.
    """

    def name(rank: int) -> str:
        report = reports[rank]
        host = report.host if report is not None else "".join(hosts[rank : rank + 1])
        return f"{rank} ({host})" if host else str(rank)

    def names(ranks: Sequence[int]) -> str:
        named = ", ".join(map(name, ranks[:_MAX_ROWS]))
        named += f" and {len(ranks) - _MAX_ROWS} more" * (len(ranks) > _MAX_ROWS)
        return f"rank{'s' * (len(ranks) > 1)} {named} {'have' if len(ranks) > 1 else 'has'}"

    missing, why = diagnose(reports, gone)
    compiling = _awaited_compilers(reports, gone, missing)
    if compiling:
        what = Counter(report.compiling for r in compiling if (report := reports[r])).most_common(1)[0][0]
        return f"{names(compiling)} been compiling {what} for {seconds:.0f} s, which takes long only once."
    headline = f"no progress for {seconds:.0f} s: "
    if missing:
        headline += f"{names(missing)} {why}."
    else:
        headline += f"{why}."
    # If there are too many ranks for a list, the missing ones come first.
    rows = sorted(sorted(reports, key=lambda r: (r not in missing, r))[:_MAX_ROWS])
    lines = [headline, *(f"  rank {name(r)}: {_row(reports[r], r in gone)}" for r in rows)]
    if len(reports) > len(rows):
        rest = ", none of which is missing" * (len(missing) <= len(rows))
        lines.append(f"  and {len(reports) - len(rows)} more ranks{rest}")
    return "\n".join(lines)


def _awaited_compilers(reports: Mapping[int, Report | None], gone: Sequence[int], missing: Sequence[int]) -> list[int]:
    """Return the ranks that compile, if the others wait for no other ranks; [] if there is a stall."""
    if gone or any(report is None for report in reports.values()):
        return []
    there = {r: report for r, report in reports.items() if report is not None}
    compiling = [r for r, report in there.items() if report.compiling]
    awaited = missing or [r for r, report in there.items() if not report.collective and not report.serves]
    return compiling if set(awaited) <= set(compiling) else []


def _row(report: Report | None, gone: bool) -> str:
    if gone:
        return "has left: its program has ended, or is ending"
    if report is None:
        return "does not answer: its process is stopped or gone, or a library blocks Python"
    return report.describe()


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and its callers, innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _lines() -> tuple[str, ...]:
    """Return the innermost lines of the user's program in the main thread, and one line of another thread.

    A generator that feeds a dataset runs in a thread of TensorFlow, so the main thread does not show it.
    """
    mine = [f for f in _frames(_main_frame()) if not _is_library(f)]
    return tuple([_line(f) for f in mine[:_MAX_LINES]] + [f"{_line(f)} (in a thread)" for f in _user_frames()[:1]])


def _user_frames() -> list[FrameType]:
    """Return the innermost frame of user code in each thread, except the main thread and this one."""
    skipped = threading.main_thread().ident, threading.get_ident()
    found = []
    for ident, frame in sys._current_frames().items():
        theirs = [f for f in _frames(frame) if not _is_library(f) and not _is_standard(f)]
        found += theirs[:1] if ident not in skipped else []
    return found


def _line(frame: FrameType) -> str:
    name = os.path.basename(frame.f_code.co_filename)
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"[:_MAX_TEXT]


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_library(frame: FrameType) -> bool:
    return _package(frame) in _LIBRARIES or frame.f_code.co_filename.startswith("<frozen")


def _is_standard(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(_STANDARD) or f"{os.sep}site-packages{os.sep}" in path
