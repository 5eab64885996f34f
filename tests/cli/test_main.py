"""The `hvdx` command: help, errors, exit codes."""

# Tests: hvdx/cli/build_kernels.py, hvdx/cli/commands.py

import subprocess
import sys
import types

import pytest

from hvdx.cli.commands import COMMANDS, Command
from hvdx.cli.main import main
from hvdx.errors import ConfigError
from hvdx.version import __version__


def test_no_arguments_lists_every_command(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for words in ("hvdx doctor", "hvdx build-horovod", "hvdx run -n 2", "e.g."):
        assert words in text


@pytest.mark.parametrize("command", COMMANDS)
def test_command_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    usage, example = capsys.readouterr().out.split("example:")
    assert usage.startswith(f"usage: hvdx {command} ")
    assert f"hvdx {command}" in example


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"hvdx {__version__}"


def test_unknown_command_is_an_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["no-such-command"])
    assert stopped.value.code == 2
    assert "no-such-command" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["run -n 1 {python} -c 'print(1)'", "run -n 1 --dry-run {python}", "doctor --help"])
def test_closed_streams_are_no_error(options):
    command = f"{sys.executable} -m hvdx {options.format(python=sys.executable)} <&- >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def command(run, monkeypatch):
    """Add a command `hvdx fake` that calls run(args)."""
    module = types.ModuleType("fake")
    vars(module).update(run=run, add_arguments=lambda parser: None)
    monkeypatch.setitem(sys.modules, "hvdx.cli.fake", module)
    monkeypatch.setitem(COMMANDS, "fake", Command("fails", "hvdx fake"))


def test_hvdx_error_becomes_one_line_and_exit_code_2(capsys, monkeypatch):
    def run(args):
        raise ConfigError("period: expected 1 or more, got 0. Do: give a positive number.")

    command(run, monkeypatch)
    assert main(["fake"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "hvdx: period: expected 1 or more, got 0. Do: give a positive number.\n"
    assert captured.out == ""


def test_other_errors_keep_their_traceback(monkeypatch):
    def run(args):
        raise ZeroDivisionError

    command(run, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        main(["fake"])


@pytest.mark.parametrize(
    ("work", "more"),
    [
        ("from hvdx.cli.main import main; main([])", {"numpy", "hvdx.averaging", "hvdx.strategies"}),
        (
            "from hvdx.cli.main import main; main(['run', '-n', '1', '--dry-run', 'python'])",
            {"hvdx.averaging", "hvdx.strategies"},
        ),
        # Of the strategies only Threshold needs Numba, whose import takes half a second.
        ("import hvdx; hvdx.ParameterAveraging(), hvdx.AllReduce()", {"hvdx.averaging"}),
    ],
)
def test_start_imports_nothing_heavy(work, more):
    program = (
        f"import sys\n{work}\n"
        f"heavy = {{'tensorflow', 'keras', 'horovod', 'mpi4py.MPI', 'numba', *{more}}} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_python_dash_m_runs_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "hvdx", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == f"hvdx {__version__}"
    assert done.returncode == 0
