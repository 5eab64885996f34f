"""`make first-training` follows docs/install.md, and fails where the page promises too much."""

import os
import re
import tomllib

import pytest

from hvdx.version import __version__
from tests import first_training
from tests.launch import ROOT

TRAINS = "echo 'test accuracy   91.5 %'"


def test_page_has_four_commands_that_install_the_wheel_of_this_version():
    commands = first_training.commands_of((ROOT / "docs" / "install.md").read_text())
    assert len(commands) == 4
    (name, extras) = re.search(r"'\./(.*)\[(.*)\]'", commands[1]).groups()
    assert name == f"hvdx-{__version__}-py3-none-any.whl"
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"tf", "mpi"} <= set(extras.split(",")) <= set(known)
    assert commands[-1].startswith("env/bin/hvdx run -n 2 ")


def test_commands_stand_in_their_section_without_comments():
    page = "## A\n```sh\na\n```\n## With a wheel\ntext\n```sh\nb -n 2   # a comment\nc\n```\n```sh\nd\n```\n"
    assert first_training.commands_of(page) == ["b -n 2", "c"]
    assert first_training.commands_of("## A\n```sh\na\n```\n") == []


def test_commands_run_in_the_folder_one_after_the_other(tmp_path):
    times = iter([0, 100, 100, 300])
    seconds = first_training.follow(
        ["echo 1 > file", f"cat file && {TRAINS}"], tmp_path, os.environ, clock=lambda: next(times)
    )
    assert seconds == 300
    assert (tmp_path / "file").read_text() == "1\n"


@pytest.mark.parametrize(
    ("commands", "last", "said"),
    [
        (["true"] * 4 + [TRAINS], 1, "expected 1 to 4 commands in docs/install.md, got 5"),
        ([], 1, "expected 1 to 4 commands in docs/install.md, got 0"),
        (["false", TRAINS], 1, "false: exit code 1"),
        (["true"], 1, "true: expected a line with the test accuracy, there is none"),
        ([TRAINS], 301, "expected at most 300 s, got 301 s"),
    ],
)
def test_what_the_page_does_not_keep_is_an_error(commands, last, said, tmp_path):
    times = iter([0, last] * 5)
    with pytest.raises(SystemExit, match=re.escape(said)):
        first_training.follow(commands, tmp_path, os.environ, clock=lambda: next(times))
