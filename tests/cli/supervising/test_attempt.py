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
from hvdx.cli.supervising.supervisor import find_failure
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

    ended = [report(kind="over", rank=rank, living=living) for rank, living in ((3, [3]), (0, [0, 1, 2]), (2, [0, 2]))]
    before = [report(kind="server", rank=3), report(kind="left", rank=1, code=-9), *ended]
    with Signals() as signals:
        early = run_attempt(["sh", "-c", "; ".join([*before[:-1], "sleep 1; exit 3"])], signals)
        late = run_attempt(["sh", "-c", "; ".join([*before, "exec sleep 60"])], signals)
    assert (early.code, early.over) == (3, None)
    assert late.code == 0
    assert late.ended - late.began < 5
    assert "the workers have ended, and MPI has not" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("reports", "code", "said"),
    [
        # Rank 1 has seen no death; rank 2 has seen that of rank 0.
        ([("left", 0, -9), ("over", 1, [0, 1]), ("left", 1, 0)], 1, "rank 0 on a died after the last exchange"),
        ([("left", 1, -9), ("over", 0, [0, 1]), ("left", 0, 0)], 0, "rank 1 on a died after the last exchange"),
        ([("left", 0, -9), ("over", 2, [1, 2]), ("over", 1, [1, 2]), ("left", 1, -14), ("left", 2, 0)], 0, ""),
        (
            [("over", 0, [0, 1]), ("left", 0, -9), ("over", 1, [0, 1]), ("left", 1, 0)],
            0,
            "rank 0 on a died after the last",
        ),
        ([("left", 0, -9), ("unwritten",), ("over", 1, [1]), ("left", 1, 0)], 1, "rank 0 is dead"),
    ],
)
def test_death_after_the_last_exchange_is_told(reports, code, said, capfd):
    lines = []
    for kind, *values in reports:
        names = {"left": ("rank", "code"), "over": ("rank", "living")}.get(kind, ())
        lines.append(json.dumps({"kind": kind, "host": "a"} | dict(zip(names, values, strict=True))))
    with Signals() as signals:
        attempt = run_attempt(["sh", "-c", "; ".join(rf"printf '\036{line}\n' >&2" for line in lines)], signals)
    assert attempt.code == code
    err = capfd.readouterr().err
    assert said in err if said else not err
    assert (find_failure(attempt.text, attempt.code) is not None) is bool(code)


def test_launcher_whose_last_ranks_are_stopped_is_killed(capfd, monkeypatch):
    monkeypatch.setenv("HVDX_TIMEOUT", "0.5")
    monkeypatch.setattr("hvdx.cli.supervising.attempt._LOOK_SECONDS", 0.05)
    report = r"""printf '\036{"kind": "%s"}\n' >&2; """
    with Signals() as signals:
        moves = run_attempt(
            ["sh", "-c", report % "gave up" + (f"sleep 0.3; {report % 'moves'}" * 4) + "exit 3"], signals
        )
        stands = run_attempt(["sh", "-c", report % "gave up" + "exec sleep 60"], signals)
    assert (moves.code, stands.code) == (3, 1)
    assert stands.ended - stands.began < 5
    assert "no worker has moved" in capfd.readouterr().err


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
