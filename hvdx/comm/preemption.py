"""Signals by which a batch system announces the end of a job, and the exit code that asks it for another turn."""

import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any

#: Exit code of a training that saved and wants to go on later: "temporary failure, try again" of sysexits.h.
REQUEUE_CODE = 75
#: What announces the end: SIGUSR1 is what job scripts ask for, SIGTERM is what comes before a kill.
ENDINGS = (signal.SIGUSR1, signal.SIGTERM)


class PreemptionListener:
    """Listens for the end of the job, in place of dying of it. For as long as somebody holds it.

    A signal is for the whole process, and comes once: all that listen hear it, and those that listen later, until it
    is `acknowledge`. Processes that are forked meanwhile do not listen.

    Attributes:
        received: the name of the signal that came; "" while none has.

    Example:
        >>> listener = PreemptionListener()
        >>> listener.listen()
        True
        >>> signal.raise_signal(signal.SIGUSR1)
        >>> listener.received
        'SIGUSR1'
        >>> listener.close()
        >>> acknowledge()
    """

    def __init__(self) -> None:
        self.received = ""

    def listen(self) -> bool:
        """Take the signals over; whether that was possible, which it is in the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            return False
        _listening.add(self)
        self.received = self.received or _received
        for number in ENDINGS:
            handler = signal.getsignal(number)
            if handler is not _note:
                # Python does not know handlers that were not set from it.
                _before[number] = handler if handler is not None else signal.SIG_DFL
                signal.signal(number, _note)
        return True

    def close(self) -> None:
        """Listen no longer; the last one gives the signals back."""
        _listening.discard(self)
        if not _listening and threading.current_thread() is threading.main_thread():
            _give_back()

    @staticmethod
    def ignore() -> None:
        """All is saved, and this process is about to end: not by another signal, which would change its exit code.

        Python gives its own handlers back while it ends, but leaves alone what is ignored.
        """
        if threading.current_thread() is threading.main_thread():
            for number in ENDINGS:
                signal.signal(number, signal.SIG_IGN)


_listening: "weakref.WeakSet[PreemptionListener]" = weakref.WeakSet()
_before: dict[int, Any] = {}
# For those that are going to listen.
_received = ""


def acknowledge() -> None:
    """What was heard has been acted on: who listens from now on waits for another signal."""
    global _received
    _received = ""


def _note(number: int, frame: FrameType | None) -> None:
    global _received
    listening, name = list(_listening), signal.Signals(number).name
    if not listening:
        # Nobody is left to save anything: as if nobody had ever listened.
        signal.signal(number, _before.get(number, signal.SIG_DFL))
        os.kill(os.getpid(), number)
        return
    _received = _received or name
    for listener in listening:
        listener.received = listener.received or name


def _forked() -> None:
    """A child, of multiprocessing say, has nothing to save: it has to end when its parent tells it to."""
    _listening.clear()
    _give_back()


def _give_back() -> None:
    for number, before in _before.items():
        if signal.getsignal(number) is _note:
            signal.signal(number, before)
    _before.clear()


os.register_at_fork(after_in_child=_forked)
