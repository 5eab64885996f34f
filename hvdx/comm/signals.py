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


class Announcement:
    """Listens for the end of the job, in place of dying of it. For as long as somebody holds it.

    Attributes:
        heard: the name of the signal that came; "" while none has.

    Example:
        >>> announcement = Announcement()
        >>> announcement.listen()
        True
        >>> signal.raise_signal(signal.SIGUSR1)
        >>> announcement.heard
        'SIGUSR1'
        >>> announcement.close()
    """

    def __init__(self) -> None:
        self.heard = ""
        self._note: Any = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> bool:
        """Take the signals over; whether that was possible, which it is in the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if self._before:
            return True
        me = weakref.ref(self)

        def note(number: int, frame: FrameType | None) -> None:
            listener = me()
            if listener is not None:
                listener.heard = listener.heard or signal.Signals(number).name
                return
            # Nobody is left to save anything.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        self._note = note
        for number in ENDINGS:
            self._before[number] = signal.signal(number, note)
        return True

    @staticmethod
    def ignore() -> None:
        """All is saved, and this process is about to end: not by a signal, which would change its exit code.

        Python gives its own handlers back while it ends, but leaves alone what is ignored.
        """
        if threading.current_thread() is threading.main_thread():
            for number in ENDINGS:
                signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Give the signals back."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) is self._note:
                    signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()
