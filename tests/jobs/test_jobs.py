"""The small jobs, run as their docstrings show: on one rank, on several ranks, and under horovodrun."""

# Tests: jobs/horovod_keras_digits.py, jobs/linear_regression.py, jobs/parabola.py

import os
import re
import sys
from pathlib import Path

import pytest

from hvdx.cli.common.mpi_tools import find_mpi
from tests.launch import Run, run, run_command

# Time limit of a job in seconds, so that a hang fails.
_SECONDS = 240


def number_after(words: str, result: Run) -> float:
    """Return the number that a job printed after `words`."""
    found = re.search(re.escape(words) + r" ([\d.e+-]+)", result.out)
    assert found, f"no {words!r} in: {result}"
    return float(found.group(1))


def test_linear_regression_has_the_parameters_of_one_machine():
    ranks = 4
    result = run(ranks, ["jobs/linear_regression.py"], timeout=_SECONDS)
    assert result.code == 0, result
    assert f"400 examples on {ranks} worker" in result.out
    assert number_after("same parameters as one machine: largest difference", result) < 1e-12


def test_linear_regression_exits_with_1_above_the_tolerance():
    result = run(1, ["jobs/linear_regression.py", "--steps", "5", "--tolerance", "-1"], timeout=_SECONDS)
    assert result.code == 1, result
    assert "NOT the parameters of one machine" in result.out


@pytest.mark.parametrize("ranks", [1, 2])
def test_parabola_has_the_loss_curve_of_one_process(ranks):
    result = run(ranks, ["jobs/parabola.py", "--steps", "100", "--every", "25"], timeout=_SECONDS)
    assert result.code == 0, result
    assert "WARNING" not in result.out, "the copy that rank 0 trains alone is intended"
    assert f"50 points on {ranks} worker" in result.out
    assert number_after("same loss curve as one process: largest relative difference", result) < 1e-5
    losses = [float(line.split()[2]) for line in result.out.splitlines() if re.match(r"\d+ +[\d.]+ +[\d.]+ ", line)]
    assert len(losses) == 4, result
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("ranks", [2])
def test_horovod_script_learns_and_keeps_ranks_equal(ranks, tmp_path):
    script = ["jobs/horovod_keras_digits.py", "--epochs", "5", "--checkpoints", str(tmp_path)]
    result = run(ranks, script, timeout=_SECONDS)
    assert result.code == 0, result
    assert number_after("test accuracy", result) > 0.8
    assert "the weights are the same on all ranks" in result.out
    # Only rank 0 prints and writes.
    assert result.out.count("Epoch 1/5") == 1
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.long
def test_linear_regression_under_horovodrun_with_uneven_shares():
    mpi = find_mpi()
    horovodrun = Path(sys.executable).with_name("horovodrun")
    if mpi.mpirun is None or not horovodrun.exists():
        pytest.skip("needs horovodrun and mpirun")
    # Horovod starts the mpirun on PATH, with flags that Open MPI 5 no longer takes.
    path = os.pathsep.join([str(Path(mpi.mpirun).parent), os.environ["PATH"]])
    flags = ["--binding-args=--bind-to none --map-by slot"] if mpi.launcher_vendor == "Open MPI" else []
    command = [str(horovodrun), *flags, "-np", "2", sys.executable, "jobs/linear_regression.py", "--examples", "401"]
    result = run_command(command, timeout=_SECONDS, env={"PATH": path})
    assert result.code == 0, result
    assert "401 examples on 2 workers of 200 to 201 examples" in result.out
    assert "same parameters as one machine" in result.out
