"""Threads that notice ranks without progress: the watchdog asks and warns, the heartbeat ends a rank that hangs.

If a rank makes no progress, its watchdog asks all ranks for their position and prints the answers. It sends only small
point-to-point messages and never blocks inside MPI. A stopped rank therefore cannot block it, and it cannot keep its
own process from ending.

If ranks go on without one that dies, a rank has a heartbeat in place of a watchdog. It ends a process whose main thread
makes no progress while the others wait, so that they go on as after any death. If the process is stopped, or a library
blocks Python, the thread cannot run: then it sends no more beats to the process that started the rank
(`cli/common/rank.py`), which ends it. Both count beats, not seconds: all processes of a job may be suspended for long.
"""

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from hvdx.comm import progress
from hvdx.comm.progress import Report
from hvdx.comm.waiting import LIMIT_VARIABLE, until, wait_for_all
from hvdx.errors import ConfigError
from hvdx.log import ERROR, WARNING, Log

_log = Log(__name__)

if TYPE_CHECKING:
    from mpi4py import MPI

#: Seconds without progress after which a rank prints the position of all ranks; 0 for never.
STALL_VARIABLE = "HVDX_STALL_WARNING"
_STALL_SECONDS = 60.0
# Seconds between two checks: maximum, minimum, and the value while answers are awaited.
_TICK, _MIN_TICK, _BUSY_TICK = 1.0, 0.1, 0.05
# Number of unsuccessful probes that end a check. A probe may only make MPI fetch a message, which a later probe finds;
# MPI over sockets needs the most probes.
_PROBES = 10
# Time limit for answers; the other ranks check for questions once per tick.
_ANSWER_SECONDS = 3.0
# Delay of a question per rank, and its maximum: low ranks ask first, and the ranks they asked stay quiet. So not all
# ranks ask all others.
_TURN, _LAST_TURN = 0.1, 10.0
# Number of low ranks that are notified of an end with status 0: one of them will ask about a stall.
_NOTIFIED = 8
# Seconds after which a rank that waits in a collective for an ended rank ends the job; further delay per rank, and its
# maximum: low ranks act first.
_DOOMED_SECONDS, _DOOMED_TURN, _LAST_DOOMED = 5.0, 1.5, 6.0
_ASK, _ANSWER, _LEAVE = 1, 2, 3
_HOST_BYTES = 64

#: Environment variable: path of a pipe, to which a rank writes a line with each beat: its process, and the limit.
HEARTBEAT_VARIABLE = "HVDX_HEARTBEAT"
# Seconds between two beats: maximum, and share of the limit.
_BEAT, _SHARE = 1.0, 0.05


def stall_limit() -> float:
    """Return the seconds without progress after which a rank warns of a stall; 0 for never.

    Raises:
        ConfigError: if `HVDX_STALL_WARNING` is not a finite number, or below 0.

    Example:
        >>> stall_limit()
        60.0
    """
    text = os.environ.get(STALL_VARIABLE, "")
    try:
        limit = float(text or _STALL_SECONDS)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ConfigError(f"{STALL_VARIABLE}: expected seconds, or 0 for no warning, got {text!r}.")
    return limit


class _Said(TypedDict, total=False):
    """Content of a message between watchdogs: of an end (status, how), a question (question, stall), or an answer."""

    status: int
    how: str
    question: int
    stall: bool
    report: dict[str, object]


class Watchdog:
    """Watchdog of this rank's progress; it also answers the watchdogs of other ranks. Creating one is collective.

    Args:
        world: `MPI.Comm` of all processes; it is duplicated.
        limit: seconds without progress, above 0; the same on all ranks.

    Raises:
        ExchangeError: if ranks do not join within the time limit.
    """

    def __init__(self, world: "MPI.Comm", limit: float):
        from mpi4py import MPI

        self._mpi, self._limit = MPI, limit
        # The duplicate is never freed: a late message would be taken for one of the next communicator.
        self._comm, request = world.Idup()
        wait_for_all(request.Test, "joining the world")
        self._rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        hosts = np.zeros(self._size, f"S{_HOST_BYTES}")
        name = np.array([socket.gethostname().encode()], hosts.dtype)
        wait_for_all(self._comm.Iallgather(name.view(np.uint8), hosts.view(np.uint8)).Test, "joining the world")
        self._hosts = [host.decode(errors="replace") for host in hosts]
        self._tick = min(max(limit / 10, _MIN_TICK), _TICK)
        self._due = limit
        self._seen_idle = 0.0
        self._sends: list[tuple[MPI.Request, bytes]] = []
        # Ranks that have left: exit status, and the call that ended them.
        self._gone: dict[int, tuple[int, str]] = {}
        self._own_end: tuple[int, str] | None = None
        # Number of the last question, its deadline (0 if it is closed), and whether a stall caused it.
        self._question, self._end, self._for_stall = 0, 0.0, False
        self._reports: dict[int, Report] = {}
        self._known: dict[int, Report] = {}
        self._ask_requested = self._end_announced = self._hurry = False
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdx watchdog", daemon=True)
        self._thread.start()
        _running.append(self)

    def stop(self) -> None:
        """End the thread, which has to happen before MPI is finalised."""
        self._stop.set()
        self._wake.set()
        self._thread.join(10 * _TICK)
        if self in _running:
            _running.remove(self)

    def ask(self) -> None:
        """Have the thread ask the other ranks for their position."""
        self._ask_requested = True
        self._wake.set()

    def leave(self, status: int, how: str, hurry: bool) -> None:
        """Tell the other ranks that this process ends.

        Args:
            status: exit status; if it is 0, only the lowest ranks are notified, else all.
            how: the call that ends the process; "" if unknown.
            hurry: True notifies them at once, and the thread continues; False notifies them when the thread ends.
        """
        self._own_end, self._hurry = (status, how), hurry
        self._wake.set()

    def failed_below(self, how: str) -> bool:
        """Return whether a rank below this one has left in the same way."""
        return any(rank < self._rank and other == how for rank, (_, other) in list(self._gone.items()))

    def others_left(self) -> bool:
        """Return whether every other rank has left."""
        return len(self._gone) == self._size - 1

    def departed(self) -> tuple[int, str] | None:
        """Return the exit status of a rank that has left and a sentence about it; None if no rank has."""
        gone = dict(self._gone)
        if not gone:
            return None
        # A rank that failed explains more than those that left because of it.
        rank = min(gone, key=lambda r: (gone[r][0] == 0, r))
        status, how = gone[rank]
        return status, departure(rank, self._size, self._hosts[rank], how)

    def is_lowest_left(self) -> bool:
        """Return whether every rank below this one has left, so that this rank reports for those that remain."""
        return all(rank in self._gone for rank in range(self._rank))

    def last_report(self, rank: int) -> str:
        """Describe the last answer of a rank; "" if it did not answer."""
        who, report = f"rank {rank} ({self._hosts[rank]})", self._known.get(rank)
        if report is not None:
            return f"{who}: {report.describe()}"
        return f"{who} has left" if rank in self._gone else ""

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            # A script may finalise MPI itself.
            while not self._stop.is_set() and not self._mpi.Is_finalized():
                # Without `hurry`, the end is announced when the thread ends, shortly before MPI is finalised.
                if self._hurry:
                    self._announce_end()
                self._receive()
                self._check()
                self._wake.wait(_BUSY_TICK if self._end or self._end_announced else self._tick)
                self._wake.clear()
            self._announce_end()
        except Exception as error:
            # A watchdog must not harm the training; MPI is breaking down anyway.
            if not self._stop.is_set():
                _log.urgent(WARNING, f"rank {self._rank} no longer watches for stalls: {error}")

    def _announce_end(self) -> None:
        if self._end_announced or self._mpi.Is_finalized():
            return
        self._end_announced = True
        status, how = self._own_end or (0, "")
        for rank in range(self._size if status else min(self._size, _NOTIFIED)):
            if rank != self._rank:
                self._send(rank, _LEAVE, {"status": status, "how": how})

    def _check(self) -> None:
        """Open or close a question, or end a job that cannot continue."""
        now, idle = time.monotonic(), progress.idle()
        turn = min(self._rank * _TURN, _LAST_TURN)
        if self._gone and not self._end_announced and progress.waits_for_all():
            self._end_if_doomed(idle)
        if idle < self._seen_idle:
            self._due = self._limit  # this rank has moved, so the next stall is a new one
        self._seen_idle = idle
        if self._end:
            if now > self._end or len(self._reports.keys() | self._gone.keys()) >= self._size:
                self._close_question()
        elif self._ask_requested:
            self._open_question(stall=False)
        elif idle > self._due + turn and progress.busy():
            self._open_question(stall=True)

    def _end_if_doomed(self, idle: float) -> None:
        """End the job if a collective has waited too long for a rank that has left."""
        found = self.departed()
        if found is not None and idle > _DOOMED_SECONDS + min(self._rank * _DOOMED_TURN, _LAST_DOOMED):
            print_end(found[1])
            self._mpi.COMM_WORLD.Abort(found[0] or 1)

    def _open_question(self, stall: bool) -> None:
        """Ask all other ranks for their reports."""
        self._ask_requested = False
        self._question += 1
        self._for_stall, self._reports = stall, {self._rank: progress.here()}
        self._end = time.monotonic() + _ANSWER_SECONDS
        for rank in range(self._size):
            if rank != self._rank:
                self._send(rank, _ASK, {"question": self._question, "stall": stall})

    def _close_question(self) -> None:
        """Store the answers and, if this rank is still stalled, print the stall warning."""
        self._end = 0.0
        self._known = dict(self._reports)
        if not self._for_stall or progress.idle() < self._limit:
            return  # not a stall, or this rank moves again
        self._due = 2 * progress.idle()
        # If a lower rank is stalled too, it prints the warning.
        if any(r < self._rank and report.idle >= self._limit and report.busy
               for r, report in self._reports.items()):  # fmt: skip
            return
        everyone: dict[int, Report | None] = {r: self._reports.get(r) for r in range(self._size)}
        gone = sorted(self._gone.keys() - self._reports.keys())
        text = progress.message(everyone, gone, progress.idle(), self._hosts)
        _log.urgent(WARNING, text)

    def _receive(self) -> None:
        """Receive and handle the messages that have arrived."""
        self._sends = [(request, data) for request, data in self._sends if not request.Test()]
        status, misses = self._mpi.Status(), 0
        while misses < _PROBES:
            found = self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
            if found is None:
                misses += 1
                continue
            data = bytearray(status.Get_count(self._mpi.BYTE))
            sender, tag = status.Get_source(), status.Get_tag()
            found.Recv([data, self._mpi.BYTE])
            self._handle(sender, tag, json.loads(data))

    def _handle(self, sender: int, tag: int, said: _Said) -> None:
        if tag == _LEAVE:
            self._gone[sender] = said["status"], said["how"]
        elif tag == _ASK:
            self._send(sender, _ANSWER, {"question": said["question"], "report": progress.here().as_json()})
            if said["stall"] and sender < self._rank:
                self._due = max(self._due, 2 * progress.idle())
        elif said["question"] == self._question and self._end:
            self._reports[sender] = Report.of_json(said["report"])

    def _send(self, to: int, tag: int, said: _Said) -> None:
        data = json.dumps(said).encode()
        self._sends.append((self._comm.Isend([data, self._mpi.BYTE], to, tag), data))


def departure(rank: int, size: int, host: str, how: str) -> str:
    """Describe a rank that has ended although the others need it.

    Args:
        rank, size, host: rank that has ended, world size, and name of its host.
        how: the call that ended it; "" if unknown.

    Example:
        >>> departure(1, 4, "node2", "sys.exit(3)")
        'rank 1 of 4 on node2 ended: sys.exit(3), and the others cannot continue without it'
        >>> "the same number of steps" in departure(1, 4, "node2", "")
        True
    """
    said = f"rank {rank} of {size} on {host} ended{': ' * bool(how)}{how}, and the others cannot continue without it"
    # A rank whose script has come to its end has taken fewer steps, or has skipped one.
    return said if how else f"{said} (all take the same number of steps, and decide alike: see hvdx.keras.combine)"


def print_end(said: str) -> None:
    """Log the reason for which this rank is about to end the job, and flush the script's output."""
    _log.urgent(ERROR, f"{said}; ending the job on all ranks")
    sys.stdout.flush()


_running: list[Watchdog] = []


def ask() -> None:
    """Have this process's watchdog, if any, ask all ranks for their position; `last_report` returns the answers."""
    for watchdog in _running:
        watchdog.ask()


def last_report(rank: int) -> str:
    """Describe the last known position of a rank; "" if unknown.

    Args:
        rank: rank in the world of all processes.
    """
    return next(filter(None, (watchdog.last_report(rank) for watchdog in _running)), "")


def leave(status: int, how: str, hurry: bool, courtesy: float) -> bool:
    """Tell the other ranks that this process ends.

    Args:
        status, how, hurry: see `Watchdog.leave`.
        courtesy: seconds to wait for the other ranks to end as well, unless `status` is 0.

    Returns:
        True if `status` is 0, all other ranks have left too, or this process has no watchdog.
    """
    for watchdog in _running:
        watchdog.leave(status, how, hurry)
    return not status or until(lambda: all(watchdog.others_left() for watchdog in _running), courtesy)


def fails_like_lower_rank(how: str, limit: float) -> bool:
    """Tell the other ranks that this process fails; return whether a lower rank fails in the same way.

    Args:
        how: type and text of the exception.
        limit: seconds to wait for such a rank.
    """
    for watchdog in _running:
        watchdog.leave(1, how, hurry=True)
    return until(lambda: any(watchdog.failed_below(how) for watchdog in _running), limit if _running else 0.0)


def find_departed(limit: float) -> tuple[int, str, bool] | None:
    """Find a rank that has left the job.

    Args:
        limit: seconds to wait for one.

    Returns:
        Exit status of the rank, a sentence about it, and whether this rank is the one to print it; None if no rank has
        left.
    """
    until(lambda: any(watchdog.departed() for watchdog in _running), limit if _running else 0.0)
    for watchdog in _running:
        found = watchdog.departed()
        if found is not None:
            return *found, watchdog.is_lowest_left()
    return None


@atexit.register
def _stop_all() -> None:
    # This is before MPI is finalised: mpi4py does that after all of Python's exit handlers.
    for watchdog in list(_running):
        watchdog.stop()


class Heartbeat:
    """Beats of this rank, until it is closed.

    Args:
        limit: seconds without progress after which the rank is ended.
        is_awaited: function that returns whether other ranks wait for this one, outside of a training step too.
        name: function that returns the rank, for the message; "" if it is not to be ended.
    """

    def __init__(self, limit: float, is_awaited: Callable[[], bool], name: Callable[[], str]):
        self._limit, self._is_awaited, self._name = limit, is_awaited, name
        self._pipe = -1
        with contextlib.suppress(OSError):  # none, or out of reach in a container
            # A process that is stopped reads nothing.
            self._pipe = os.open(os.environ.pop(HEARTBEAT_VARIABLE, ""), os.O_WRONLY | os.O_NONBLOCK)
        self._write()  # this rank has joined the others
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hvdx heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the beats: the rank is not ended any more."""
        self._closed.set()
        self._thread.join(_BEAT)
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def _write(self) -> None:
        if self._pipe >= 0:
            with contextlib.suppress(OSError):
                os.write(self._pipe, f"{os.getpid()} {self._limit}\n".encode())

    def _beat(self) -> None:
        beat = min(_BEAT, _SHARE * self._limit)
        still, before = 0.0, progress.last()
        while not self._closed.wait(beat):
            self._write()
            before, now = progress.last(), before
            still = still + beat if before == now and not progress.may_stand() else 0.0
            if still > self._limit and (name := self._name()) and (progress.busy() or self._is_awaited()):
                _log.urgent(
                    ERROR,
                    f"{name} on {socket.gethostname()} has made no progress for {self._limit:.0f} s "
                    f"({LIMIT_VARIABLE}), and is ended. Its position: {progress.here().describe()}.",
                )
                os.kill(os.getpid(), signal.SIGKILL)
