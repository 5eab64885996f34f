"""Files whose content is executed are read only if no other user can have written them."""

import os

import pytest

from hvdx.kernels import trust


@pytest.fixture
def file(tmp_path):
    """File that nobody else can write, in such a folder."""
    folder = tmp_path / "folder"
    folder.mkdir(0o755)
    path = folder / "file"
    path.write_bytes(b"code")
    path.chmod(0o644)
    return path


def _link(path):
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def test_own_file_is_read(file):
    trust.check(file.parent)
    assert trust.read(file) == b"code"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.chmod(0o664), r"others may write to .*file \(mode 664"),
        (lambda file: file.chmod(0o646), "others may write to .*file"),
        (lambda file: file.parent.chmod(0o1777), "others may write to .*folder"),
        (lambda file: (file.rename(file.with_name("other")), file.symlink_to("other")), "symbolic link"),
        (
            lambda file: (file.parent.rename(file.parents[1] / "other"), file.parent.symlink_to("other")),
            "Not a directory",
        ),
        (os.unlink, "No such file"),
    ],
    ids=["group", "all", "folder", "link", "link of the folder", "absent"],
)
def test_what_others_can_have_written_is_not_read(file, change, message):
    change(file)
    with pytest.raises(OSError, match=message):
        trust.read(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_file_of_another_user_is_not_read(file):
    os.chown(file, 4321, -1)
    with pytest.raises(PermissionError, match=r"another user \(number 4321"):
        trust.read(file)
    with pytest.raises(PermissionError):
        trust.check(file)


def test_file_of_root_is_read(file, monkeypatch):
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    trust.check(file if file.stat().st_uid == 0 else file.parents[-1])
