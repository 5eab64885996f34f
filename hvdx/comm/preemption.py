"""Signals by which a batch system announces the end of a job, and the exit code that requests a requeue."""

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType

#: Exit code of a training that saved and is to continue later: "temporary failure, try again" of sysexits.h.
REQUEUE_CODE = 75
#: Signals that announce the end: job scripts request SIGUSR1, and SIGTERM precedes a kill.
ENDINGS = (signal.SIGUSR1, signal.SIGTERM)


class PreemptionListener:
    """Listener for the signals that announce the end of the job, until it is closed or garbage-collected.

    A signal reaches all listeners of the process. Listeners that start later receive it too, until `acknowledge` is
    called. Forked child processes do not listen.

    Attributes:
        received: name of the signal received; "" if there was none.

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
        """Install the signal handlers; return False outside the main thread, where this is not possible."""
        if threading.current_thread() is not threading.main_thread():
            return False
        _listeners.add(self)
        self.received = self.received or _pending
        for number in ENDINGS:
            handler = signal.getsignal(number)
            if handler is not _handle_signal:
                # `getsignal` returns None for a handler that was not installed by Python.
                _previous[number] = handler if handler is not None else signal.SIG_DFL
                signal.signal(number, _handle_signal)
        return True

    def close(self) -> None:
        """Stop listening; the last listener restores the previous signal handlers."""
        _listeners.discard(self)
        if not _listeners and threading.current_thread() is threading.main_thread():
            _restore_handlers()

    @staticmethod
    def ignore() -> None:
        """Ignore further signals once everything is saved, because they would change the exit code of this process.

        Python restores its own handlers while it ends, but leaves ignored signals ignored.
        """
        if threading.current_thread() is threading.main_thread():
            for number in ENDINGS:
                signal.signal(number, signal.SIG_IGN)


_listeners: "weakref.WeakSet[PreemptionListener]" = weakref.WeakSet()
# Handler of a signal, as `signal.signal` takes it.
_Handler = Callable[[int, FrameType | None], object] | int | None
# Handlers before the first listener, by signal.
_previous: dict[int, _Handler] = {}
# Name of the signal received and not yet acknowledged, for later listeners.
_pending = ""


def acknowledge() -> None:
    """Clear the received signal after it has been handled, so that later listeners wait for another."""
    global _pending
    _pending = ""


def _handle_signal(number: int, frame: FrameType | None) -> None:
    global _pending
    listeners, name = list(_listeners), signal.Signals(number).name
    if not listeners:
        # All listeners are gone: restore the previous handler and send the signal again.
        signal.signal(number, _previous.get(number, signal.SIG_DFL))
        os.kill(os.getpid(), number)
        return
    _pending = _pending or name
    for listener in listeners:
        listener.received = listener.received or name


def _stop_in_child() -> None:
    """Restore the handlers in a forked child, such as one of multiprocessing: its parent must be able to end it."""
    _listeners.clear()
    _restore_handlers()


def _restore_handlers() -> None:
    for number, handler in _previous.items():
        if signal.getsignal(number) is _handle_signal:
            signal.signal(number, handler)
    _previous.clear()


os.register_at_fork(after_in_child=_stop_in_child)
