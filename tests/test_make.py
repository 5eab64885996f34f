"""`make test` and `make test-quick`, with a stand-in for Python."""

import os
import shutil
import subprocess

import pytest

from tests.launch import ROOT

# Python that lists its arguments, and fails in the part of `make test` whose arguments have the words in FAIL_AT.
PYTHON = """#!/bin/sh
echo "RAN $*${PYTHONDONTWRITEBYTECODE:+ without bytecode}"
case "$*" in *"$FAIL_AT"*) exit 1;; esac
"""


@pytest.fixture
def make(tmp_path):
    """Return a function that runs `make` in a folder where all is installed but Horovod, unless a stamp is added."""
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "hvdx"):
        (tmp_path / ".venv" / "bin" / name).write_text(PYTHON)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    for stamp in (".venv/.installed-own-tf", ".venv/.frameworks-own-tf"):
        (tmp_path / stamp).touch()

    def call(target, fail_at="nothing"):
        words = ["make", "--no-print-directory", target]
        kept = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        return subprocess.run(
            words,
            check=False,
            cwd=tmp_path,
            env=kept | {"FAIL_AT": fail_at, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    call.folder = tmp_path
    return call


@pytest.mark.parametrize(
    ("fail_at", "said"),
    [
        ("--dist loadfile", "hvdx: failed: the tests that run at once"),
        ("pytest tests/test_stalls.py", "hvdx: failed: the tests that run alone"),
        ("-m pytest", "hvdx: failed: the tests that run at once; the tests that run alone"),
        ("nothing", ""),
    ],
)
def test_all_parts_run_and_the_end_names_those_that_failed(make, fail_at, said):
    (make.folder / ".venv" / ".horovod-own-tf").touch()
    ended = make("test", fail_at)
    assert ended.stdout.count("RAN -m pytest") == 2
    assert "without bytecode" not in ended.stdout
    assert (ended.returncode != 0) == bool(said)
    assert ended.stderr.splitlines()[:1] == ([said] if said else [])


def test_quick_tests_build_no_horovod(make):
    ended = make("test-quick")
    assert ended.returncode == 0, ended.stderr
    assert "RAN build-kernels" in ended.stdout
    assert "build-horovod" not in ended.stdout
