"""SIGTERM as an exception, so that a command can clean up before it ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

#: Exit code of a command that SIGTERM ended.
TERMINATED = 128 + signal.SIGTERM


class TerminatedError(BaseException):
    """Raised when SIGTERM arrives. Not an Exception, so that `except Exception` does not catch it."""


@contextmanager
def sigterm_raises() -> Iterator[list[int]]:
    """Raise TerminatedError in the block when SIGTERM arrives; ignore further SIGTERMs until the block has ended.

    Yields:
        A list that holds the signal after it arrived, since a library inside the block may replace the exception.

    Example:
        >>> with sigterm_raises() as received:
        ...     pass
        >>> received
        []
    """
    received: list[int] = []

    def terminate(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        received.append(number)
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)
