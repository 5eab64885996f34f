"""Progress of long work on standard error: one line that updates on a terminal, a line every 10 s elsewhere."""

import sys
import time

from hvdx.report.table import quantity

_QUIET_SECONDS = 1.0
_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 10.0


class Progress:
    """Progress line, updated by calls with the bytes done and the total. Work of less than a second shows nothing.

    Args:
        what: first words of the line.
    """

    def __init__(self, what: str):
        self._what, self._begin = what, time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self._begin + (_QUIET_SECONDS if self._terminal else _PLAIN_SECONDS)
        self._width = 0

    def __call__(self, done: int, total: int) -> None:
        """Show the progress if the last line is old enough."""
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
        """Erase the line."""
        if self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            sys.stderr.flush()
            self._width = 0
