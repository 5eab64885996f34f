"""A thread a rank that notices when nothing moves any more, asks the others where they are, and says so.

Only small messages, from one rank to another, are sent, and nothing is ever waited for inside MPI: a rank that has
been stopped cannot take this thread with it, and the thread cannot keep its own process from ending.
"""

import atexit
import json
import os
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

from hvdx.comm import progress
from hvdx.comm.progress import Report
from hvdx.comm.waiting import LIMIT_VARIABLE, time_limit, until
from hvdx.errors import ConfigError, ExchangeError

#: Seconds without any progress after which a rank says where all are; 0 for never.
STALL_VARIABLE = "HVDX_STALL_WARNING"
_STALL_SECONDS = 60.0
# Between two looks, at most and at least, and while answers are awaited.
_TICK, _LEAST_TICK, _BUSY_TICK = 1.0, 0.1, 0.05
# A look that finds nothing may be what makes MPI fetch a message for the next one; sockets take the longest.
_LOOKS = 10
# How long the others have for an answer; they look once in a tick.
_ANSWER_SECONDS = 3.0
# The lowest ranks ask first, and those that they have asked keep quiet: with many ranks not all ask all.
_TURN, _LAST_TURN = 0.1, 10.0
# Ranks that are told that another leaves: one of the lowest is who will ask for it.
_TOLD_OF_LEAVING = 8
# A collective that waits for a rank that has ended is over after so long, lowest ranks first.
_DOOMED_SECONDS, _DOOMED_TURN, _LAST_DOOMED = 5.0, 1.5, 6.0
_ASK, _ANSWER, _LEAVE = 1, 2, 3
_HOST_BYTES = 64


def stall_limit() -> float:
    """Seconds without progress after which a rank says so; 0 for never.

    Raises:
        ConfigError: `HVDX_STALL_WARNING` is not a number, or below 0.

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


class Watchdog:
    """Watches this rank, and answers those of the others. Collective to make.

    Args:
        world: the `MPI.Comm` of all processes; it is duplicated.
        limit: seconds without progress, above 0; alike on all ranks.

    Raises:
        ExchangeError: not all ranks came within the time limit.
    """

    def __init__(self, world: Any, limit: float):
        from mpi4py import MPI

        self._mpi, self._limit = MPI, limit
        # Never freed: a message that comes later would be taken for one of the next communicator's.
        self._comm, request = world.Idup()
        _await(request)
        self._rank, self._size = self._comm.Get_rank(), self._comm.Get_size()
        hosts = np.zeros(self._size, f"S{_HOST_BYTES}")
        name = np.array([socket.gethostname().encode()], hosts.dtype)
        _await(self._comm.Iallgather(name.view(np.uint8), hosts.view(np.uint8)))
        self._hosts = [host.decode(errors="replace") for host in hosts]
        self._tick = min(max(limit / 10, _LEAST_TICK), _TICK)
        self._due = limit
        self._seen_idle = 0.0
        self._leaving: list[tuple[Any, bytes]] = []
        # Ranks that have left: their exit status, and how they ended in words.
        self._gone: dict[int, tuple[int, str]] = {}
        self._farewell: tuple[int, str] | None = None
        # Of the question that is open, if one is: its number, when it ends, whether a stall asks it.
        self._question, self._end, self._for_stall = 0, 0.0, False
        self._reports: dict[int, Report] = {}
        self._known: dict[int, Report] = {}
        self._wanted = self._parted = self._hurry = False
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdx watchdog", daemon=True)
        self._thread.start()
        _running.append(self)

    def stop(self) -> None:
        """End the thread; it has to be over before MPI is."""
        self._stop.set()
        self._wake.set()
        self._thread.join(10 * _TICK)
        if self in _running:
            _running.remove(self)

    def ask(self) -> None:
        """Ask the others where they are, soon."""
        self._wanted = True
        self._wake.set()

    def leave(self, status: int, how: str, hurry: bool) -> None:
        """Tell the others that this process ends.

        Args:
            status: the exit status; where it is not 0 all are told.
            how: in words; "" where there is nothing to say.
            hurry: at once, and go on watching; otherwise when the watch is over.
        """
        self._farewell, self._hurry = (status, how), hurry
        self._wake.set()

    def alone(self) -> bool:
        """Whether every other rank has left."""
        return len(self._gone) == self._size - 1

    def obituary(self) -> tuple[int, str] | None:
        """The exit status of a rank that has left, and a sentence about it; None while all are there."""
        gone = dict(self._gone)
        if not gone:
            return None
        # One that failed says more than those that left because of it.
        rank = min(gone, key=lambda r: (gone[r][0] == 0, r))
        status, how = gone[rank]
        return status, departure(rank, self._size, self._hosts[rank], how)

    def first_left(self) -> bool:
        """Whether every rank below this one has left, so that this rank speaks for those that remain."""
        return all(rank in self._gone for rank in range(self._rank))

    def last_word(self, rank: int) -> str:
        """Where a rank was when it was asked last, in words; "" if it did not answer."""
        who, report = f"rank {rank} ({self._hosts[rank]})", self._known.get(rank)
        if report is not None:
            return f"{who}: {report.describe()}"
        return f"{who} has left" if rank in self._gone else ""

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            # A script may end MPI itself.
            while not self._stop.is_set() and not self._mpi.Is_finalized():
                # Who ends well says so last, as the thread ends: its MPI is about to be over.
                if self._hurry:
                    self._say_good_bye()
                self._read()
                self._look()
                self._wake.wait(_BUSY_TICK if self._end else self._tick)
                self._wake.clear()
            self._say_good_bye()
        except Exception as error:
            # A watchdog must not harm the training; it is an MPI that is breaking down anyway.
            if not self._stop.is_set():
                print(f"hvdx: rank {self._rank} watches no longer for stalls: {error}", file=sys.stderr, flush=True)

    def _say_good_bye(self) -> None:
        if self._parted or self._mpi.Is_finalized():
            return
        self._parted = True
        status, how = self._farewell or (0, "")
        for rank in range(self._size if status else min(self._size, _TOLD_OF_LEAVING)):
            if rank != self._rank:
                self._send(rank, _LEAVE, {"status": status, "how": how})

    def _look(self) -> None:
        """Is there something to ask, or to say?"""
        now, idle = time.monotonic(), progress.idle()
        turn = min(self._rank * _TURN, _LAST_TURN)
        if self._gone and not self._parted and progress.waits_for_all():
            self._end_if_doomed(idle)
        if idle < self._seen_idle:
            self._due = self._limit  # it has moved: what comes next is another stall
        self._seen_idle = idle
        if self._end:
            if now > self._end or len(self._reports.keys() | self._gone.keys()) >= self._size:
                self._close()
        elif self._wanted:
            self._open(stall=False)
        elif idle > self._due + turn and progress.busy():
            self._open(stall=True)

    def _end_if_doomed(self, idle: float) -> None:
        """A collective waits that cannot end any more."""
        found = self.obituary()
        if found is not None and idle > _DOOMED_SECONDS + min(self._rank * _DOOMED_TURN, _LAST_DOOMED):
            say_end(found[1])
            self._mpi.COMM_WORLD.Abort(found[0] or 1)

    def _open(self, stall: bool) -> None:
        """Ask everybody."""
        self._wanted = False
        self._question += 1
        self._for_stall, self._reports = stall, {self._rank: progress.here()}
        self._end = time.monotonic() + _ANSWER_SECONDS
        for rank in range(self._size):
            if rank != self._rank:
                self._send(rank, _ASK, {"question": self._question, "stall": stall})

    def _close(self) -> None:
        """All have answered, or had the time to."""
        self._end = 0.0
        self._known = dict(self._reports)
        if not self._for_stall or progress.idle() < self._limit:
            return  # it moves again
        self._due = 2 * progress.idle()
        # Another one that stands still, and asks at the same time, speaks if its number is lower.
        if any(r < self._rank and report.idle >= self._limit and report.busy
               for r, report in self._reports.items()):  # fmt: skip
            return
        everyone: dict[int, Report | None] = {r: self._reports.get(r) for r in range(self._size)}
        gone = sorted(self._gone.keys() - self._reports.keys())
        text = progress.message(everyone, gone, progress.idle(), self._hosts)
        # One write, so that it is not mixed with what others print.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def _read(self) -> None:
        """Take what has come."""
        self._leaving = [(request, data) for request, data in self._leaving if not request.Test()]
        status, misses = self._mpi.Status(), 0
        while misses < _LOOKS:
            found = self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
            if found is None:
                misses += 1
                continue
            data = bytearray(status.Get_count(self._mpi.BYTE))
            sender, tag = status.Get_source(), status.Get_tag()
            found.Recv([data, self._mpi.BYTE])
            self._take(sender, tag, json.loads(data))

    def _take(self, sender: int, tag: int, said: dict[str, Any]) -> None:
        if tag == _LEAVE:
            self._gone[sender] = said["status"], said["how"]
        elif tag == _ASK:
            self._send(sender, _ANSWER, {"question": said["question"], "report": progress.here().as_json()})
            if said["stall"] and sender < self._rank:
                self._due = max(self._due, 2 * progress.idle())
        elif said["question"] == self._question and self._end:
            self._reports[sender] = Report.of_json(said["report"])

    def _send(self, to: int, tag: int, said: dict[str, Any]) -> None:
        data = json.dumps(said).encode()
        self._leaving.append((self._comm.Isend([data, self._mpi.BYTE], to, tag), data))


def departure(rank: int, size: int, host: str, how: str) -> str:
    """A sentence about a rank that has ended while the others need it.

    Args:
        rank, size, host: which rank it was.
        how: the call that ended it; "" where that is not known.

    Example:
        >>> departure(1, 4, "node2", "sys.exit(3)")
        'rank 1 of 4 on node2 ended: sys.exit(3), and the others cannot go on without it'
    """
    return f"rank {rank} of {size} on {host} ended{': ' * bool(how)}{how}, and the others cannot go on without it"


def say_end(said: str) -> None:
    """Print why this rank is about to end the job, in one write, after all that the script has printed."""
    sys.stderr.write(f"hvdx: {said}; ending the job on all ranks\n")
    sys.stdout.flush()
    sys.stderr.flush()


def _await(request: Any) -> None:
    if not until(request.Test, time_limit()):
        raise ExchangeError(f"joining the world: not all ranks came within {time_limit():.0f} s ({LIMIT_VARIABLE}).")


_running: list[Watchdog] = []


def ask() -> None:
    """Have the ranks asked where they are, where this process has a watchdog; `last_word` knows it a little later."""
    for watchdog in _running:
        watchdog.ask()


def last_word(rank: int) -> str:
    """Where a rank was when it was asked last, in words; "" where that is not known.

    Args:
        rank: in the world of all processes.
    """
    return next(filter(None, (watchdog.last_word(rank) for watchdog in _running)), "")


def leave(status: int, how: str, hurry: bool, courtesy: float) -> bool:
    """Tell the others that this process ends; see `Watchdog.leave`.

    Args:
        status, how, hurry: see there.
        courtesy: seconds in which others may end as well.

    Returns:
        Whether all others have left too, or nobody watches.
    """
    for watchdog in _running:
        watchdog.leave(status, how, hurry)
    return not status or until(lambda: all(watchdog.alone() for watchdog in _running), courtesy)


def obituary(limit: float) -> tuple[int, str, bool] | None:
    """Look up which rank has left the job.

    Args:
        limit: seconds to wait until one has.

    Returns:
        The exit status of one that has left, a sentence about it, and whether this rank is the one to say it; None if
        no rank has left.
    """
    until(lambda: any(watchdog.obituary() for watchdog in _running), limit if _running else 0.0)
    for watchdog in _running:
        found = watchdog.obituary()
        if found is not None:
            return *found, watchdog.first_left()
    return None


@atexit.register
def _stop_all() -> None:
    # Before MPI is finalised: mpi4py does that after all exit handlers of Python.
    for watchdog in list(_running):
        watchdog.stop()
