"""A signal ends a job with a line and the exit code that shells use; other ends keep the code of the launcher."""

import os
import signal
import subprocess
import sys
import time

import pytest

from hvdx.cli.supervising.attempt import Signals
from tests.launch import ROOT

CODE = "import sys; from hvdx.cli.supervising.attempt import run_launcher; sys.exit(run_launcher(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("number", "script", "code", "said"),
    [
        (signal.SIGINT, "trap 'exit 1' INT; while :; do sleep 0.02; done", 130, "hvdx: ended by SIGINT (Ctrl-C)."),
        (signal.SIGTERM, "exec sleep 60", 143, "hvdx: ended by SIGTERM."),
        # The training has been saved, to be continued.
        (signal.SIGTERM, "trap 'exit 75' TERM; while :; do sleep 0.02; done", 75, ""),
        (signal.SIGUSR1, "trap 'exit 3' USR1; while :; do sleep 0.02; done", 3, ""),
        (signal.SIGUSR2, "trap 'exit 4' USR2; while :; do sleep 0.02; done", 4, ""),
        (None, "exit 3", 3, ""),
        (None, "kill -9 $$", 137, ""),
    ],
)
def test_exit_code_and_line(number, script, code, said):
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "sh", "-c", f"echo; {script}"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "\n"
    time.sleep(0.1)
    if number is not None:
        os.kill(process.pid, number)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err.strip()) == (code, said)


def test_signal_of_the_terminal_is_not_sent_twice():
    with Signals(shared=True) as signals, subprocess.Popen(["sleep", "60"]) as process:
        signals.process = process
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        assert (signals.received, process.poll()) == ([signal.SIGINT], None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
