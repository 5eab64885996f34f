"""Where this rank is: its step, the collective it waits in, and the line of its program; and what that says of a stall.

Whoever trains or waits notes it here, in two assignments; `hvdx.comm.watchdog` reads it from a thread of its own.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

# Lines of a stack in a report, and characters of a text in it: a report has to fit into one small message.
_MOST_LINES, _MOST_TEXT = 2, 100
# Ranks that are listed one by one.
_MOST_ROWS = 16
# A rank that has stood still for so small a part of the longest time is moving.
_MOVING = 0.5
# Frames in these packages are not where somebody's program is.
_LIBRARIES = ("hvdx", "keras", "tensorflow")
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

_place: tuple[str, tuple[int, ...]] = ("", ())
# By thread, since several wait at once: the name of the collective, and whether it needs every rank.
_waits: dict[int, tuple[str, bool]] = {}
_moved = time.monotonic()
_serves = False
# By thread: the name of what it compiles.
_compiles: dict[int, str] = {}
_first = False
# TensorFlow traces a function in the first of these and runs it in the second: its first run optimises the graph, and
# XLA compiles then. Nothing in Python tells that from waiting, so it counts as compiling for so many seconds only.
_TRACES, _RUNS, _FIRST_RUN_SECONDS = "func_graph_from_py_func", "quick_execute", 600.0


def step(place: str, order: tuple[int, ...] = ()) -> None:
    """Note where the training is.

    Args:
        place: for people, such as "step 120 of epoch 3"; "" for nowhere in particular.
        order: numbers that grow from place to place, alike on all ranks; () where there are none.

    Example:
        >>> step("step 120 of epoch 3", (2, 119))
        >>> here().place
        'step 120 of epoch 3'
        >>> step("")
    """
    global _place, _moved
    _place, _moved = (place, order), time.monotonic()


def enter(what: str, for_all: bool = True) -> None:
    """Note that this thread begins to wait for other ranks.

    Args:
        what: the name of the collective.
        for_all: it cannot end without every rank.
    """
    global _moved
    _waits[threading.get_ident()] = what, for_all
    _moved = time.monotonic()


def leave() -> None:
    """Note that this thread waits no longer."""
    global _moved
    _waits.pop(threading.get_ident(), None)
    _moved = time.monotonic()


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Note that this thread compiles, which is no stall.

    Args:
        what: for people, such as "the kernels of Threshold".
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
    """Note whether the first step of a fit is being taken, in which TensorFlow traces and compiles."""
    global _first
    _first = first


def serve(serves: bool) -> None:
    """Note whether this rank only answers the others, and is waited for by nobody."""
    global _serves
    _serves = serves


def training() -> bool:
    """Whether a `fit` under `Distribute` has taken a step and has not ended."""
    return bool(_place[0])


def waits_for_all() -> bool:
    """Whether a thread of this rank waits in a collective, which needs every rank."""
    return any(for_all for _, for_all in list(_waits.values()))


def idle() -> float:
    """Seconds since anything was noted."""
    return time.monotonic() - _moved


def busy() -> bool:
    """Whether somebody waits for other ranks here, or trains: only then is standing still a stall."""
    if _waits:
        return True
    # An exception that a script caught leaves its step behind; what it then does is no training.
    return bool(_place[0]) and any(_package(f) == "keras" for f in _frames(_main_frame()))


@dataclass(frozen=True)
class Report:
    """Where a rank is.

    Attributes:
        host: its name.
        place: its step, or "".
        order: see `step`.
        collective: what it waits in, or "".
        idle: seconds since it last moved.
        lines: of its program, innermost first: "train.py:42 in load".
        serves: whether it only answers the others.
        busy: see `busy`.
        compiling: name of what it is compiling, or "".
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

    def as_json(self) -> dict[str, Any]:
        """Its attributes, for a message."""
        return asdict(self)

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> "Report":
        """What `as_json` gave, after its tuples have become lists."""
        read: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return Report(**read)

    def describe(self) -> str:
        """Where it is, in words."""
        if self.serves:
            return "serves the others"
        parts = [f"waits in {self.collective}"] if self.collective else []
        parts += [f"compiles {self.compiling}"] if self.compiling else []
        parts.append(self.place or ("" if parts else "in no training step"))
        text = ", ".join(filter(None, parts)) + f", for {self.idle:.0f} s"
        return text + (f"; at {' < '.join(self.lines)}" if self.lines else "")


def here() -> Report:
    """Where this rank is now; may be called from any thread."""
    place, order = _place
    collective, _ = next(iter(list(_waits.values())), ("", False))
    compiles = "" if collective else _compiled()
    return Report(
        socket.gethostname(), place[:_MOST_TEXT], order, collective[:_MOST_TEXT], idle(), _lines(), _serves, busy(),
        compiles[:_MOST_TEXT],
    )  # fmt: skip


def _compiled() -> str:
    """Name what this process is compiling, or return ""."""
    for what in list(_compiles.values()):
        return what
    frames = _frames(_main_frame())
    if any(f.f_code.co_name == _TRACES and _package(f) == "tensorflow" for f in frames):
        return "the training step" if _place[0] else "a function of TensorFlow's"
    running = _first and frames and frames[0].f_code.co_name == _RUNS and idle() < _FIRST_RUN_SECONDS
    return "the training step" if running and not _others() else ""


def diagnose(reports: Mapping[int, Report | None], gone: Sequence[int] = ()) -> tuple[list[int], str]:
    """Tell for which ranks the others wait.

    Args:
        reports: of the ranks that take part; None for one that does not answer.
        gone: those of them that have left the world.

    Returns:
        The ranks, and what there is to say of them: "has not come to the updates", say.

    Example:
        >>> diagnose({0: Report("a", collective="the updates"), 1: Report("b", place="step 3 of epoch 1")})
        ([1], 'not come to the updates')
    """
    silent = [r for r, report in reports.items() if report is None and r not in gone]
    there = {r: report for r, report in reports.items() if report is not None and r not in gone}
    waiting = {r: report.collective for r, report in there.items() if report.collective}
    if waiting:
        names = Counter(waiting.values())
        (most, count), *others = names.most_common()
        absent = [r for r, report in there.items() if not report.collective and not report.serves]
        missing = sorted({*silent, *gone, *absent})
        if missing:
            return missing, f"not come to {most}"
        if not others:
            who = "workers" if len(there) > count else "ranks"
            return [], f"all {who} wait in {most}, and nobody is missing"
        if others[0][1] < count:
            return sorted(r for r, name in waiting.items() if name != most), f"not come to {most}, but to another place"
        return [], "the ranks are in different collectives"
    if silent:
        return silent, "not answered"
    still = {r: report for r, report in there.items() if report.place}
    longest = max((report.idle for report in still.values()), default=0.0)
    stuck = [r for r, report in still.items() if not report.compiling]
    if 0 < len(stuck) < len(still):
        return stuck, "not come as far as the others"
    stuck = [r for r, report in still.items() if report.idle > _MOVING * longest]
    if len(stuck) < len(still):
        return stuck, "stood still, while others go on"
    if len({report.place for report in still.values()}) > 1 and all(report.order for report in still.values()):
        last = min(report.order for report in still.values())
        behind = [r for r, report in still.items() if report.order == last]
        return behind, "not come as far as the others"
    places = sorted({report.place for report in still.values()})
    return [], f"all ranks are at {places[0]}" if len(places) == 1 else "no rank waits for another"


def message(
    reports: Mapping[int, Report | None], gone: Sequence[int], seconds: float, hosts: Sequence[str] = ()
) -> str:
    """What to print about a stall: who is waited for, and a line for each rank.

    Args:
        reports, gone: see `diagnose`.
        seconds: nothing has moved for so long.
        hosts: by rank: a rank that does not answer does not say where it runs.
    """

    def name(rank: int) -> str:
        report = reports[rank]
        host = report.host if report is not None else "".join(hosts[rank : rank + 1])
        return f"{rank} ({host})" if host else str(rank)

    def names(ranks: Sequence[int]) -> str:
        named = ", ".join(map(name, ranks[:_MOST_ROWS]))
        named += f" and {len(ranks) - _MOST_ROWS} more" * (len(ranks) > _MOST_ROWS)
        return f"rank{'s' * (len(ranks) > 1)} {named} {'have' if len(ranks) > 1 else 'has'}"

    missing, why = diagnose(reports, gone)
    compiling = _awaited_compilers(reports, gone, missing)
    if compiling:
        what = Counter(report.compiling for r in compiling if (report := reports[r])).most_common(1)[0][0]
        return f"hvdx: {names(compiling)} been compiling {what} for {seconds:.0f} s, which takes long only once."
    headline = f"hvdx: no progress for {seconds:.0f} s: "
    if missing:
        headline += f"{names(missing)} {why}."
    else:
        headline += f"{why}."
    # Those that are waited for come first where there are too many.
    rows = sorted(sorted(reports, key=lambda r: (r not in missing, r))[:_MOST_ROWS])
    lines = [headline, *(f"  rank {name(r)}: {_row(reports[r], r in gone)}" for r in rows)]
    if len(reports) > len(rows):
        rest = ", for which nobody waits" * (len(missing) <= len(rows))
        lines.append(f"  and {len(reports) - len(rows)} more ranks{rest}")
    return "\n".join(lines)


def _awaited_compilers(reports: Mapping[int, Report | None], gone: Sequence[int], missing: Sequence[int]) -> list[int]:
    """The ranks that compile, where all that the others wait for is that; none where there is a stall."""
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
        return "does not answer: its process is stopped or gone, or a library holds Python up"
    return report.describe()


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _lines() -> tuple[str, ...]:
    """The innermost lines of the main thread outside of TensorFlow, Keras and hvdx, and one of somebody else's thread.

    A generator that feeds a dataset runs in a thread of TensorFlow's, so the main thread alone does not show it.
    """
    mine = [f for f in _frames(_main_frame()) if not _is_library(f)]
    return tuple([_line(f) for f in mine[:_MOST_LINES]] + [f"{_line(f)} (in a thread)" for f in _others()[:1]])


def _others() -> list[FrameType]:
    """The innermost frame that is the user's, of each thread but the main one and this one."""
    skipped = threading.main_thread().ident, threading.get_ident()
    found = []
    for ident, frame in sys._current_frames().items():
        theirs = [f for f in _frames(frame) if not _is_library(f) and not _is_standard(f)]
        found += theirs[:1] if ident not in skipped else []
    return found


def _line(frame: FrameType) -> str:
    name = os.path.basename(frame.f_code.co_filename)
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"[:_MOST_TEXT]


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_library(frame: FrameType) -> bool:
    return _package(frame) in _LIBRARIES or frame.f_code.co_filename.startswith("<frozen")


def _is_standard(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(_STANDARD) or f"{os.sep}site-packages{os.sep}" in path
