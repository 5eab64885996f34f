"""A command that would fail on each worker is refused before any of them starts."""

import os

import pytest

from hvdx.cli.common.preflight import check_start
from hvdx.cli.main import main


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("KERAS_BACKEND", "openvino", "KERAS_BACKEND=openvino: expected one of tensorflow, jax, torch"),
        ("HVDX_STRATEGY", "treshold", "did you mean threshold?"),
        ("TMPDIR", "/missing", "TMPDIR: expected a folder with some room for MPI's files, got /missing: No such file"),
    ],
)
def test_environment_of_no_training_is_refused(monkeypatch, capsys, variable, value, named):
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr("hvdx.cli.run.run_launcher", lambda *_: pytest.fail("started"))
    for command in ("run", "lab"):
        assert main([command, "-n", "2", "python", "train.py"]) == 2
        said = capsys.readouterr().err
        assert named in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("words", [["python", "-"], ["/bin/python3.11", "-u", "-", "--epochs", "3"]])
def test_script_on_standard_input_is_refused(words, capsys):
    assert main(["run", "-n", "2", *words]) == 2
    assert "expected a script in a file, got one on standard input" in capsys.readouterr().err


def test_python_without_a_script_is_refused_if_a_pipe_has_one(monkeypatch):
    reading, writing = os.pipe()
    before = os.dup(0)
    os.dup2(reading, 0)
    try:
        with pytest.raises(Exception, match="standard input"):
            check_start(["python", "-u"], "run")
        check_start(["python", "-m", "train", "-"], "run")
        check_start(["cat", "-"], "run")
    finally:
        os.dup2(before, 0)
        for file in (reading, writing, before):
            os.close(file)
