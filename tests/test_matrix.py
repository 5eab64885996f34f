"""The runner of `make matrix`, without environments."""

import sys

import pytest

from hvdx.cli.common.processes import Outcome
from tests import matrix
from tests.matrix import ROWS, Cell, MatrixError, attempt, merge, newest_minors, prepare, verdict, write_page


def cells(tensorflow, keras, result):
    return [Cell(tensorflow, keras, row[0], result) for row in ROWS]


def test_newest_versions_are_those_that_pip_lists():
    listing = "tensorflow-cpu (2.21.0)\nAvailable versions: 2.22.0, 2.21.1, 2.21.0, 2.20.0, 2.9.3\n  INSTALLED: 2.19.0"
    assert newest_minors(listing, (2, 22)) == ["2.20.0", "2.21.1"]
    assert newest_minors("ERROR: no network", (2, 22)) == []


def test_pip_without_versions_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.setattr(matrix.processes, "run", lambda *_, **__: Outcome(1, "ERROR: no network"))
    with pytest.raises(MatrixError, match="no network"):
        matrix.pairs()


def test_verdict_is_the_first_line_of_the_failure():
    assert verdict(Outcome(0)) == "passed"
    assert verdict(Outcome(None, timed_out=True)) == "no answer within the time limit"
    assert verdict(Outcome(1, "E       AssertionError: seam layers_of: a | b\nE   more\n")).endswith("of: a | b")
    assert verdict(Outcome(1, "a\nValueError: b\nc")) == "ValueError: b"


def test_row_runs_in_its_environment_with_a_limit(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    code = "import os, sys; print('trained: [2, 1]'); sys.exit(0 if os.environ['HVDX_STRATEGY'] == 'threshold' else 1)"
    for strategy, passes in (("threshold", True), ("auto", False)):
        cell = attempt(("row", ["-c", code], 1, {"HVDX_STRATEGY": strategy}, 30), tmp_path, "2.16.2", "3.6.0")
        assert (cell.result == "passed") is passes, cell
    cell = attempt(("row", ["-c", "pass"], 1, {}, 30), tmp_path, "2.16.2", "3.6.0")
    assert cell.result == "exit status 0 without a test or a training"
    cell = attempt(("row", ["-c", "import time; time.sleep(30)"], 1, {}, 0.5), tmp_path, "2.16.2", "3.6.0")
    assert cell.result == "no answer within the time limit"


def test_environment_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDX_CACHE", str(tmp_path))
    with pytest.raises(MatrixError, match=r"TensorFlow 2\.16\.2: expected an environment"):
        prepare("2.16.2", "3.6.0", "/bin/false")
    assert not list(tmp_path.rglob("installed"))


def test_page_and_file_keep_the_other_versions(tmp_path):
    page, file = tmp_path / "install.md", tmp_path / "matrix.json"
    page.write_text("before\n<!-- matrix -->\nearlier table\n<!-- end of matrix -->\nafter\n")
    merge(file, cells("2.20.0", "3.14.0", "passed") + cells("2.16.2", "3.6.0", "passed"))
    write_page(page, merge(file, cells("2.20.1", "3.15.0", "Error: a | b")))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "earlier" not in text
    assert "|  | TensorFlow 2.16.2, Keras 3.6.0 | TensorFlow 2.20.1, Keras 3.15.0 |" in text
    assert "| split layers | passed | Error: a \\| b |" in text
