"""SIGTERM as an exception, so that a command cleans up before it ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

#: Exit code of a command that SIGTERM ended.
TERMINATED = 128 + signal.SIGTERM


class TerminatedError(BaseException):
    """SIGTERM came. No Exception, so that nothing takes it for a damaged file."""


@contextmanager
def sigterm_raises() -> Iterator[list[int]]:
    """Raise TerminatedError in the block when SIGTERM comes; ignore further ones until the block has ended.

    Yields:
        The signals that came: a library inside the block may turn the exception into one of its own.

    Example:
        >>> with sigterm_raises() as came:
        ...     pass
        >>> came
        []
    """
    came: list[int] = []

    def terminate(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        came.append(number)
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)
