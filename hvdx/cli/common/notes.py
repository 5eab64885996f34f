"""TensorFlow's start-up notes, left out of a standard error.

TensorFlow writes some whatever its level of logging is, four lines on each rank, before any code of the script can turn
them off. They would hide the messages of hvdx.
"""

import contextlib
import os
import re
import select
import signal

#: Environment variable; if the user has set it, everything is shown.
VARIABLE = "TF_CPP_MIN_LOG_LEVEL"
#: Lines that are left out: those of absl's level INFO, and the one that precedes them.
NOTES = re.compile(
    rb"^(?:WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR|"
    rb"I\d{4} \d\d:\d\d:[\d.]+ +\d+ [\w.]+:\d+\] [^\n]*)\r?\n",
    re.MULTILINE,
)
# Seconds for which the beginning of a line is kept.
_KEPT_SECONDS = 0.1


def leave_out() -> None:
    """Send standard error through a process that leaves notes out, unless the user has chosen a level of logging.

    The process is no child of this one, which a launcher may replace, and ends at the end of all writers.
    """
    if VARIABLE in os.environ:
        return
    reading, writing = os.pipe()
    first = os.fork()
    if first == 0:
        if os.fork() == 0:
            os.close(writing)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            # A reader of the standard output does not wait for this process.
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            with contextlib.suppress(OSError):  # nobody reads any more
                _filter(reading, 2)
        os._exit(0)
    os.waitpid(first, 0)
    os.close(reading)
    os.dup2(writing, 2)
    os.close(writing)


def _filter(source: int, target: int) -> None:
    """Copy lines that are no notes; a line without an end, such as a progress bar, after a moment."""
    rest, open_ = b"", True
    while open_:
        late = bool(rest) and not select.select([source], [], [], _KEPT_SECONDS)[0]
        data = b"" if late else os.read(source, 1 << 16)
        open_ = late or bool(data)
        lines, end, begun = (rest + data).rpartition(b"\n")
        shown, rest = NOTES.sub(b"", lines + end), begun
        if late or not open_:
            shown, rest = shown + rest, b""
        while shown:
            shown = shown[os.write(target, shown) :]
