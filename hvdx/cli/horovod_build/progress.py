"""Progress of a build: one line that updates on a terminal, a line every 15 s elsewhere."""

import re
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s*(.*)")
_TERMINAL_INTERVAL = 0.5  # seconds
_PLAIN_INTERVAL = 15.0  # seconds


class Progress:
    """Progress line of a build, updated from the build's output until the `with` block ends.

    Args:
        what: first words of the line.
        stream: stream for the line; standard output by default.

    Example:
        >>> with Progress("Horovod", sys.stderr) as progress:
        ...     progress.feed("[ 37%] Building CXX object common.cc.o")
        >>> progress.percent
        37
    """

    def __init__(self, what: str, stream: TextIO | None = None):
        self.what = what
        self.percent = 0
        self.step = "configuring"
        self._stream = sys.stdout if stream is None else stream
        self._terminal = self._stream.isatty()
        self._start = time.monotonic()
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def feed(self, line: str) -> None:
        """Read the progress from one line of the build's output."""
        match = _PERCENT.match(line)
        if match:
            self.percent = max(self.percent, int(match.group(1)))
            self.step = match.group(2).split("/")[-1].removesuffix(".o") or self.step

    def line(self) -> str:
        """Return the current progress line."""
        elapsed = int(time.monotonic() - self._start)
        return f"hvdx: {self.what}  {self.percent:3d} %  {elapsed // 60}:{elapsed % 60:02d}  {self.step}"

    def __enter__(self) -> "Progress":
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._ticker.join()
        if self._terminal:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def _tick(self) -> None:
        interval = _TERMINAL_INTERVAL if self._terminal else _PLAIN_INTERVAL
        while not self._done.wait(interval):
            text = self.line()
            self._stream.write(f"\r\033[K{text[:100]}" if self._terminal else f"{text}\n")
            self._stream.flush()
