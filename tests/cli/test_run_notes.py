"""TensorFlow's notes are left out of a standard error, and nothing else."""

import subprocess
import sys

import pytest

NOTES = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    "I0000 00:00:1795817212.796753   14337 port.cc:153] oneDNN custom operations are on.\n"
)
SAID = "hvdx: 2 workers\nI0000 of mine\nE0000 00:00:1795817212.796753   14337 cuda.cc:1] none\nno end of the line"


@pytest.mark.parametrize(("level", "shown"), [(None, SAID), ("0", NOTES + SAID + NOTES[:20])])
def test_notes_are_left_out_unless_a_level_is_set(level, shown, monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    tail = NOTES[:20] if level else ""
    program = f"import os; [os.write(2, part.encode()) for part in ({NOTES!r}, {SAID[:5]!r}, {SAID[5:] + tail!r})]"
    code = f"""
import os, sys
from hvdx.cli import run
run.leave_out()
os.execv(sys.executable, [sys.executable, "-c", {program!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == shown


def test_line_without_an_end_is_shown_in_the_meantime():
    code = """
import os, sys
from hvdx.cli import run
os.environ.pop(run.VARIABLE, None)
run.leave_out()
os.write(2, b"50 %")
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stderr.read(4) == b"50 %"
        process.stdin.close()
        assert process.stderr.read() == b""
