"""The wheel of Horovod: its build from the patched source, the cache, its installation, and a test with two workers."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hvdx.cache import cache_folder
from hvdx.cli.common.mpi_tools import Mpi, launch, mpirun_command
from hvdx.cli.common.processes import child_environment, process_group, run
from hvdx.cli.horovod_build import source
from hvdx.cli.horovod_build.needs import unmet
from hvdx.errors import ConfigError, HvdxError
from hvdx.kernels import trust
from hvdx.log import Log

_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s*(.*)")
_TERMINAL_INTERVAL = 0.5  # seconds
_PLAIN_INTERVAL = 15.0  # seconds


class BuildProgress:
    """Progress line of a build, updated from the build's output until the `with` block ends.

    Args:
        what: first words of the line.
        stream: stream for the line; standard output by default.

    Example:
        >>> with BuildProgress("Horovod", sys.stderr) as progress:
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

    def __enter__(self) -> "BuildProgress":
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
        BuildProgress("building Horovod") as progress,
        process_group(command, env, merged=True) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            progress.feed(line)
        return process.wait()


_log = Log(__name__)

_METADATA = "metadata.json"


@dataclass(frozen=True)
class Key:
    """Settings of a build. Two keys that differ in any field have different names.

    Attributes:
        tensorflow: version of TensorFlow.
        mpi: vendor and version of the MPI.
        mpi_home: folder of the MPI, which the build writes into the wheel; "" for an MPI inside the environment, which
            the wheel finds by a relative path.
        gpu: "nccl", "mpi" or None.
        gloo: True if Gloo is built in.
        settings: environment variables with the folders of CUDA and NCCL.
    """

    tensorflow: str
    mpi: str
    mpi_home: str = ""
    gpu: str | None = None
    gloo: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    horovod: str = source.VERSION
    patches: int = source.REVISION
    python: str = sys.implementation.cache_tag
    platform: str = f"{sysconfig.get_platform()}-{''.join(platform.libc_ver())}"

    @property
    def name(self) -> str:
        """Readable folder name that ends with a digest of the whole key."""
        parts = [self.horovod, self.python, f"tf{self.tensorflow}", self.mpi.replace(" ", "")]
        parts += [f"gpu-{self.gpu}"] if self.gpu else []
        parts += ["gloo"] if self.gloo else []
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        return re.sub(r"[^\w.+-]", "_", "-".join([*parts, digest]))


def root() -> Path:
    """Return the folder of Horovod's wheels, sources, tools and logs."""
    return cache_folder() / "horovod"


def make_root() -> Path:
    """Create the folder of `root`, and make sure that no other user can write to it.

    Raises:
        ConfigError: if another user owns it, or all users may write to it.
    """
    # Not writable by the user's group, whatever the umask: what is in it is executed.
    root().mkdir(0o755, parents=True, exist_ok=True)
    # The user may have put a link there, to a larger disk.
    folder = root().resolve()
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o022 == 0o020:
        # An earlier version left the mode to the umask, which often allows the user's group to write.
        folder.chmod(0o755)
    try:
        trust.check(folder)
    except PermissionError as error:
        raise ConfigError(
            f"build-horovod: expected a cache folder of your own, got one that others can change: {error}. "
            f"Do: remove {folder}, or set HVDX_CACHE to another folder."
        ) from error
    return folder


def kept(key: Key, folder: Path) -> Path | None:
    """Return the wheel for a key from the cache `folder`.

    Returns:
        The wheel; None if there is none, its digest is wrong, or another user can have written it (with a warning).
    """
    metadata = _metadata(folder / key.name)
    wheel = folder / key.name / str(metadata.get("wheel", ""))
    if not wheel.is_file():
        return None
    try:
        trust.check(wheel.parent)
        trust.check(wheel)
    except PermissionError as error:
        _log.warning(f"the cached wheel is not used, and built again: {error}")
        return None
    return wheel if source.digest(wheel) == metadata.get("sha256") else None


def keep(key: Key, wheel: Path, folder: Path) -> Path:
    """Copy a wheel into the cache `folder`, and return its new path. An entry appears only when complete."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    try:
        entry = temporary / "entry"
        entry.mkdir(0o755)
        shutil.copyfile(wheel, entry / wheel.name)
        (entry / wheel.name).chmod(0o644)
        built = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        metadata = {"wheel": wheel.name, "sha256": source.digest(wheel), "built": built, "key": asdict(key)}
        (entry / _METADATA).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        target = folder / key.name
        if target.exists():
            os.rename(target, temporary / "old")
        os.rename(entry, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target / wheel.name


def _metadata(entry: Path) -> dict[str, Any]:
    try:
        found = json.loads((entry / _METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# Packages that Horovod imports at run time. They are not read from its metadata, which also accepts other releases of
# TensorFlow.
_RUNTIME = ("cloudpickle", "psutil", "pyyaml", "packaging")
_PIP_TIMEOUT = 600.0  # seconds
_PROOF_TIMEOUT = 120.0  # seconds
_WORKERS = 2
_LINES = 30  # of a failed proof's output

_PROOF = """
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
total = float(hvd.allreduce(tf.constant(float(hvd.rank() + 1)), op=hvd.Sum, name="proof"))
print(f"HVDX {hvd.rank()} of {hvd.size()}: {total:g};", flush=True)
hvd.shutdown()
"""


class ProofError(HvdxError):
    """Raised when the installed Horovod fails the all-reduce of two workers."""


def installed_digest() -> str:
    """Return the SHA-256 of the wheel of the installed Horovod; "" if none is installed or pip recorded no digest."""
    try:
        text = importlib.metadata.distribution("horovod").read_text("direct_url.json")
        return json.loads(text or "{}").get("archive_info", {}).get("hashes", {}).get("sha256", "")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def is_installed(wheel: Path) -> bool:
    """Return whether this environment's Horovod was installed from this wheel."""
    return installed_digest() == source.digest(wheel)


def install(wheel: Path) -> None:
    """Install a wheel, replacing any installed Horovod, and then Horovod's missing run-time packages.

    Raises:
        HvdxError: if pip fails.
    """
    _pip(["--no-deps", "--force-reinstall", str(wheel)])
    missing = unmet(_RUNTIME)
    if missing:
        _pip(missing)


def prove(mpi: Mpi) -> str:
    """Sum 1 and 2 over two workers with Horovod, and return the command line.

    Args:
        mpi: MPI that Horovod was built for.

    Raises:
        ProofError: if the launch fails, takes longer than 120 s, or prints another sum.
    """
    outcome = launch(_WORKERS, [sys.executable, "-c", _PROOF], _PROOF_TIMEOUT, mpi)
    command = shlex.join([*mpirun_command(_WORKERS, mpi), "python"])
    # Search the whole text, since launchers may join the lines of several ranks.
    answers = sorted(re.findall(r"HVDX (\d+ of \d+: [^;\n]*);", outcome.out))
    total = sum(range(1, _WORKERS + 1))
    expected = [f"{rank} of {_WORKERS}: {total}" for rank in range(_WORKERS)]
    if outcome.code == 0 and answers == expected:
        return command
    got = f"got: {', '.join(answers)}" if answers else f"got: {outcome.reason()}"
    raise ProofError(
        f"the {_WORKERS}-worker all-reduce: expected the sum {total} on each rank, {got}\n"
        f"  command: {command}\n"
        + "".join(f"    {line[:300]}\n" for line in outcome.text.splitlines()[-_LINES:])
        + "  Do: hvdx doctor, which finds the part that fails."
    )


def _pip(arguments: list[str]) -> None:
    options = ["--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    outcome = run(command, _PIP_TIMEOUT, child_environment())
    if outcome.code != 0:
        raise HvdxError(
            f"pip: expected it to install {arguments[-1]}, got: {outcome.reason()}. Do: {shlex.join(command)}"
        )
