"""The process of a launcher: signals reach it, it ends with this process, and its end has an exit code and a line."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Sequence

from hvdx.comm.preemption import REQUEUE_CODE
from hvdx.log import Log

_log = Log(__name__)

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Signals:
    """Signals to this process, which are passed on to the launcher.

    Args:
        shared: whether a signal of the terminal reaches the launcher, too.

    Attributes:
        received: signals that ask the job to end.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    # Those of the user's own, which ask for something else.
    OTHERS = (signal.SIGUSR2, signal.SIGCONT)

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self.received: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Signals":
        self._before = {number: signal.signal(number, self._handle) for number in (*self.NUMBERS, *self.OTHERS)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if number not in self.OTHERS:
            self.received.append(number)
        if self.process is not None and not (self._shared and number == signal.SIGINT):
            self.process.send_signal(number)


def run_launcher(command: Sequence[str]) -> int:
    """Run a launcher in this terminal, and return its exit code, or that of a signal; see `code_after`.

    Args:
        command: its words.

    Raises:
        OSError: if it cannot be started.
    """
    with Signals(shared=_is_in_foreground()) as signals:
        process = subprocess.Popen(command, preexec_fn=end_with_parent())  # noqa: PLW1509
        signals.process = process
        if signals.received:  # while it was started
            process.send_signal(signals.received[-1])
        code = process.wait()
    return code_after(signals.received, 128 - code if code < 0 else code)


def code_after(received: Sequence[int], code: int) -> int:
    """Return the exit code of a job; if a signal has ended it, say so, and return what shells do: 130 for Ctrl-C.

    Args:
        received: signals to this process.
        code: exit code of the launcher.
    """
    if code in (0, REQUEUE_CODE) or (signal.SIGINT not in received and signal.SIGTERM not in received):
        return code
    number = signal.SIGINT if signal.SIGINT in received else signal.SIGTERM
    _log.warning(f"ended by {signal.Signals(number).name}{' (Ctrl-C)' * (number == signal.SIGINT)}.")
    return 128 + number


def end_with_parent() -> Callable[[], object]:
    """Return a function for a new process: if its parent is killed, the launcher is to end its ranks."""
    library = ctypes.CDLL(None)
    return lambda: library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_in_foreground() -> bool:
    """Return whether the terminal sends its signals to this process group, to which the launcher belongs."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # there is none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)
