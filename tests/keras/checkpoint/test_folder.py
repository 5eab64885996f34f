"""A folder of checkpoints: errors of several ranks are one if all are the same; what is no file is refused."""

import json
import os

import pytest

from hvdx.comm import supervision
from hvdx.comm.local import LocalComm
from hvdx.errors import CheckpointError, ConfigError, HvdxError, ReplicaError
from hvdx.keras.checkpoint import restoring
from hvdx.keras.checkpoint.files import Arrays, sealed
from hvdx.keras.checkpoint.folder import FORMAT, Folder, Saved
from tests.strategies.virtual import on_all


def errors(folder, text):
    """Return the errors that two ranks raise if each fails with `text(rank)`."""

    def fail(comm):
        def work():
            raise ConfigError(text(comm.rank))

        with pytest.raises(HvdxError) as caught:
            Folder(str(folder), comm).on_all_ranks("restoring", work, "Do: something else.")
        return caught.value

    return on_all(2, fail)


def test_errors_that_differ_in_keras_numbers_only_are_one_error(tmp_path):
    found = errors(tmp_path, lambda rank: f"sequential_{rank}/dense_{rank + 5}/kernel: expected float32[6x8]")
    assert [type(error) for error in found] == [ConfigError] * 2
    assert all(error.collective for error in found)


def test_different_errors_of_ranks_are_listed(tmp_path):
    found = errors(tmp_path, lambda rank: f"dense/kernel: got float32[{rank}]")
    assert [type(error) for error in found] == [ReplicaError] * 2
    assert "rank 0: dense/kernel: got float32[0]; rank 1: dense/kernel: got float32[1]" in str(found[0])


def test_checkpoints_that_are_gone_after_a_restart_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv(supervision.SAVED_VARIABLE, json.dumps([str(tmp_path / "saved")]))
    with pytest.raises(ConfigError, match="--checkpoint-lost restart"):
        restoring.restore_newest(Folder(str(tmp_path / "saved"), LocalComm()), None)
    assert restoring.restore_newest(Folder(str(tmp_path / "saved" / "fit-2"), LocalComm()), None) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skip", 10**15),
        ("skip", -1),
        ("step", 2.5),
        ("epoch", float("nan")),
        ("ranks", 0),
        ("ranks", True),
        ("epoch", []),
    ],
)
def test_manifest_with_absurd_numbers_is_damaged(name, value, tmp_path):
    """Also if its checksum is right."""
    folder = tmp_path / "epoch-0001"
    folder.mkdir()
    right = {"format": FORMAT, "epoch": 1, "step": 0, "skip": 0, "ranks": 2}
    (folder / "manifest.json").write_text(sealed(right))
    assert Saved(folder).manifest == right
    (folder / "manifest.json").write_text(sealed(right | {name: value}))
    with pytest.raises(CheckpointError, match=f"{name}: expected a whole number"):
        Saved(folder)


def test_checkpoint_of_something_else_than_files_is_damaged(tmp_path):
    folder = tmp_path / "epoch-0001"
    folder.mkdir()
    os.mkfifo(folder / "manifest.json")
    (folder / "rank-0.safetensors").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Saved(folder)
    with pytest.raises(CheckpointError, match="not a regular file"):
        Arrays.of(folder / "rank-0.safetensors")
