"""The launcher of a job: its process and the signals to it; and one attempt of a supervised job, with its reports."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdx.cli.common.processes import exit_reason, kill_group
from hvdx.cli.common.reachable import absent_hosts, ssh_command, with_ssh
from hvdx.comm import supervision
from hvdx.comm.preemption import REQUEUE_CODE
from hvdx.comm.waiting import LIMIT_VARIABLE, time_limit, until
from hvdx.log import Log

_log = Log(__name__)

_PR_SET_PDEATHSIG = 1  # prctl(2)


class Signals:
    """Signals to this process, which are passed on to the launcher.

    Args:
        shared: whether a signal of the terminal reaches the launcher, too.

    Attributes:
        received: signals that ask the job to end.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    # Those of the user's own, which ask for something else.
    OTHERS = (signal.SIGUSR2, signal.SIGCONT)

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self.received: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Signals":
        self._before = {number: signal.signal(number, self._handle) for number in (*self.NUMBERS, *self.OTHERS)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if number not in self.OTHERS:
            self.received.append(number)
        if self.process is not None and not (self._shared and number == signal.SIGINT):
            self.process.send_signal(number)


def run_launcher(command: Sequence[str]) -> int:
    """Run a launcher in this terminal, and return its exit code, or that of a signal; see `code_after`.

    Raises:
        OSError: if it cannot be started.
    """
    with Signals(shared=_is_in_foreground()) as signals:
        process = subprocess.Popen(command, preexec_fn=_end_with_parent())  # noqa: PLW1509
        signals.process = process
        if signals.received:  # while it was started
            process.send_signal(signals.received[-1])
        code = process.wait()
    return code_after(signals.received, 128 - code if code < 0 else code)


def code_after(received: Sequence[int], code: int) -> int:
    """Return the exit code of a job; if a signal has ended it, say so, and return what shells do: 130 for Ctrl-C."""
    if code in (0, REQUEUE_CODE) or (signal.SIGINT not in received and signal.SIGTERM not in received):
        return code
    number = signal.SIGINT if signal.SIGINT in received else signal.SIGTERM
    _log.warning(f"ended by {signal.Signals(number).name}{' (Ctrl-C)' * (number == signal.SIGINT)}.")
    return 128 + number


def _end_with_parent() -> Callable[[], object]:
    """Return a function for a new process: if its parent is killed, the launcher is to end its ranks."""
    library = ctypes.CDLL(None)
    return lambda: library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_in_foreground() -> bool:
    """Return whether the terminal sends its signals to this process group, to which the launcher belongs."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # there is none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


# ssh asks the host after this many seconds of silence, and gives up after this many questions without an answer.
_ALIVE = ["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=3", "-o", "ControlPath=none"]
# ssh's own exit code.
_BROKEN = 255
# Seconds until a connection is made again that has broken although the host answers.
_AGAIN = 5.0


class Lifelines:
    """Connections by ssh, one to each other host; none where something else than ssh reaches the hosts.

    A host is lost if its connection breaks, and it does not answer when it is asked again: after 4 to 10 seconds of
    silence.

    Args:
        hosts: names of hosts; this machine is left out.
        lost: function that is called, in a thread, with the name of a host that is lost and the reason.
        absent: function that returns the hosts that do not answer, with the reasons.

    Example:
        >>> with Lifelines(["localhost"], print):
        ...     pass  # the job
    """

    def __init__(
        self,
        hosts: Sequence[str],
        lost: Callable[[str, str], None],
        absent: Callable[[list[str]], dict[str, str]] = absent_hosts,
    ):
        self._lost, self._absent = lost, absent
        self._over, self._lock = threading.Event(), threading.Lock()
        self._held: dict[str, subprocess.Popen[bytes]] = {}
        self._threads = [threading.Thread(target=self._watch, args=(host,), daemon=True) for host in with_ssh(hosts)]

    def __enter__(self) -> "Lifelines":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over.set()
            for process in self._held.values():
                with contextlib.suppress(OSError):
                    process.kill()
        for thread in self._threads:
            thread.join()

    def _watch(self, host: str) -> None:
        """Hold a connection to a host until it is lost, or the job is over."""
        # With another code the host refuses the command, and is not watched.
        while self._hold(host) == _BROKEN and not self._over.is_set():
            reason = self._absent([host]).get(host)
            if reason and not self._over.is_set():
                self._lost(host, reason)
                return
            self._over.wait(_AGAIN)

    def _hold(self, host: str) -> int | None:
        """Hold a connection until it breaks, or until the job is over; return the exit code of ssh."""
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        with self._lock:
            if self._over.is_set():
                return None
            # It reads a pipe that nobody writes to, and ends there if this process ends.
            process = subprocess.Popen(
                ssh_command(host, "exec cat", _ALIVE),
                stdin=pipe,
                stdout=nothing,
                stderr=nothing,
                start_new_session=True,
            )
            self._held[host] = process
        with process:
            return process.wait()


# Bytes of each output that are kept for `find_failure`: tracebacks of TensorFlow on many ranks are long.
_KEPT = 100_000
# Seconds after the end of the launcher, or of a worker for which the others wait without end, until those that are left
# are killed.
_LINGER = 5.0
# Seconds for the rest of an output after that.
_KILLED = 1.0
# Seconds from the end of the last worker's script until a launcher that has not ended is killed; between two looks.
_END_SECONDS, _LOOK_SECONDS = 60.0, 1.0
# Open MPI's line for a collective that a death has ended (75, MPI_ERR_PROC_FAILED) or another rank (77, revoked).
_NOISE = re.compile(rb"NBC_Progress: an error 7[57] was found during schedule \w+ at row-offset \d+ - [a-z ]*\n\n?")


@dataclass
class Attempt:
    """Course of one attempt; times are those of `time.monotonic`.

    Attributes:
        began, ended: times of the start and the end of the launcher.
        trained: time of the end of the first step; None before it.
        saves: whether the training has a `Checkpoint`.
        saved: time at which the state of the newest checkpoint was copied; None without one.
        position: position of that checkpoint, as in "step 120 of epoch 3".
        code: exit code of the launcher.
        text: end of its output.
        left: exit code of each worker that has ended; none unless the job survives the death of a rank.
        over: time at which the script of the last living worker had ended; None before, and unless the job survives.
        folders: folders of its checkpoints.
        gave_up: whether a worker has waited in vain for another one, and has ended.
        heard: time of the last report.
        unwritten: whether rank 0 has died in the last callbacks of a fit.
        absent: sentence about a worker that has died before it joined the others, which wait for it without end.
    """

    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    trained: float | None = None
    saves: bool = False
    saved: float | None = None
    position: str = ""
    code: int = 0
    text: str = ""
    left: list[int] = field(default_factory=list)
    over: float | None = None
    folders: set[str] = field(default_factory=set)
    gave_up: bool = False
    heard: float = field(default_factory=time.monotonic)
    unwritten: bool = False
    absent: str = ""
    _beside: set[object] = field(default_factory=set)
    _ended: set[object] = field(default_factory=set)
    _living: list[object] | None = None
    # Code and host of each worker that has died.
    _dead: dict[object, tuple[int, object]] = field(default_factory=dict)

    def take(self, reports: Sequence[Mapping[str, object]]) -> None:
        """Take over what ranks have reported."""
        for report in reports:
            self.heard = time.monotonic()
            if report["kind"] == "gave up":
                self.gave_up = True
            elif report["kind"] == "unwritten":
                self.unwritten = True
            elif report["kind"] == "training":
                self.trained = self.trained if self.trained is not None else time.monotonic()
                self.saves = bool(report.get("saves"))
            elif report["kind"] == "saved":
                self.saved = time.monotonic() - float(str(report.get("seconds", 0)))
                self.position, self.saves = str(report.get("position", "")), True
                self.folders.add(str(report.get("folder", "")))
            elif report["kind"] in ("spare", "server"):
                # It ends with 0, whatever the workers do.
                self._beside.add(report.get("rank"))
            elif report["kind"] == "over":
                living = report.get("living")
                self._note_end(report.get("rank"), living if isinstance(living, list) else [])
            elif report["kind"] == "left" and report.get("rank") not in self._beside:
                code = int(str(report.get("code", 1)))
                # Its script had ended, and its end in MPI took too long; see `hvdx.comm.surviving`.
                code = 0 if code == -signal.SIGALRM and report.get("rank") in self._ended else code
                self.left.append(code)
                if code:
                    self._dead[report.get("rank")] = code, report.get("host", "")
                if code and not report.get("joined", True):
                    who = f"rank {report.get('rank')} on {report.get('host', '')}"
                    self.absent = f"{who} died before it had joined the others: {exit_reason(code)}"

    def _note_end(self, rank: object, living: list[object]) -> None:
        """Note that the script of a rank has ended, and the workers of its last exchange."""
        self._ended.add(rank)
        if rank not in self._beside:
            self._living = min(living, self._living or living, key=len)
            if self.over is None and len(self._ended - self._beside) >= len(self._living):
                self.over = time.monotonic()

    def late_deaths(self) -> list[str]:
        """Describe the deaths after the last exchange, which no other worker has seen; rank 0 writes for all."""
        living = self._living or []
        lines = [
            f"rank {rank} on {host} died after the last exchange: {exit_reason(code)}"
            for rank, (code, host) in self._dead.items()
            if rank in living
        ]
        # Once its exit handlers have begun, a script has written its files.
        if self.unwritten or (living and living[0] in self._dead.keys() - self._ended):
            lines.append(
                "rank 0 is dead, and with it may be what the script writes there after the last exchange; so the exit "
                "code is 1"
            )
            self.code = self.code or 1
        return lines

    @property
    def useful(self) -> float:
        """Seconds of training that a later attempt builds on."""
        return 0.0 if self.saved is None else max(0.0, self.saved - self._first)

    @property
    def lost(self) -> float:
        """Seconds of training since the newest checkpoint, or since the first step."""
        return max(0.0, self.ended - (self._first if self.saved is None else self.saved)) if self.has_trained else 0.0

    @property
    def has_trained(self) -> bool:
        """Whether it has trained a step, or saved."""
        return self.trained is not None or self.saved is not None

    @property
    def _first(self) -> float:
        # A loop of the user's own saves, but reports no step.
        return self.began if self.trained is None else self.trained


def run_attempt(command: Sequence[str], signals: Signals, hosts: Sequence[str] = ()) -> Attempt:
    """Run the launcher to its end, with its output on that of this process; kill it if a host is lost.

    The launcher has a session of its own, so that a signal of the terminal reaches it once, and no standard input.

    Raises:
        OSError: if it cannot be started.
    """
    attempt = Attempt()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # No other thread runs here: the copies have ended.
        preexec_fn=_end_with_parent(),  # noqa: PLW1509
    )
    signals.process = process
    if signals.received:  # between two attempts
        process.send_signal(signals.received[-1])
    assert process.stdout is not None
    assert process.stderr is not None
    kept = [bytearray(), bytearray()]
    copies = [
        threading.Thread(target=_copy, args=(stream.fileno(), target, text, attempt), daemon=True)
        for stream, target, text in ((process.stdout, 1, kept[0]), (process.stderr, 2, kept[1]))
    ]
    for copy in copies:
        copy.start()
    losses: list[str] = []

    def end(host: str, reason: str) -> None:
        losses.append(f"host {host} is lost: {reason}")
        _log.warning(losses[-1])
        kill_group(process)

    try:
        with Lifelines(hosts, end):
            attempt.code = _wait(process, attempt)
    finally:
        signals.process = None
        # A connection of the launcher to a lost host holds its output, too.
        until(lambda: not any(copy.is_alive() for copy in copies), 0.0 if losses else _LINGER)
        # Ranks on this machine that have outlived their launcher.
        kill_group(process)
    until(lambda: not any(copy.is_alive() for copy in copies), _KILLED)
    if attempt.left and not attempt.code and attempt.over is None:
        # A job has succeeded if a rank has: the launcher ends with 0 also if all have died.
        attempt.code = 0 if 0 in attempt.left else attempt.left[-1]
    late = attempt.late_deaths()
    for line in late:
        _log.warning(f"{line}.")
    attempt.ended = time.monotonic()
    if attempt.absent:
        losses.append(attempt.absent)
    said = [*(f"hvdx: {line}".encode() for line in losses + late), *map(bytes, kept[::-1])]
    attempt.text = b"\n".join(said).decode(errors="replace")
    return attempt


def _wait(process: subprocess.Popen[bytes], attempt: Attempt) -> int:
    """Wait for the launcher, and return its exit code; 0 if the workers have ended and MPI does not.

    A launcher whose ranks may die alone waits for one that is stopped without end.
    """
    limit = time_limit()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_SECONDS)
        silent = time.monotonic() - attempt.heard
        if attempt.over is not None and time.monotonic() - attempt.over > _END_SECONDS:
            code, why = 0, f"the workers have ended, and MPI has not after {_END_SECONDS:.0f} s: it is ended."
        elif (attempt.absent and silent > _LINGER) or (attempt.gave_up and silent > limit):
            stands = f"no worker has moved for {limit:.0f} s ({LIMIT_VARIABLE})"
            code, why = 1, f"{attempt.absent or stands}; the job is ended."
        else:
            continue
        _log.warning(why)
        kill_group(process)
        process.wait()
        return code


def _copy(source: int, target: int, kept: bytearray, attempt: Attempt) -> None:
    """Copy an output as it comes, since progress bars do not end their lines."""
    rest, open_ = b"", True
    while data := os.read(source, 1 << 16):
        shown, reports, rest = supervision.split(rest + data)
        attempt.take(reports)
        shown = _NOISE.sub(b"", shown)
        kept += shown
        del kept[:-_KEPT]
        open_ = open_ and _write(target, shown)
    _write(target, rest)


def _write(target: int, data: bytes) -> bool:
    """Write all bytes; return False if nobody reads them any more."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(target, data) :]
        return True
    return False
