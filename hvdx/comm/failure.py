"""One rank's failure ends the job: nobody waits for a rank that is gone."""

import os
import socket
import sys
import time
import traceback
from types import TracebackType

from hvdx.comm import mpi
from hvdx.errors import HvdxError

# How long the other ranks give rank 0 to say what all of them found.
_COURTESY_SECONDS = 3.0


_remembered: list[BaseException] = []


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
        if _remembered and kind.__module__.startswith("tensorflow.") and str(_remembered[0]) in str(error):
            error = _remembered[0]
            kind, trace = type(error), error.__traceback__
        if isinstance(error, HvdxError) and error.collective:
            if rank == 0:
                print(f"hvdx: {kind.__name__}: {error}", file=sys.stderr, flush=True)
            else:
                time.sleep(_COURTESY_SECONDS)
        else:
            text = "".join(traceback.format_exception(kind, error, trace))
            headline = f"hvdx: rank {rank} of {size} on {socket.gethostname()} failed; ending the job on all ranks"
            # One write, so that the ranks' messages do not run into each other.
            sys.stderr.write(f"{text}{headline}: {kind.__name__}: {str(error).partition(chr(10))[0]}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.abort(1)
        os._exit(1)

    sys.excepthook = end_the_job
