"""`hvdx job`: options, output and submission. test_job_templates.py runs the scripts."""

# Tests: hvdx/cli/batch/job_script.py, hvdx/cli/batch/template.py

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdx.cli.batch.job_script import parse_time
from hvdx.cli.batch.template import fill, shell_words
from hvdx.cli.main import main
from hvdx.errors import ConfigError
from tests.launch import ROOT

BATCH = Path(__file__).parent / "stand_ins" / "batch.py"
SLURM = ["job", "slurm", "--nodes", "2", "--time", "1:00:00"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Change to an empty folder, without a site file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HVDX_SITE", raising=False)
    return tmp_path


@pytest.fixture
def queue(place, monkeypatch):
    """Install stand-ins for sbatch, qsub and bsub; return a function that reads their records."""
    (place / "bin").mkdir()
    for name in ("sbatch", "qsub", "bsub"):
        path = place / "bin" / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{BATCH}" {name} "$@"\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_RECORD", str(place / "record"))
    return lambda: [json.loads(line) for line in (place / "record").read_text().splitlines()]


def test_page_of_a_gpu_cluster_shows_the_script(capsys):
    page = (ROOT / "docs" / "gpu-cluster.md").read_text()
    command = re.search(r"^hvdx (job slurm .*) \\\n    -o train.sh -- python train.py$", page, re.MULTILINE)[1]
    shown = re.findall(r"^#SBATCH .*$", page, re.MULTILINE)
    main([*command.split(), "--", "python", "train.py"])
    script = capsys.readouterr().out
    assert len(shown) > 5
    assert set(shown) <= set(script.splitlines())
    assert "srun --mpi=pmix" in script


# --- help


@pytest.mark.parametrize("words", [[], ["slurm"], ["pbs"], ["lsf"], ["mpirun"], ["horovodrun"], ["kubernetes"]])
def test_help_has_an_example(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["job", *words, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "hvdx job" in text.split("example:")[1]
    assert " -- python train.py" in text.split("example:")[1]


def test_strategy_is_checked_without_tensorflow():
    code = (
        "import sys\nfrom hvdx.cli.main import main\n"
        "main('job slurm --time 1:00:00 --strategy threshold -- x'.split())\n"
        "sys.exit(str({'tensorflow', 'keras', 'mpi4py.MPI'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "HVDX_STRATEGY=threshold" in done.stdout
    assert done.stderr.strip() == "set()"


# --- errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SLURM], "expected a command after --, got none"),
        ([*SLURM, "--"], "expected a command after --, got none"),
        ([*SLURM, "--nodes", "0", "--", "x"], "--nodes: expected 1 or more, got 0"),
        ([*SLURM, "--tasks-per-node", "0", "--", "x"], "--tasks-per-node: expected 1"),
        ([*SLURM, "--gpus-per-node", "-1", "--", "x"], "--gpus-per-node: expected 0"),
        ([*SLURM, "--threads", "0", "--", "x"], "--threads: expected 1"),
        (["job", "slurm", "--", "x"], "--time: expected HH:MM:SS or DAYS-HH:MM:SS, got nothing"),
        ([*SLURM, "--time", "12h", "--", "x"], "--time: expected HH:MM:SS"),
        ([*SLURM, "--time", "00:00:00", "--", "x"], "--time: expected"),
        ([*SLURM, "--time", "1:99:00", "--", "x"], "--time: expected"),
        ([*SLURM, "--signal", "3600", "--", "x"], "--signal: expected 1 or more seconds, fewer than the 3600"),
        ([*SLURM, "--signal", "0", "--", "x"], "--signal: expected"),
        ([*SLURM, "--max-restarts", "-1", "--", "x"], "--max-restarts: expected 0"),
        ([*SLURM, "--launcher", "jsrun", "--", "x"], "--launcher: expected srun or mpirun"),
        ([*SLURM, "--checkpoint", "c", "--launcher", "srun", "--", "x"], "--checkpoint: expected mpirun"),
        ([*SLURM, "--survive", "--", "x"], "--survive: expected --checkpoint DIR and Open MPI, got openmpi without"),
        ([*SLURM, "--survive", "--checkpoint", "c", "--mpi", "mpich", "--", "x"], "and Open MPI, got mpich. Do: "),
        ([*SLURM, "--mpi", "lam", "--", "x"], "--mpi: expected openmpi or mpich or intel"),
        ([*SLURM, "--array", "a", "--", "x"], "--array: expected numbers"),
        ([*SLURM, "--account", "a b", "--", "x"], "--account: expected one word"),
        ([*SLURM, "--name", "a\nb", "--", "x"], "--name: expected one word"),
        ([*SLURM, "--env-setup", "a\nb", "--", "x"], "--env-setup: expected one line"),
        ([*SLURM, "--directive", " ", "--", "x"], "--directive: expected one line"),
        ([*SLURM, "--strategy", "treshold", "--", "x"], "did you mean threshold"),
        (["job", "lsf", "--time", "1:00:00", "--array", "0-3", "--", "x"], "from 1 on"),
        (
            ["job", "lsf", "--time", "1:00:00", "--launcher", "jsrun", "--gpus-per-node", "3"]
            + ["--tasks-per-node", "2", "--", "x"],
            "a multiple of the 2 ranks",
        ),
        (["job", "mpirun", "--", "x"], "--hosts: expected a host file, got nothing"),
        (["job", "mpirun", "--hosts", "nothing.txt", "--", "x"], "--hosts: expected a file with a host"),
        (["job", "horovodrun", "--hosts", "h", "-n", "0", "--", "x"], "-n: expected 1"),
        (["job", "mpirun", "--hosts", "h", "-n", "2", "--submit", "--", "x"], "--submit: expected a system"),
    ],
)
def test_errors_name_the_option_and_the_remedy(words, message, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Do: " in captured.err or "Write it as" in captured.err
    assert captured.out == ""


# --- output


def test_printed_and_written_are_the_same(capsys, place):
    words = ["--", "python", "train.py", "--lr", "1e-3"]
    assert main([*SLURM, *words]) == 0
    printed = capsys.readouterr().out
    assert main([*SLURM, "-o", "train.sh", *words]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "sbatch train.sh" in captured.err
    assert (place / "train.sh").read_text() == printed
    assert (place / "train.sh").stat().st_mode & 0o777 == 0o755


def test_file_is_kept_without_force(capsys, place):
    (place / "train.sh").write_text("mine")
    assert main([*SLURM, "-o", "train.sh", "--", "x"]) == 2
    assert "Do: --force" in capsys.readouterr().err
    assert (place / "train.sh").read_text() == "mine"
    assert main([*SLURM, "-o", "train.sh", "--force", "--", "x"]) == 0
    assert (place / "train.sh").read_text().startswith("#!/bin/bash")
    assert main([*SLURM, "-o", "no/folder/train.sh", "--", "x"]) == 2


def test_first_lines_show_the_command(capsys):
    line = ["--directive=--mem=0", "--", "python", "a b.py", "two\nlines\n$(touch bad)"]
    assert main([*SLURM, *line]) == 0
    text = capsys.readouterr().out.splitlines()
    expected = (
        "# hvdx job slurm --nodes=2 --time=1:00:00 --directive=--mem=0 -- python 'a b.py' 'two lines $(touch bad)'"
    )
    assert text[1] == expected
    assert text[2].startswith("# Submit")


@pytest.mark.parametrize(("system", "command"), [("slurm", "sbatch"), ("pbs", "qsub"), ("lsf", "bsub")])
def test_submit(system, command, queue, capsys):
    words = ["job", system, "--time", "1:00:00", "--submit"]
    assert main([*words, "--", "x"]) == 0
    assert "17" in capsys.readouterr().out
    assert main([*words, "-o", "job.sh", "--", "x"]) == 0
    piped, filed = queue()
    assert (piped["name"], piped["words"]) == (command, [])
    assert piped["stdin"].startswith("#!/bin/bash")
    if system == "lsf":
        assert filed["stdin"] == piped["stdin"]
    else:
        assert filed["words"] == ["job.sh"]
        assert filed["files"] == [piped["stdin"]]


def test_refused_submission_is_reported(queue, capsys, monkeypatch):
    monkeypatch.setenv("STAND_IN_CODE", "3")
    assert main([*SLURM, "--submit", "--", "x"]) == 2
    error = capsys.readouterr().err
    assert "exit code 3" in error
    assert "invalid account" in error


def test_submission_without_the_command(capsys, monkeypatch, place):
    monkeypatch.setenv("PATH", str(place))
    assert main([*SLURM, "--submit", "--", "x"]) == 2
    assert "expected sbatch on PATH, found none. Do: run it on a login node" in capsys.readouterr().err


# --- helpers


@pytest.mark.parametrize(("text", "seconds"), [("12:00:00", 43200), ("0:00:01", 1), ("2-01:00:00", 176400)])
def test_parse_time(text, seconds):
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "1:00", "1:00:60", "-1:00:00", "1-2", "a:00:00", "1:00:00 "])
def test_parse_time_refuses(text):
    with pytest.raises(ConfigError, match="--time"):
        parse_time(text)


def test_fill_leaves_lines_out_and_repeats_them():
    text = 'one\n\n@{none}\n@{empty}\n\na@@{number} $x $(y) @z "$@" @{list}\n'
    values = {"none": None, "empty": [], "number": 3, "list": ["p", "q"]}
    assert fill(text, values) == 'one\n\na@3 $x $(y) @z "$@" p\na@3 $x $(y) @z "$@" q\n'
    assert fill("@{a}\n", {"a": "@{b}"}) == "@{b}\n"


def test_shell_words_are_read_back_by_bash():
    words = [
        "",
        "a b",
        "it's",
        '"q"',
        "$HERE",
        "${HERE}x",
        "\\$HERE",
        "$(echo no)$HERE",
        "`no`",
        "*",
        "a\nb",
        "$1 $",
        "!",
    ]
    command = f"printf '%s\\0' {shell_words(words)}"
    done = subprocess.run(
        ["bash", "-c", command], env={"HERE": "v w"}, capture_output=True, text=True, timeout=20, check=True
    )
    expected = ["", "a b", "it's", '"q"', "v w", "v wx", "\\v w", "$(echo no)v w", "`no`", "*", "a\nb", "$1 $", "!"]
    assert done.stdout.split("\0")[:-1] == expected
