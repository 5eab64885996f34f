"""Build of a Horovod wheel from the patched source, with all output in a log."""

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO

from hvdx.cli.common.processes import process_group
from hvdx.errors import HvdxError

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


_ERROR = re.compile(r"error: |CMake Error|undefined reference|ld returned|[A-Z]\w+Error: |Killed|\*\*\* ")
# pip adds its own "error: subprocess-exited-with-error", which does not name the cause.
_NOISE = re.compile(r"subprocess-exited-with-error|-Werror|\bwarning: ")
_TAIL = 30  # lines


class BuildError(HvdxError):
    """Raised when Horovod's build fails; the message has the relevant lines and the path of the log."""


def switches(gpu: str | None, gloo: bool) -> dict[str, str]:
    """Return the environment variables that select the parts of Horovod to build.

    Example:
        >>> switches(None, gloo=False)["HOROVOD_WITHOUT_GLOO"]
        '1'
    """
    chosen = {f"HOROVOD_WITH_{name}": "1" for name in ("TENSORFLOW", "MPI")}
    chosen |= {f"HOROVOD_WITHOUT_{name}": "1" for name in ("PYTORCH", "MXNET")}
    chosen["HOROVOD_WITH_GLOO" if gloo else "HOROVOD_WITHOUT_GLOO"] = "1"
    if gpu:
        chosen["HOROVOD_GPU_OPERATIONS"] = gpu.upper()
    return chosen


def default_jobs() -> int:
    """Return the number of parallel compilers: one for each core, limited by memory."""
    cores = len(os.sched_getaffinity(0))
    # A compiler needs almost 2 GB for Horovod's TensorFlow operations.
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return max(1, min(cores, int(gigabytes / 2)))


def build(source: Path, folder: Path, env: Mapping[str, str], jobs: int, log: Path) -> Path:
    """Build a wheel, and return its path.

    Args:
        source: folder of the patched source.
        folder: folder for the wheel.
        env: environment variables of the build, including `switches()`.
        jobs: number of parallel compilers.
        log: file for all output.

    Raises:
        BuildError: if the build fails.
    """
    options = ["--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    complete = {
        **env,
        "MAKEFLAGS": f"-j{jobs}",
        "CMAKE_GENERATOR": "Unix Makefiles",  # its lines carry the percentage
        # Each build has a new source folder; without these settings, ccache would miss every time.
        "CCACHE_BASEDIR": env.get("CCACHE_BASEDIR", str(source)),
        "CCACHE_NOHASHDIR": env.get("CCACHE_NOHASHDIR", "1"),
    }
    code = _run_logged(command, complete, log)
    wheels = list(folder.glob("horovod-*.whl"))
    if code != 0 or len(wheels) != 1:
        lines = relevant_lines(log.read_text(encoding="utf-8", errors="replace"))
        raise BuildError(
            f"building Horovod: expected a wheel, got exit code {code}:\n"
            + "\n".join(f"    {line}" for line in lines)
            + f"\n  Do: repair the cause that these lines name, and run the command again. The whole log: {log}"
        )
    return wheels[0]


def relevant_lines(log: str) -> list[str]:
    """Return at most 30 lines of a log: those from the first error on, else the last ones.

    Example:
        >>> relevant_lines("[ 1%] Building\\na.cc:1: fatal error: mpi.h: No such file\\nmake: *** [all] Error 2")[0]
        'a.cc:1: fatal error: mpi.h: No such file'
    """
    lines = [line.rstrip()[:300] for line in log.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if _ERROR.search(line) and not _NOISE.search(line):
            return lines[number : number + _TAIL]
    return lines[-_TAIL:]


def _run_logged(command: list[str], env: Mapping[str, str], log: Path) -> int:
    log.parent.mkdir(0o755, parents=True, exist_ok=True)
    with (
        log.open("w", encoding="utf-8") as file,
        Progress("building Horovod") as progress,
        process_group(command, env, merged=True) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            progress.feed(line)
        return process.wait()
