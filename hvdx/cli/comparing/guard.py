"""Guard of one run: starts a command, and ends it when standard input closes, because `hvdx compare` may be killed.

    python guard.py GRACE COMMAND [ARGUMENT ...]

It starts within milliseconds, since it imports nothing of hvdx. The exit code is that of the command; 128 + N for the
signal N.
"""

import os
import signal
import subprocess
import sys
import threading


def main(argv: list[str]) -> int:
    """Run the command until it ends or standard input closes."""
    grace, *command = argv
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"Error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    ending = threading.Event()
    threading.Thread(target=_end_with_input, args=(process, float(grace), ending), daemon=True).start()
    code = process.wait()
    if ending.is_set():
        # A shell that was terminated leaves its own children, such as the training, behind.
        os.killpg(0, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _end_with_input(process: "subprocess.Popen[bytes]", grace: float, ending: threading.Event) -> None:
    """Wait for the end of standard input; then give the command some seconds, and kill the process group."""
    while os.read(0, 1):
        pass
    # mpirun ends its ranks, which may be in other process groups, only if it has time to.
    ending.set()
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
