"""Python processes that have TensorFlow already: copies (forks) of one that imported it.

An import of TensorFlow and Keras takes five seconds of a core, which a test on four ranks would pay four times.
`command` gives a program for the launcher to start in the place of `python`. It hands its arguments, environment,
folder and standard streams to the server, which forks; it passes signals on, and ends as the copy ends. hvdx, mpi4py
and Horovod are not imported before the fork, so a copy starts them as a new process would.

A copy differs from a new process in what Python does before a script: no `sitecustomize` of the test's runs, and
variables that TensorFlow or Numba read when they are imported are those of the server. Tests that mean that start new
processes.
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
# What a launcher sends a rank, and what tests do.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCONT)

_server: "tuple[subprocess.Popen[bytes], str] | None" = None


def command(environment: Mapping[str, str]) -> list[str]:
    """What to start in place of `python`; the server is started with it the first time.

    Args:
        environment: of the server. A copy has the environment of who asks for it.
    """
    global _server
    if _server is None or _server[0].poll() is not None:
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
        _server = server, address
        atexit.register(_end, server, folder)
    # Without site-packages it starts in milliseconds.
    return [sys.executable, "-I", "-S", __file__, "ask", _server[1]]


def _end(server: "subprocess.Popen[bytes]", folder: str) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait(20)
    shutil.rmtree(folder)


# -- in place of python -----------------------------------------------------------------------------------------------


def _ask(address: str, program: list[str]) -> None:
    """Have a copy run the program, and end as it ends."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    asked = json.dumps({"program": program, "folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    socket.send_fds(link, [len(asked).to_bytes(8, "little")], [0, 1, 2])
    link.sendall(asked)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, frame: link.send(bytes([number])))
    said = link.recv(8)
    status = int.from_bytes(said, "little", signed=True) if said else 1
    if status < 0:
        if -status in _PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# -- the server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """What a copy is to be."""

    program: list[str]
    folder: str
    environment: dict[str, str]
    streams: list[int]


class _Server:
    """Forks for whoever asks."""

    def __init__(self, listening: socket.socket):
        for name in _PRELOADED:
            importlib.import_module(name)
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("an import has started threads: such a process cannot be copied")
        gc.collect()
        gc.freeze()
        self._listening = listening
        self._copies: dict[socket.socket, int] = {}
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> _Asked | None:
        """Returns in each copy, with what is asked of it; in the server when standard input ends, with None."""
        with selectors.DefaultSelector() as selector:
            for source in (self._listening, self._woken, 0):
                selector.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    source = key.fileobj
                    if source == 0:
                        for pid in self._copies.values():
                            os.kill(pid, signal.SIGKILL)
                        return None
                    if source is self._listening:
                        asked = self._copy(selector)
                        if asked is not None:
                            return asked
                    elif source is self._woken:
                        self._woken.recv(4096)
                        self._say_who_ended(selector)
                    elif isinstance(source, socket.socket) and source in self._copies:
                        self._pass_on(source, selector)

    def _copy(self, selector: selectors.BaseSelector) -> _Asked | None:
        """Fork for the next who asks; returns what is asked in the copy, and None in the server."""
        link, _ = self._listening.accept()
        asked = _receive(link)
        pid = os.fork()
        if pid:
            for stream in asked.streams:
                os.close(stream)
            self._copies[link] = pid
            selector.register(link, selectors.EVENT_READ)
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._listening, self._woken, self._wake, link, *self._copies):
            other.close()
        _become(asked)
        return asked

    def _pass_on(self, link: socket.socket, selector: selectors.BaseSelector) -> None:
        """Send a copy the signals that who asked for it got."""
        numbers = link.recv(64)
        if not numbers:
            # Killed.
            selector.unregister(link)
        for number in numbers or [signal.SIGKILL]:
            os.kill(self._copies[link], number)

    def _say_who_ended(self, selector: selectors.BaseSelector) -> None:
        for link, pid in list(self._copies.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    link.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))
                with contextlib.suppress(KeyError):
                    selector.unregister(link)
                link.close()
                del self._copies[link]


def _receive(link: socket.socket) -> _Asked:
    size, streams, _, _ = socket.recv_fds(link, 8, 3)
    asked = b""
    while len(asked) < int.from_bytes(size, "little"):
        asked += link.recv(1 << 20)
    return _Asked(streams=streams, **json.loads(asked))


def _become(asked: _Asked) -> None:
    """Take over the streams, the folder and the environment of who asks."""
    for number, stream in enumerate(asked.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked.folder)
    os.environ.clear()
    os.environ.update(asked.environment)
    # Python's own generator starts anew in a fork; NumPy's does not.
    np.random.seed()


def _run(asked: _Asked, installed: list[str]) -> None:
    """Be `python program...`.

    Args:
        asked: the program and its surroundings.
        installed: Python's own folders, without those of a script or PYTHONPATH.
    """
    kind, *arguments = asked.program
    paths = [path for path in asked.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"-c": "", "-m": asked.folder}.get(kind, str(Path(kind).resolve().parent))
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
        sys.argv[:] = asked.program
        main.__file__ = kind
        code = compile(Path(kind).read_bytes(), kind, "exec")
    exec(code, main.__dict__)


def _end_as(program: Callable[[], None]) -> None:
    """Run it and end as Python does, but without a second of taking TensorFlow's objects down one by one.

    A program that calls `sys.exit` ends in Python's own way.
    """
    status = 0
    try:
        program()
    except SystemExit:
        raise
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()
    atexit._run_exitfuncs()
    # mpi4py does it after the last of Python's objects.
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        _ask(sys.argv[2], sys.argv[3:])
    import numpy as np

    import_paths = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    wanted = _Server(socket.socket(fileno=int(sys.argv[2]))).serve()
    if wanted is None:
        os._exit(0)
    _end_as(lambda: _run(wanted, import_paths))
