"""`hvdx average`, called through the command line."""

# Tests: hvdx/averaging/api.py, hvdx/cli/average.py

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvdx.averaging.formats import open_network
from hvdx.averaging.safetensors import save
from hvdx.cli import average as progress_module
from hvdx.cli.average import Progress
from hvdx.cli.main import main


@pytest.fixture
def three(tmp_path, monkeypatch):
    """Write networks a, b and c with the values 0, 1 and 4 into the working folder; return their names."""
    monkeypatch.chdir(tmp_path)
    for name, value in zip("abc", (0, 1, 4), strict=True):
        save(f"{name}.safetensors", {"w": np.full(3, value, "f4"), "n": np.array([7])})
    return ["a.safetensors", "b.safetensors", "c.safetensors"]


def value(path="mean.safetensors", name="w"):
    return open_network(Path(path)).tensors[name].array()[0]


def test_average_writes_the_mean_and_one_line(three, capsys):
    assert main(["average", *three[:2], "-o", "mean.safetensors"]) == 0
    assert value() == 0.5
    captured = capsys.readouterr()
    line = r"mean\.safetensors: mean of 2 networks, safetensors, 2 tensors, 20 B, \d+\.\d s\n"
    assert re.fullmatch(line, captured.out)
    assert captured.err == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--weights", "2,1,1"], 1.25),
        (["--weights", "0.5,0.25,0.25"], 1.25),
        (["--ema", "0.5"], 2.25),
        (["--swa"], 5 / 3),
        ([], 5 / 3),
    ],
)
def test_weights(options, expected, three):
    assert main(["average", *three, "-o", "mean.safetensors", *options]) == 0
    assert value() == np.float32(expected)


def test_integers_follow_the_option(three, capsys):
    save("c.safetensors", {"w": np.zeros(3, "f4"), "n": np.array([8])})
    assert main(["average", *three, "-o", "mean.safetensors"]) == 2
    assert capsys.readouterr().err.startswith("hvdx: c.safetensors: n: expected 7, as in a.safetensors, got 8.")
    for options, expected in (
        (["--swa"], 8),
        (["--ema", "0.9"], 8),
        (["--integers", "first"], 7),
        (["--swa", "--integers", "first"], 7),
    ):
        assert main(["average", *three, "-o", "mean.safetensors", "--force", *options]) == 0
        assert value(name="n") == expected


def test_report_alone_writes_nothing(three, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert main(["average", *three, "--report"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("A  a.safetensors\nB  b.safetensors\nC  c.safetensors\n")
    assert "A-C" in text
    assert sorted(tmp_path.iterdir()) == before


def test_report_is_printed_before_the_mean(three, capsys):
    assert main(["average", *three, "--report", "-o", "mean.safetensors"]) == 0
    text = capsys.readouterr().out
    assert text.index("A-C") < text.index("mean of 3 networks")


def test_existing_output_is_kept_unless_forced(three, capsys):
    assert main(["average", *three, "-o", "a.safetensors", "--report"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("hvdx: a.safetensors: it exists, and is kept.")
    assert captured.out == ""
    assert main(["average", *three, "-o", "a.safetensors", "--force", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert value("a.safetensors") == np.float32(5 / 3)


def test_warnings_are_lines(three, capsys):
    for name in "ab":
        save(f"{name}.safetensors", {"bn.running_var": np.full(2, np.nan)})
    assert main(["average", *three[:2], "-o", "mean.safetensors", "--quiet"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("hvdx: warning: the ") for line in lines)
    assert "NaN" in lines[0]
    assert "--recalibrate" in lines[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.safetensors", "b.safetensors"], "hvdx: average: -o: expected a path for the mean"),
        (["a.safetensors", "-o", "m.safetensors"], "hvdx: expected two networks or more, got 1."),
        (["a.safetensors", "no.pt", "-o", "m.safetensors"], "hvdx: no.pt: there is no such file."),
        (["a.safetensors", "text", "-o", "m.safetensors"], "hvdx: text: expected a saved network"),
        (["a.safetensors", "b.safetensors", "-o", "m.pt"], "hvdx: m.pt: expected a name for safetensors"),
        (["a.safetensors", "b.safetensors", "-o", "no/m"], "hvdx: no/m: the folder no does not exist."),
        (["a.safetensors", "b.safetensors", "-o", "m", "--weights", "1"], "hvdx: weights: expected 2 numbers"),
        (["a.safetensors", "b.safetensors", "-o", "m", "--ema", "2"], "hvdx: ema: expected a number between 0 and 1"),
        (["a.safetensors", "b.safetensors", "-o", "m", "--recalibrate", "x.npz"], "hvdx: recalibrate: expected .keras"),
    ],
)
def test_bad_calls_are_one_line_and_write_nothing(words, message, three, tmp_path, capsys):
    (tmp_path / "text").write_text("no saved network, but long enough to be examined")
    before = sorted(tmp_path.iterdir())
    assert main(["average", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "words", [["--weights", "1,x"], ["--ema", "0.9", "--swa"], ["--weights", "1,1", "--swa"], ["--integers", "mean"]]
)
def test_invalid_options_are_errors(words, three, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["average", *three[:2], "-o", "mean.safetensors", *words])
    assert stopped.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        main(["average", "--help"])
    text = capsys.readouterr().out
    for words in ("example:", ".keras", ".safetensors", ".params", "SavedModel", "--ema 0.99", "--recalibrate x.npz"):
        assert words in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_command_imports_no_framework():
    program = (
        "import sys, hvdx.cli.average\n"
        "heavy = {'tensorflow', 'keras', 'torch', 'safetensors', 'h5py', 'ml_dtypes'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by a list of one number, which the test advances."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_progress_is_silent_for_a_second(clock, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress("averaging")
    clock[0] += 0.9
    progress(5, 10)
    progress.close()
    assert capsys.readouterr().err == ""


def test_progress_updates_one_line_on_a_terminal(clock, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress("averaging")
    for done in (1e9, 2e9):
        clock[0] += 2
        progress(int(done), int(4e9))
    progress(int(2e9), int(4e9))
    progress.close()
    text = capsys.readouterr().err
    assert "\n" not in text
    assert text.startswith("\raveraging:  25% of 4 GB read, 500 MB/s, 6 s left")
    assert "\raveraging:  50% of 4 GB read, 500 MB/s, 4 s left" in text
    assert text.count("\r") == 4
    assert text.endswith(" \r")


def test_progress_is_a_line_every_ten_seconds_in_a_log(clock, capsys):
    progress = Progress("averaging")
    for _ in range(25):
        clock[0] += 1
        progress(10, 100)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("averaging:  10% of 100 B read") for line in lines)
