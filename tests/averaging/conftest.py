"""Fixtures of the tests of averaging."""

import contextlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT


@pytest.fixture
def untouched():
    """Context in which nothing in a folder may change."""

    @contextlib.contextmanager
    def check(folder):
        before = contents(folder)
        yield
        assert contents(folder) == before

    return check


def contents(folder):
    """Return the content of every file below a folder, hidden files included."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def on_a_full_disk():
    """Function that runs `hvdx average` with a limit on the size of files, so that writing fails in the middle."""

    def run(paths, out, *options):
        return subprocess.run(
            [sys.executable, "-m", "hvdx", "average", *paths, "-o", out, *options],
            cwd=ROOT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
