"""One attempt: the output passes through, the reports do not, and signals reach the launcher."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdx.cli.supervising.attempt import Attempt, Signals, run_attempt
from hvdx.comm import supervision
from tests.launch import ROOT

SAVED = r"""printf 'bar \r\036{"kind": "training", "saves": true}\n\036{"kind": "saved", "position": "epoch 2"' >&2"""
REST = r"""sleep 0.2; printf ', "seconds": 0.5}\nerror\n' >&2; printf 'out\r'; exit 3"""


def test_output_passes_through_without_the_reports(capfd):
    with Signals() as signals:
        attempt = run_attempt(["sh", "-c", f"{SAVED}; {REST}"], signals)
    assert tuple(capfd.readouterr()) == ("out\r", "bar \rerror\n")
    assert (attempt.code, attempt.saves, attempt.position) == (3, True, "epoch 2")
    assert attempt.trained is not None
    assert attempt.ended - 0.5 - attempt.saved < 0.2
    assert "error" in attempt.text
    assert "out" in attempt.text


def test_lost_and_useful_seconds():
    assert (Attempt(0.0, 90.0).lost, Attempt(0.0, 90.0).useful) == (0.0, 0.0)
    assert (Attempt(0.0, 90.0, 30.0).lost, Attempt(0.0, 90.0, 30.0).useful) == (60.0, 0.0)
    saved = Attempt(0.0, 90.0, 30.0, True, 70.0)
    assert (saved.lost, saved.useful) == (20.0, 40.0)


@pytest.mark.parametrize("name", ["INT", "TERM", "USR1"])
def test_signals_reach_the_launcher(name, capfd):
    number = signal.Signals[f"SIG{name}"]
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    with Signals() as signals:
        attempt = run_attempt(["sh", "-c", f"trap 'exit 7' {name}; while :; do sleep 0.05; done"], signals)
    assert (attempt.code, signals.received) == (7, [number])


def test_launcher_that_does_not_end_after_its_workers_is_killed(capfd, monkeypatch):
    """Rank 1 has died before, and rank 2 is the last to end; rank 3 is a server."""
    monkeypatch.setattr("hvdx.cli.supervising.attempt._END_SECONDS", 0.5)
    monkeypatch.setattr("hvdx.cli.supervising.attempt._LOOK_SECONDS", 0.05)

    def report(**values):
        return rf"""printf '\036{json.dumps(values)}\n' >&2"""

    ended = [report(kind="over", rank=rank, living=living) for rank, living in ((3, 1), (0, 3), (2, 2))]
    before = [report(kind="server", rank=3), report(kind="left", rank=1, code=-9), *ended]
    with Signals() as signals:
        early = run_attempt(["sh", "-c", "; ".join([*before[:-1], "sleep 1; exit 3"])], signals)
        late = run_attempt(["sh", "-c", "; ".join([*before, "exec sleep 60"])], signals)
    assert (early.code, early.over) == (3, None)
    assert late.code == 0
    assert late.ended - late.began < 5
    assert "the workers have ended, and MPI has not" in capfd.readouterr().err


def test_launcher_ends_with_its_supervisor(tmp_path):
    code = (
        "import sys; from hvdx.cli.supervising.attempt import Signals, run_attempt\n"
        "with Signals() as signals: run_attempt(['sh', '-c', 'echo $$; exec sleep 60'], signals)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as process:
        pid = int(process.stdout.readline())
        process.kill()
        # A process that has ended has no command line; nobody may have waited for it yet.
        line, end = Path(f"/proc/{pid}/cmdline"), time.monotonic() + 10
        while line.exists() and line.read_bytes():
            assert time.monotonic() < end
            time.sleep(0.02)


def test_report_is_written_for_a_supervised_job_only(monkeypatch, capfd):
    monkeypatch.delenv(supervision.VARIABLE, raising=False)
    supervision.report("training")
    monkeypatch.setenv(supervision.VARIABLE, "x:1")
    supervision.report("training", saves=True)
    written = capfd.readouterr().err.encode()
    assert supervision.split(written) == (b"", [{"kind": "training", "saves": True}], b"")


def test_separators_of_other_programs_stay():
    assert supervision.split(b"a\x1eb\nc") == (b"a\x1eb\nc", [], b"")
    assert supervision.split(b"\x1e5\n") == (b"\x1e5\n", [], b"")
    assert supervision.split(b"\x1e" + b"x" * 5000)[2] == b""
