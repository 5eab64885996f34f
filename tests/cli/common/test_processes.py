"""Child processes with a time limit."""

import os
import sys
import time

from hvdx.cli.common.processes import child_environment, key_line, run, search_path


def test_time_limit_ends_the_children_too():
    start = time.monotonic()
    outcome = run(["sh", "-c", "sleep 60 & sleep 60"], timeout=0.5)
    assert outcome.timed_out
    assert outcome.reason() == "no answer within the time limit"
    assert time.monotonic() - start < 10


def test_crash_is_named():
    outcome = run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], timeout=20)
    assert outcome.reason() == "crashed with SIGSEGV"


def test_missing_program_is_an_outcome():
    outcome = run(["no-such-program-here"], timeout=5)
    assert outcome.code is None
    assert "no-such-program-here" in outcome.reason()


def test_programs_compute_as_they_do_without_hvdx(monkeypatch):
    for name in ("TF_ENABLE_ONEDNN_OPTS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
        assert name not in child_environment()


def test_key_line_is_the_error_and_not_what_follows():
    text = "Traceback:\n  File x\nImportError: libmpi.so.40: no such file\n--------\n  Errorcode: 1\nprterun noticed\n"
    assert key_line(text) == "ImportError: libmpi.so.40: no such file"


def test_search_path_keeps_the_users_order(monkeypatch):
    here = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", f"/opt/mpi/bin:{here}")
    assert search_path() == f"/opt/mpi/bin:{here}"
    monkeypatch.setenv("PATH", "/opt/mpi/bin")
    assert search_path() == f"{here}:/opt/mpi/bin"
    monkeypatch.setenv("PATH", "")
    assert search_path() == here
