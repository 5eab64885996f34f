"""Start of one rank under `hvdx run`: set environment and output, then execute the program.

For a start within milliseconds it imports only `comm/launcher.py` of hvdx, by its path, and under `--survive` also
`comm/supervision.py`.

    python rank.py all|first PROGRAM [ARGUMENT ...]
"""

import ctypes
import math
import os
import select
import signal
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2)
# Seconds between two looks for a rank that is stopped.
_LOOK_SECONDS = 1.0


def main(argv: list[str]) -> None:
    """Set the environment, and execute the program in this process."""
    output, *program = argv
    launcher = _load("launcher")
    found = launcher.detect()
    rank, here = (found.rank, found.computing_here) if found is not None else (0, 1)
    # TensorFlow reads these when it starts, even if the script has not called hvdx.init() before.
    share = launcher.threads_for(here, chosen_by=launcher.TENSORFLOW_THREADS)
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(share.threads))
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", str(share.threads))
    # By default, each process of Python orders sets of strings in its own way, and ranks would have different
    # vocabularies from `list(set(words))`.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    # Hides TensorFlow's start-up notes, about twenty lines on each rank. Rank 0 still shows errors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if rank == 0 else "3")
    survives = os.environ.get("HVDX_SURVIVE") == "1"
    if rank and output == "first":
        if survives:
            # A rank that takes the place of rank 0 shows its output; see `hvdx.comm.surviving`.
            os.environ["HVDX_OUTPUT"] = str(os.dup(1))
            os.set_inheritable(int(os.environ["HVDX_OUTPUT"]), True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if survives:
        _run_beside(program, rank)
    _execute(program)


def _run_beside(program: list[str], rank: int) -> None:
    """Return in a child process; in this one, wait for it, and end so that the other ranks can go on.

    Open MPI ends the whole job if a process ends with an exit code that is not 0, but not after a signal.
    """
    library = ctypes.CDLL(None)
    heartbeat, beats = os.pipe()
    # Not a descriptor that the child inherits: the rank may be a grandchild, or started by another process.
    os.environ["HVDX_HEARTBEAT"] = f"/proc/{os.getpid()}/fd/{heartbeat}"
    # Python writes a byte to `woken` when a signal comes, such as that of the end of the child.
    ended, woken = os.pipe()
    for end in (ended, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if child == 0:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(child, number))
    status, joined = _wait(child, rank, (heartbeat, beats), ended)
    code = os.waitstatus_to_exitcode(status)
    _load("supervision").report("left", rank=rank, code=code, host=os.uname().nodename, joined=joined)
    if code:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _wait(child: int, rank: int, pipe: tuple[int, int], ended: int) -> tuple[int, bool]:
    """Wait for the child; end its rank if it is stopped, which `hvdx.comm.watchdog` explains.

    Args:
        pipe: ends of the pipe with the rank's heartbeat.
        ended: file descriptor with a byte when the child has ended.

    Returns:
        Status of the child, and whether its rank has joined the others.
    """
    heartbeat, beats = pipe
    process, limit, silent, told = 0, math.inf, 0.0, -math.inf
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status, bool(process or (select.select([heartbeat], [], [], 0)[0] and os.read(heartbeat, 1)))
        ready, _, _ = select.select([heartbeat, ended], [], [], _LOOK_SECONDS)
        if ended in ready:
            os.read(ended, 1 << 10)
        # Looks are counted, and not seconds: this process may have been stopped, too.
        silent = 0.0 if heartbeat in ready else silent + _LOOK_SECONDS
        lines = os.read(heartbeat, 1 << 16).splitlines() if heartbeat in ready else []
        if lines:
            process, limit = int(lines[-1].split()[0]), float(lines[-1].split()[1])
            # The pipe ends when the rank does.
            if beats >= 0:
                os.close(beats)
                beats = -1
            if time.monotonic() - told > limit / 4:
                told = time.monotonic()
                _load("supervision").report("moves", rank=rank)
        elif heartbeat in ready:
            # The child may start another program.
            limit, beats = math.inf, os.open(os.environ["HVDX_HEARTBEAT"], os.O_WRONLY)
        elif silent > limit:
            said = f"has been stopped for {limit:.0f} s (HVDX_TIMEOUT), and is ended."
            os.write(2, f"hvdx: rank {rank} on {os.uname().nodename} {said}\n".encode())
            os.kill(process, signal.SIGKILL)
            limit = math.inf


def _execute(program: list[str]) -> None:
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"hvdx run: {program[0]}: {error.strerror}")


def _load(name: str) -> Any:
    """Import a module of `hvdx.comm` that needs no others."""
    package = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    path = os.path.join(package, "comm", f"{name}.py")
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1:])
