"""End of a rank that hangs, so that the others go on as after any death.

A thread of the rank finds a main thread that makes no progress while the others wait. If the process is stopped, or a
library blocks Python, the thread cannot run: then it sends no more beats to the process that started the rank
(`cli/common/rank.py`), which ends it. Both count beats, not seconds: all processes of a job may be suspended for long.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

from hvdx.comm import progress
from hvdx.comm.waiting import LIMIT_VARIABLE
from hvdx.log import ERROR, Log

_log = Log(__name__)

#: Environment variable: path of a pipe, to which a rank writes a line with each beat: its process, and the limit.
VARIABLE = "HVDX_HEARTBEAT"
# Seconds between two beats: maximum, and share of the limit.
_BEAT, _SHARE = 1.0, 0.05


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
            self._pipe = os.open(os.environ.pop(VARIABLE, ""), os.O_WRONLY | os.O_NONBLOCK)
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
