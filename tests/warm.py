"""Fork server: Python processes forked from one that has imported TensorFlow.

An import of TensorFlow and Keras takes five seconds of a core, and a test on four ranks would need four of them.
`command` returns a client program for the launcher to start in place of `python`. The client sends its arguments,
environment, folder and standard streams to the server, which forks. It also passes signals on, and ends with the fork's
exit status. hvdx, mpi4py and Horovod are not imported before the fork, so a fork starts them like a new process.

Unlike a new process, a fork does not run the test's `sitecustomize`, and TensorFlow and Numba have read their
environment variables from the server's environment. Tests that depend on these start new processes.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PRELOADED = ("numpy", "keras", "tensorflow", "numba")
# Signals that launchers and tests send to a rank.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT)

# By the backend of Keras.
_servers: "dict[str, tuple[subprocess.Popen[bytes], str]]" = {}


def command(environment: Mapping[str, str]) -> list[str]:
    """Return the command to start in place of `python`; the first call with a backend of Keras starts its server.

    Args:
        environment: environment of the server. A fork gets the environment of its client.
    """
    backend = environment.get("KERAS_BACKEND", "tensorflow")
    if backend not in _servers or _servers[backend][0].poll() is not None:
        folder = tempfile.mkdtemp(prefix="hvdx-warm-")
        address = os.path.join(folder, "socket")
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address)
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", "serve", str(listening.fileno())],
            cwd=Path(__file__).parent.parent,
            env=dict(environment),
            stdin=subprocess.PIPE,
            pass_fds=(listening.fileno(),),
        )
        listening.close()
        _servers[backend] = server, address
        atexit.register(_end, server, folder)
    # Without site-packages the client starts in milliseconds.
    return [sys.executable, "-I", "-S", __file__, "ask", _servers[backend][1]]


def _end(server: "subprocess.Popen[bytes]", folder: str) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait(20)
    shutil.rmtree(folder)


# -- the client -------------------------------------------------------------------------------------------------------


def _request_fork(address: str, program: list[str]) -> None:
    """Have the server run the program in a fork, and end with its status."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    request = json.dumps({"program": program, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    socket.send_fds(link, [len(request).to_bytes(8, "little")], [0, 1, 2])
    link.sendall(request)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, frame: link.send(bytes([number])))
    answer = link.recv(8)
    status = int.from_bytes(answer, "little", signed=True) if answer else 1
    if status < 0:
        if -status in _PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# -- the server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    """Request for a fork: the program and its surroundings."""

    program: list[str]
    folder: str
    environment: dict[str, str]
    streams: list[int]


class _Server:
    """Server that forks itself for each client."""

    def __init__(self, listening: socket.socket):
        for name in _PRELOADED:
            # TensorFlow need not be there beside another backend of Keras.
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("an import has started threads: such a process cannot be forked")
        gc.collect()
        gc.freeze()
        self._listening = listening
        self._forks: dict[socket.socket, int] = {}
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> _Request | None:
        """Serve clients until standard input ends.

        Returns:
            In each fork, its request; in the server, None.
        """
        with selectors.DefaultSelector() as selector:
            for watched in (self._listening, self._woken, 0):
                selector.register(watched, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    source = key.fileobj
                    if source == 0:
                        for pid in self._forks.values():
                            os.kill(pid, signal.SIGKILL)
                        return None
                    if source is self._listening:
                        request = self._fork(selector)
                        if request is not None:
                            return request
                    elif source is self._woken:
                        self._woken.recv(4096)
                        self._report_ended(selector)
                    elif isinstance(source, socket.socket) and source in self._forks:
                        self._pass_signals_on(source, selector)

    def _fork(self, selector: selectors.BaseSelector) -> _Request | None:
        """Fork for the next client; return its request in the fork, and None in the server."""
        link, _ = self._listening.accept()
        request = _receive(link)
        pid = os.fork()
        if pid:
            for stream in request.streams:
                os.close(stream)
            self._forks[link] = pid
            selector.register(link, selectors.EVENT_READ)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._listening, self._woken, self._wake, link, *self._forks):
            other.close()
        _take_over(request)
        return request

    def _pass_signals_on(self, link: socket.socket, selector: selectors.BaseSelector) -> None:
        """Send a fork the signals that its client received."""
        numbers = link.recv(64)
        if not numbers:
            # The client was killed.
            selector.unregister(link)
        for number in numbers or [signal.SIGKILL]:
            os.kill(self._forks[link], number)

    def _report_ended(self, selector: selectors.BaseSelector) -> None:
        """Send the exit statuses of ended forks to their clients."""
        for link, pid in list(self._forks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    link.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))
                with contextlib.suppress(KeyError):
                    selector.unregister(link)
                link.close()
                del self._forks[link]


def _receive(link: socket.socket) -> _Request:
    size, streams, _, _ = socket.recv_fds(link, 8, 3)
    data = b""
    while len(data) < int.from_bytes(size, "little"):
        data += link.recv(1 << 20)
    return _Request(streams=streams, **json.loads(data))


def _take_over(request: _Request) -> None:
    """Take over the streams, the folder and the environment of the client."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    # A fork seeds Python's own random generator, but not NumPy's.
    np.random.seed()


def _run(request: _Request, installed: list[str]) -> None:
    """Run the program as `python program...` would.

    Args:
        request: the program and its surroundings.
        installed: Python's own folders, without those of a script or PYTHONPATH.
    """
    kind, *arguments = request.program
    paths = [path for path in request.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"-c": "", "-m": request.folder}.get(kind, str(Path(kind).resolve().parent))
    sys.path[:] = [first, *paths, *installed]
    importlib.invalidate_caches()
    if kind == "-m":
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        code = compile(arguments[0], "<string>", "exec")
    else:
        sys.argv[:] = request.program
        main.__file__ = kind
        code = compile(Path(kind).read_bytes(), kind, "exec")
    exec(code, main.__dict__)


def _end_as_python(program: Callable[[], None]) -> None:
    """Run the program and end as Python does, without the second that Python needs to destroy TensorFlow's objects.

    A program that calls `sys.exit` ends in Python's usual way.
    """
    status = 0
    try:
        program()
    except SystemExit:
        raise
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # mpi4py finalises MPI at the end of Python's own shutdown, which `os._exit` skips.
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        _request_fork(sys.argv[2], sys.argv[3:])
    import numpy as np

    # Without the folder of `-m` and PYTHONPATH, which each request names itself; with the checkout, if it is installed.
    import_paths = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    received = _Server(socket.socket(fileno=int(sys.argv[2]))).serve()
    if received is None:
        os._exit(0)
    request = received
    _end_as_python(lambda: _run(request, import_paths))
