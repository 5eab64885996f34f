"""Connections to the hosts of a job, whose end shows that a host is lost; a launcher may wait for it without end."""

import contextlib
import subprocess
import threading
from collections.abc import Callable, Sequence

from hvdx.cli.common.reachable import absent_hosts, ssh_command, with_ssh

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
