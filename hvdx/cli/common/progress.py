"""How far a long piece of work is, on standard error: one line on a terminal, a line now and then elsewhere."""

import sys
import time

from hvdx.report.table import quantity

_QUIET_SECONDS = 1.0
_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 10.0


class Progress:
    """Call it with the bytes that are done and those there are; nothing is shown of work that is over in a second.

    Args:
        what: what the line begins with.
    """

    def __init__(self, what: str):
        self._what, self._begin = what, time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._begin + (_QUIET_SECONDS if self._terminal else _PLAIN_SECONDS)
        self._width = 0

    def __call__(self, done: int, total: int) -> None:
        """Show it, if it is time to."""
        now = time.monotonic()
        if now < self._next or not done:
            return
        self._next = now + (_TERMINAL_SECONDS if self._terminal else _PLAIN_SECONDS)
        rate = done / (now - self._begin)
        left = max(total - done, 0) / rate
        line = (
            f"{self._what}: {min(done / (total or 1), 1):4.0%} of {quantity(total, 'B')} read, "
            f"{quantity(rate, 'B/s')}, {left:.0f} s left"
        )
        if self._terminal:
            sys.stderr.write(f"\r{line.ljust(self._width)}")
            self._width = len(line)
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Take the line away."""
        if self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            sys.stderr.flush()
            self._width = 0
