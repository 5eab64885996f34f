"""Files of checkpoints: their format, exact reading, detection of damage, and atomic writes."""

import contextlib

import ml_dtypes
import numpy as np
import pytest

from hvdx.errors import CheckpointError, ConfigError
from hvdx.keras.checkpoint import files
from hvdx.keras.checkpoint.files import Arrays
from hvdx.keras.checkpoint.folder import FORMAT, Saved

ARRAYS = {
    "weights.0": np.arange(12, dtype=np.float32).reshape(3, 4),
    "weights.1": np.float64(2.5) * np.ones(()),
    "empty": np.zeros((0, 3), np.int64),
    "flags": np.array([True, False]),
    "small": np.arange(4).astype(ml_dtypes.bfloat16),
    "transposed": np.arange(6, dtype=np.uint32).reshape(2, 3).T,
}


def written(path, arrays=ARRAYS):
    files.write({path: lambda file: files.write_arrays(file, arrays)})
    return path


def test_arrays_are_read_back_exactly(tmp_path):
    found = Arrays.of(written(tmp_path / "a.safetensors"))
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    assert sorted(found.part("weights.")) == ["0", "1"]
    assert "0" in found.part("weights.")
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_safetensors_reads_the_files(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    arrays = {k: v for k, v in ARRAYS.items() if k != "small"}
    found = library.load_file(written(tmp_path / "a.safetensors", arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_every_cut_and_every_changed_byte_is_detected(tmp_path):
    path = written(tmp_path / "a.safetensors")
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")

    def read():
        return {name: array.tobytes() for name, array in Arrays.of(path).items()}

    intact = read()
    for length in [0, 5, 8, header - 1, header, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"a.safetensors is damaged"):
            read()
    for i in range(header, len(content)):
        changed = bytearray(content)
        changed[i] ^= 64
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="does not match its checksum"):
            read()
    for i in range(header):
        # In the header, a change may affect only a name, or nothing, such as a space.
        changed = bytearray(content)
        changed[i] ^= 1
        path.write_bytes(changed)
        try:
            found = read()
        except CheckpointError:
            continue
        assert {k: v for k, v in found.items() if k in intact} == {k: v for k, v in intact.items() if k in found}
    path.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        read()


def test_dtype_that_the_format_lacks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected numbers"):
        written(tmp_path / "a.safetensors", {"words": np.array(["a"])})
    assert not (tmp_path / "a.safetensors").exists()


def test_failed_fsync_leaves_no_file(tmp_path, monkeypatch):
    def failing(handle):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        written(tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


def test_every_changed_bit_of_a_description_is_detected_or_changes_nothing(tmp_path):
    """Also one that turns the format to an older one, which had no checksum, or hides the checksum."""
    content = {"format": FORMAT, "epoch": 3, "step": 120, "skip": 0, "weights": [{"name": "a", "shape": [3]}]}
    path = tmp_path / "epoch-0003-step-00000120"
    path.mkdir()
    text = files.sealed(content).encode()
    for i in range(8 * len(text)):
        changed = bytearray(text)
        changed[i // 8] ^= 1 << i % 8
        (path / "manifest.json").write_bytes(changed)
        with contextlib.suppress(CheckpointError):
            assert Saved(path).manifest == content


def test_description_of_another_checkpoint_is_found(tmp_path):
    path = tmp_path / "epoch-0002"
    path.mkdir()
    (path / "manifest.json").write_text(files.sealed({"format": FORMAT, "epoch": 3, "step": 0}))
    with pytest.raises(CheckpointError, match=r"manifest.json is that of epoch-0003"):
        Saved(path)
