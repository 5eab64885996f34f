"""End of the whole job if one rank fails or exits early, so that no rank waits for it."""

import atexit
import os
import re
import socket
import sys
import textwrap
import threading
import time
from types import TracebackType
from typing import NoReturn

from hvdx.comm import mpi, progress, supervision, watchdog
from hvdx.errors import ExchangeError, HvdxError
from hvdx.log import ERROR, Log, leave_buffer

_log = Log(__name__)

# Seconds that this rank waits before it ends the job, so that another rank can print a shared error, or all ranks can
# end by themselves.
_COURTESY_SECONDS = 3.0
# Seconds that a rank waits for a lower one to fail in the same way, which then alone prints the error.
_ALIKE_SECONDS = 0.3
# Text of Horovod's error on the other ranks after one rank has ended.
_SHUT_DOWN = "Horovod has been shut down"
# Time limit for finding out which rank has ended.
_DEPARTURE_SECONDS = 4.0


_remembered: list[BaseException] = []
# Rank and world size, and whether the others go on without this process, set by `install`.
_place, _survives = (0, 0), False


def remember(error: BaseException) -> None:
    """Store an error that TensorFlow is about to wrap into one of its own, which would hide its type and text.

    Args:
        error: exception of Python code inside a TensorFlow function. If TensorFlow's error ends the process, this one
            is reported in its place.
    """
    _remembered[:] = [error]


def install(rank: int, size: int, survives: bool = False) -> None:
    """Make an uncaught exception on this rank end the whole job, with the exception's message and exit code 1.

    Otherwise the interpreter's exit handlers would wait in MPI for ranks that wait for this one.

    Args:
        rank, size: rank of this process and size of the world, for the message.
        survives: this process ends alone, and the others go on; see `hvdx.comm.surviving`.
    """

    def end_the_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave_buffer()
        departed = watchdog.find_departed(_DEPARTURE_SECONDS) if _SHUT_DOWN in str(error) else None
        if _remembered and kind.__module__.startswith("tensorflow.") and str(_remembered[0]) in str(error):
            error = _remembered[0]
            kind, trace = type(error), error.__traceback__
        if departed is not None:
            _, said, first = departed
            if first:
                watchdog.print_end(said)
            else:
                time.sleep(_COURTESY_SECONDS)
        elif isinstance(error, HvdxError) and error.collective:
            if rank == 0:
                _log.urgent(ERROR, f"{kind.__name__}: {error}")
            else:
                time.sleep(_COURTESY_SECONDS)
        else:
            then = "the others go on" if survives and size > 1 else "ending the job on all ranks"
            headline = f"rank {rank} of {size} on {socket.gethostname()} failed; {then}"
            said = find_user_error(str(error)) if kind.__module__.startswith("tensorflow.") else ""
            said = said or f"{kind.__name__}: {str(error).partition(chr(10))[0]}"
            if not survives and watchdog.fails_like_lower_rank(said, _ALIKE_SECONDS if rank else 0.0):
                time.sleep(_COURTESY_SECONDS)
            else:
                _log.urgent(ERROR, f"{headline}: {said}", (kind, error, trace))
        sys.stdout.flush()
        if not survives:
            mpi.abort(departed[0] or 1 if departed else 1)
        if isinstance(error, ExchangeError):
            supervision.report("gave up", rank=rank)
        os._exit(1)

    global _place, _survives
    _place, _survives = (rank, size), survives
    sys.excepthook = end_the_job
    sys.exit = _exit
    leave_first()


_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
_RAISED = re.compile(r"^((?:\w+\.)*[A-Z]\w*): ?(.*)$", re.MULTILINE)
_HVDX = re.escape(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LIBRARIES = re.compile(rf"/(?:site|dist)-packages/|/lib/python\d|^<frozen|^{_HVDX}/")


def find_user_error(text: str) -> str:
    """Find the exception that user code raised inside TensorFlow, for example in a data generator.

    Args:
        text: text of TensorFlow's error, which contains the Python traceback.

    Returns:
        Type and message of the exception, and the innermost line outside libraries; "" if there is no exception.

    Example:
        >>> find_user_error('''Graph execution error:
        ... ValueError: no such image
        ... Traceback (most recent call last):
        ...   File "/lib/site-packages/tensorflow/script_ops.py", line 1, in __call__
        ...   File "/home/me/train.py", line 12, in images
        ... ValueError: no such image''')
        'ValueError: no such image (/home/me/train.py:12, in images)'
    """
    _, found, traceback_ = text.partition("Traceback (most recent call last):")
    if not found:  # AutoGraph's text for an error while a function is traced
        _, found, traceback_ = text.partition("in user code:\n")
        traceback_ = textwrap.dedent(traceback_)
    raised = _RAISED.search(traceback_) if found else None
    if raised is None:
        return ""
    frames = [m for m in _FRAME.finditer(traceback_) if m.start() < raised.start() and not _LIBRARIES.search(m[1])]
    where = f" ({frames[-1][1]}:{frames[-1][2]}, in {frames[-1][3]})" if frames else ""
    return f"{raised[1]}: {raised[2]}{where}"


class _Exit(SystemExit):
    """Exception that `sys.exit` raises; it records its argument if it ends the process.

    If the exception has ended the interpreter, and only then, Python drops the last reference to it while no Python
    frame is on the stack.
    """

    def __del__(self) -> None:
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            _ending[:] = [self.code]


# The argument of the `sys.exit` that ends this process; empty if there was none.
_ending: list[object] = []


def _exit(status: object = None, /) -> NoReturn:
    raise _Exit(status)


def leave_first() -> None:
    """Register the exit handler that announces this process's end, so that it runs before all other exit handlers.

    Call it after any code that registers exit handlers with an effect on the other ranks, such as Horovod's.
    """
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Announce this process's end; end the job if its exit status is not 0, unless all ranks end by themselves."""
    code = _ending[0] if _ending else None
    status = (code & 0xFF if isinstance(code, int) else 1) if code is not None else 0
    how = f"sys.exit({code!r})" if _ending else ""
    # During a training the other ranks need this one, even if its status is 0. After a preemption, all ranks end: they
    # raise SystemExit without `sys.exit`, and `_ending` stays empty.
    hurry = bool(status) or (bool(_ending) and progress.training())
    if _survives:
        if hurry:
            sys.stdout.flush()
            os._exit(status or 1)  # the exit handlers of MPI would wait for the others
        return
    if watchdog.leave(status, how, hurry, _COURTESY_SECONDS):
        return
    watchdog.print_end(watchdog.departure(*_place, socket.gethostname(), how))
    mpi.abort(status)
