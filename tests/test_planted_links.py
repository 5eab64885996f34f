"""A link that another user planted at a name that hvdx will write leads to no other file."""

import contextlib
import os

import pytest

from hvdx.cli.comparing import plan, runner
from hvdx.errors import ConfigError
from hvdx.keras.checkpoint import owner
from hvdx.report import lines, page, report_file


def _lock(folder):
    with runner.locked(folder):
        pass


# What is written, its name in the folder, and the call that writes it.
WRITERS = {
    "owner of checkpoints": (owner.NAME, lambda folder: owner.Owner(folder, wait=0).release()),
    "record": ("rank-0.jsonl", lambda folder: lines.Writer(folder, 0).write("fit", schema=lines.SCHEMA)),
    "lock of a comparison": (runner._LOCK, _lock),
    "plan of a comparison": (".plan.json.part", lambda folder: plan.write_whole(folder / "plan.json", {"n": 2})),
    "report": (
        f".report.html.{os.getpid()}",
        lambda folder: report_file.write("<html>", folder / "report.html", page.KIND),
    ),
}


@pytest.mark.parametrize("target", ["existing", "absent"])
@pytest.mark.parametrize("what", WRITERS)
def test_planted_link_is_not_followed(tmp_path, what, target):
    name, write = WRITERS[what]
    victim, folder = tmp_path / "victim", tmp_path / "shared"
    folder.mkdir()
    if target == "existing":
        victim.write_text("precious")
    (folder / name).symlink_to(victim)
    with contextlib.suppress(ConfigError, OSError):  # a refusal, or a new file instead of the link
        write(folder)
    assert victim.exists() == (target == "existing")
    assert target == "absent" or victim.read_text() == "precious"
