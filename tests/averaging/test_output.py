"""Atomic output: the result appears when it is complete, and existing files are kept until then."""

# Tests: hvdx/averaging/extents.py, hvdx/cli/common/termination.py

import collections
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from hvdx.averaging import average, mean, output
from hvdx.averaging.formats import open_network
from hvdx.averaging.output import check_free, pieces, write_whole
from hvdx.averaging.safetensors import save
from hvdx.errors import AverageError
from tests.launch import ROOT


@pytest.fixture
def pair(tmp_path):
    """Two networks of half a megabyte whose mean is 1."""
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, value in zip(paths, (0, 2), strict=True):
        save(path, {"w": np.full((256, 512), value, "f4")})
    return paths


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_existing_output_is_kept(pair, tmp_path, untouched):
    out = tmp_path / "mean.safetensors"
    out.write_text("precious")
    with untouched(tmp_path), pytest.raises(AverageError, match=r"mean\.safetensors: it exists, and is kept.*--force"):
        average(pair, out)
    average(pair, out, force=True)
    assert (open_network(out).tensors["w"].array() == 1).all()


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.symlink_to("nowhere")], ids=["folder", "dead link"])
def test_existing_folder_or_link_is_kept(make, pair, tmp_path):
    out = tmp_path / "mean.safetensors"
    make(out)
    with pytest.raises(AverageError, match="it exists"):
        average(pair, out)


def test_directory_is_not_replaced_by_a_file(pair, tmp_path, untouched):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("precious")
    with untouched(tmp_path), pytest.raises(AverageError, match="is a directory but not a SavedModel, and is kept"):
        average(pair, tmp_path / "runs", force=True)


def test_directory_that_holds_an_input_is_kept(pair, tmp_path, untouched):
    out = tmp_path / "model"
    (out / "variables").mkdir(parents=True)
    (out / "saved_model.pb").write_text("old")
    inside = out / "variables" / "a.safetensors"
    inside.write_bytes(pair[0].read_bytes())
    with untouched(tmp_path), pytest.raises(AverageError, match=r"it holds the input .*a\.safetensors, and is kept"):
        average([inside, pair[1]], out, force=True)


def test_saved_model_is_not_replaced_by_a_file(pair, tmp_path, untouched):
    out = tmp_path / "model"
    out.mkdir()
    (out / "saved_model.pb").write_text("old")
    with untouched(tmp_path), pytest.raises(AverageError, match="only a SavedModel replaces"):
        average(pair, out, force=True)


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_output_without_a_name_is_refused(name, pair, tmp_path, monkeypatch, untouched):
    monkeypatch.chdir(tmp_path)
    with untouched(tmp_path), pytest.raises(AverageError, match="expected the name of the result, got a folder"):
        average(pair, name, force=True)


def test_link_is_followed(pair, tmp_path):
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "mean.safetensors", tmp_path / "mean.safetensors"
    real.write_text("old")
    link.symlink_to(real)
    average(pair, link, force=True)
    assert link.is_symlink()
    assert (open_network(real).tensors["w"].array() == 1).all()


def test_missing_folder_is_named(pair, tmp_path, untouched):
    with untouched(tmp_path), pytest.raises(AverageError, match=r"folder .*nowhere does not exist"):
        average(pair, tmp_path / "nowhere" / "mean.safetensors")


def test_output_may_be_an_input_with_force(pair, tmp_path):
    with pytest.raises(AverageError, match="it exists"):
        average(pair, pair[0])
    average(pair, pair[0], force=True)
    assert (open_network(pair[0]).tensors["w"].array() == 1).all()
    assert (open_network(pair[1]).tensors["w"].array() == 2).all()
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]


def test_too_little_space_is_reported_before_anything_is_written(pair, tmp_path, monkeypatch, untouched):
    usage = collections.namedtuple("Usage", "total used free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage(10, 9, 500_000))
    with untouched(tmp_path), pytest.raises(AverageError, match=r"mean\.safetensors: expected 0\.00 GB of free space"):
        average(pair, tmp_path / "mean.safetensors")


@pytest.mark.parametrize("force", [False, True])
def test_disk_that_fills_up_leaves_nothing(force, pair, tmp_path, untouched, on_a_full_disk):
    out = tmp_path / "mean.safetensors"
    if force:
        out.write_text("precious")
    with untouched(tmp_path):
        done = on_a_full_disk(pair, out, *["--force"] * force)
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"hvdx: {out}: File too large. It was not written; make room, or write it elsewhere.\n"


def test_full_file_system_leaves_nothing(pair, tmp_path, untouched):
    """Fill a real file system, if this user may mount one."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system takes root")
    try:
        with untouched(folder), pytest.raises(AverageError, match="free space"):
            average(pair, folder / "mean.safetensors")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(output.shutil, "disk_usage", lambda path: collections.namedtuple("U", "free")(1 << 40))
            with untouched(folder), pytest.raises(AverageError, match=r"mean\.safetensors: No space left on device"):
                average(pair, folder / "mean.safetensors")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_killed_in_the_middle_leaves_one_hidden_file(pair, tmp_path):
    out = tmp_path / "mean.safetensors"
    out.write_text("precious")
    program = (
        "import os, signal, sys\nfrom hvdx.averaging import average\n"
        "average(sys.argv[1:3], sys.argv[3], force=True, progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    command = [sys.executable, "-c", program, *map(str, pair), str(out)]
    done = subprocess.run(command, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert out.read_text() == "precious"
    (left,) = set(names(tmp_path)) - {"a.safetensors", "b.safetensors", "mean.safetensors"}
    assert left.startswith(".hvdx-")


def test_terminated_in_the_middle_leaves_nothing(pair, tmp_path, untouched):
    """Send SIGTERM while tensors are read, and again while the temporary file is removed."""
    program = (
        "import os, signal, sys\nfrom hvdx.averaging import output\nfrom hvdx.cli import average, main\n"
        "average.Progress.__call__ = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\nremove = output._remove\n"
        "output._remove = lambda path: [os.kill(os.getpid(), signal.SIGTERM), remove(path)]\n"
        "sys.exit(main.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "average", *map(str, pair), "-o", str(tmp_path / "mean.safetensors")]
    with untouched(tmp_path):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "hvdx: terminated\n")


def test_interrupted_in_the_middle_leaves_nothing(pair, tmp_path, untouched):
    def interrupt(*_):
        raise KeyboardInterrupt

    with untouched(tmp_path), pytest.raises(KeyboardInterrupt):
        average(pair, tmp_path / "mean.safetensors", progress=interrupt)


def test_input_that_shrinks_while_it_is_read_leaves_nothing(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(mean, "_BLOCK", 1000)

    def shrink(*_):
        os.truncate(pair[1], 1000)

    with pytest.raises(AverageError, match=r"b\.safetensors: w: .*cut short"):
        average(pair, tmp_path / "mean.safetensors", progress=shrink)
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]


def test_output_that_another_process_created_meanwhile_is_kept(pair, tmp_path):
    out = tmp_path / "mean.safetensors"
    with pytest.raises(AverageError, match="it exists"):
        average(pair, out, progress=lambda *_: out.write_text("precious"))
    assert out.read_text() == "precious"
    assert names(tmp_path) == ["a.safetensors", "b.safetensors", "mean.safetensors"]


def checkpoint(prefix, text):
    for ending in (".index", ".data-00000-of-00001"):
        prefix.with_name(prefix.name + ending).write_text(text)


def test_pieces_of_a_checkpoint_belong_to_its_prefix(tmp_path):
    checkpoint(tmp_path / "ck[1]", "old")
    (tmp_path / "ck[1].txt").write_text("mine")
    assert [path.name for path in pieces(tmp_path / "ck[1]")] == ["ck[1].data-00000-of-00001", "ck[1].index"]
    with pytest.raises(AverageError, match="it exists"):
        check_free(tmp_path / "ck[1]", force=False)


def test_pieces_of_a_checkpoint_are_replaced_together(tmp_path):
    checkpoint(tmp_path / "ck[1]", "old")
    write_whole(tmp_path / "ck[1]", 1, True, lambda partial: checkpoint(partial, "new"))
    assert names(tmp_path) == ["ck[1].data-00000-of-00001", "ck[1].index"]
    assert {path.read_text() for path in tmp_path.iterdir()} == {"new"}


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_old_pieces_are_restored_if_new_ones_cannot_be_renamed(failing, tmp_path, monkeypatch, untouched):
    checkpoint(tmp_path / "ck", "old")
    real, calls = type(tmp_path).rename, []

    def fail_once(self, target):
        calls.append(target)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", fail_once)
    with untouched(tmp_path), pytest.raises(AverageError, match="ck: Input/output error"):
        write_whole(tmp_path / "ck", 1, True, lambda partial: checkpoint(partial, "new"))


def test_folder_is_replaced_whole(tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    (out / "saved_model.pb").write_text("old")

    def write(partial):
        partial.mkdir()
        (partial / "new").write_text("new")

    write_whole(out, 1, True, write)
    assert names(tmp_path) == ["model"]
    assert names(out) == ["new"]


def test_part_of_a_checkpoint_that_fails_leaves_nothing(tmp_path, untouched):
    def write(partial):
        checkpoint(partial, "new")
        raise OSError(28, "No space left on device")

    with untouched(tmp_path), pytest.raises(AverageError, match="No space left"):
        write_whole(tmp_path / "ck", 1, False, write)
