"""Messages of hvdx: records of the logger "hvdx"; lines on stderr that begin with "hvdx: " if no handler takes them.

The logger has no handler of its own, and its records reach the handlers of the root logger. So a program that has
handlers gets each message once, and pytest's `caplog` sees it (docs/adr/0036-messages-are-records.md).
"""

import contextlib
import io
import logging
import sys
import threading
import traceback
from logging import ERROR, INFO, WARNING
from types import TracebackType

from hvdx.foreign import printable

_Error = tuple[type[BaseException], BaseException, TracebackType | None]

_HEAD = "hvdx: "
# Seconds that the handlers of a program get for an urgent message.
_HANDLER_SECONDS = 1.0

# Rank of this process in the world of all processes; None before the world is joined.
_rank: int | None = None

_top = logging.getLogger("hvdx")
if _top.level == logging.NOTSET:
    # Python's default, the root logger's WARNING, would drop facts.
    _top.setLevel(INFO)


def set_rank(rank: int) -> None:
    """Set the field `rank` of later records.

    Args:
        rank: rank of this process in the world of all processes.
    """
    global _rank
    _rank = rank


def leave_buffer() -> None:
    """Write to the process's own stderr again if it has been replaced by a buffer in memory.

    The hook of torch.distributed for uncaught exceptions calls the hook before it with such a buffer as stderr, and
    would print it afterwards. A process that ends in the hook before it would say nothing.
    """
    if isinstance(sys.stderr, io.StringIO):
        sys.stderr = sys.__stderr__


class Log:
    """Logger of one module of hvdx.

    `head` is the start of the line on stderr, and no part of the message. It begins with a line break where a progress
    bar of Keras may stand on the line.

    Args:
        name: name of the module.

    Example:
        >>> Log("hvdx.example").info("2 workers on one host")  # on stderr: hvdx: 2 workers on one host
    """

    def __init__(self, name: str):
        self._logger = logging.getLogger(name)

    def info(self, text: str, head: str = _HEAD) -> None:
        """Log a fact."""
        if self._logger.isEnabledFor(INFO):
            self._deliver(self._record(INFO, text, head))

    def warning(self, text: str, head: str = _HEAD) -> None:
        """Log a warning."""
        if self._logger.isEnabledFor(WARNING):
            self._deliver(self._record(WARNING, text, head))

    def error(self, text: str, head: str = _HEAD) -> None:
        """Log a failure."""
        if self._logger.isEnabledFor(ERROR):
            self._deliver(self._record(ERROR, text, head))

    def urgent(self, level: int, text: str, error: _Error | None = None) -> None:
        """Log a message of a process that is stuck or about to end, even if another thread holds a lock of logging.

        Handlers may wait for a lock or for a disk, so they run in a thread. After a second the message is written to
        stderr. A failure is written there also if its level is disabled.

        Args:
            level: WARNING or ERROR.
            text: message.
            error: exception whose traceback precedes the message.
        """
        record, delivered = self._record(level, text, _HEAD, error), threading.Event()

        def deliver() -> None:
            if self._logger.isEnabledFor(level):
                self._deliver(record)
            elif level >= ERROR:
                _write(record)
            delivered.set()

        # RuntimeError: a Python that is ending starts no threads, and a handler in this one may wait for ever.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=deliver, name="hvdx log", daemon=True).start()
            if delivered.wait(_HANDLER_SECONDS):
                return
        _write(record)

    def _record(self, level: int, text: str, head: str, error: _Error | None = None) -> logging.LogRecord:
        # 3: the caller of the caller of this method.
        path, line, function, _ = self._logger.findCaller(stacklevel=3)
        fields = {"rank": _rank, "head": head}
        return self._logger.makeRecord(self._logger.name, level, path, line, text, (), error, function, fields)

    def _deliver(self, record: logging.LogRecord) -> None:
        if _has_handlers(self._logger):
            self._logger.handle(record)
        elif self._logger.filter(record):
            _write(record)


def _has_handlers(logger: logging.Logger) -> bool:
    """Return whether the program has handlers for a logger."""
    found, current = [*logger.handlers], logger
    while current.propagate and current.parent is not None:
        current = current.parent
        found += current.handlers
    return any(not _is_implicit(handler) for handler in found)


def _is_implicit(handler: logging.Handler) -> bool:
    """Return whether `logging.basicConfig()` made the handler.

    `logging.warning` and absl call that if the root logger has no handler, so a warning of Keras in the middle of a
    training makes one that nobody asked for. What it would write goes to stderr in either case, or nowhere if stderr
    has been replaced and closed since.
    """
    return (
        type(handler) is logging.StreamHandler
        and handler in logging.root.handlers
        and (handler.stream in (sys.stderr, sys.__stderr__) or getattr(handler.stream, "closed", False))
        and getattr(handler.formatter, "_fmt", None) == logging.BASIC_FORMAT
    )


def _write(record: logging.LogRecord) -> None:
    text = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
    head = getattr(record, "head", _HEAD)
    # If stderr is closed, or a signal has interrupted a write to it, there is no place left for the message.
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        # One write, so that it does not mix with the output of other ranks.
        sys.stderr.write(f"{text}{head}{printable(record.getMessage())}\n")
        sys.stderr.flush()
