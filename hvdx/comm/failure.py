"""One rank's failure ends the job: nobody waits for a rank that is gone."""

import atexit
import os
import re
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from hvdx.comm import mpi, progress, watchdog
from hvdx.errors import HvdxError

# How long the other ranks give rank 0 to say what all of them found.
_COURTESY_SECONDS = 3.0
# What Horovod raises on the ranks that are left when one has ended; and how long they wait to hear which.
_SHUT_DOWN, _OBITUARY_SECONDS = "Horovod has been shut down", 4.0


_remembered: list[BaseException] = []
# Rank and size.
_place = (0, 0)


def remember(error: BaseException) -> None:
    """Keep an error that TensorFlow is about to wrap into one of its own, which would hide its kind and its text.

    Args:
        error: raised by Python code inside a TensorFlow function; what ends the process is reported as this error.
    """
    _remembered[:] = [error]


def install(rank: int, size: int) -> None:
    """Make an uncaught exception on this rank end the whole job, with its own message and exit code 1.

    Without it the interpreter's exit handlers would wait in MPI for ranks that are waiting for this one.

    Args:
        rank, size: this process in the world, for the message.
    """

    def end_the_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        departed = watchdog.obituary(_OBITUARY_SECONDS) if _SHUT_DOWN in str(error) else None
        if _remembered and kind.__module__.startswith("tensorflow.") and str(_remembered[0]) in str(error):
            error = _remembered[0]
            kind, trace = type(error), error.__traceback__
        if departed is not None:
            _, said, first = departed
            if first:
                watchdog.say_end(said)
            else:
                time.sleep(_COURTESY_SECONDS)
        elif isinstance(error, HvdxError) and error.collective:
            if rank == 0:
                print(f"hvdx: {kind.__name__}: {error}", file=sys.stderr, flush=True)
            else:
                time.sleep(_COURTESY_SECONDS)
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
            headline = f"hvdx: rank {rank} of {size} on {socket.gethostname()} failed; ending the job on all ranks"
            said = programs_own(str(error)) if kind.__module__.startswith("tensorflow.") else ""
            said = said or f"{kind.__name__}: {str(error).partition(chr(10))[0]}"
            # One write, so that the ranks' messages do not run into each other.
            sys.stderr.write(f"{text}{headline}: {said}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.abort(departed[0] or 1 if departed else 1)
        os._exit(1)

    global _place
    _place = rank, size
    sys.excepthook = end_the_job
    sys.exit = _exit
    leave_first()


_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
_RAISED = re.compile(r"^((?:\w+\.)*[A-Z]\w*): ?(.*)$", re.MULTILINE)
_LIBRARIES = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<frozen")


def programs_own(text: str) -> str:
    """The exception that the program's own code raised inside TensorFlow, in a generator of data say, and its line.

    Args:
        text: of TensorFlow's error, which holds the traceback of Python's.

    Returns:
        Its kind, its words and the innermost line outside of libraries; "" where there is none.

    Example:
        >>> programs_own('''Graph execution error:
        ... ValueError: no such image
        ... Traceback (most recent call last):
        ...   File "/lib/site-packages/tensorflow/script_ops.py", line 1, in __call__
        ...   File "/home/me/train.py", line 12, in images
        ... ValueError: no such image''')
        'ValueError: no such image (/home/me/train.py:12, in images)'
    """
    _, found, traceback_ = text.partition("Traceback (most recent call last):")
    raised = _RAISED.search(traceback_) if found else None
    if raised is None:
        return ""
    frames = [m for m in _FRAME.finditer(traceback_) if m.start() < raised.start() and not _LIBRARIES.search(m[1])]
    where = f" ({frames[-1][1]}:{frames[-1][2]}, in {frames[-1][3]})" if frames else ""
    return f"{raised[1]}: {raised[2]}{where}"


class _Exit(SystemExit):
    """What `sys.exit` raises.

    Python drops the last reference to it while no Python code runs only if the exception has ended the interpreter.
    """

    def __del__(self) -> None:
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            _ending[:] = [self.code]


# The argument of the `sys.exit` that ends this process.
_ending: list[Any] = []


def _exit(status: Any = None, /) -> NoReturn:
    raise _Exit(status)


def leave_first() -> None:
    """Have the others told of this process's end before anything else is done at its exit.

    To be called after whatever registers exit handlers that the others notice, such as Horovod's.
    """
    atexit.unregister(_leaving)
    atexit.register(_leaving)


def _leaving() -> None:
    """This process ends. With an exit status the job does, unless all ranks end by themselves."""
    code = _ending[0] if _ending else None
    status = (code & 0xFF if isinstance(code, int) else 1) if code is not None else 0
    how = f"sys.exit({code!r})" if _ending else ""
    # In the middle of a training the others need it, however it ends. (A training that was saved raises by itself.)
    hurry = bool(status) or (bool(_ending) and progress.training())
    if watchdog.leave(status, how, hurry, _COURTESY_SECONDS):
        return
    watchdog.say_end(watchdog.departure(*_place, socket.gethostname(), how))
    mpi.abort(status)
