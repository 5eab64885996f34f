"""Hostile files, made to hang or crash their reader: a one-line error, in little time and memory."""

# Tests: hvdx/averaging/limits.py, hvdx/averaging/formats.py, hvdx/averaging/torch_pickle.py

import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest

from hvdx.averaging import average
from hvdx.averaging.formats import open_network
from hvdx.cli.main import main
from hvdx.errors import AverageError
from tests.averaging.torch_files import archive, pickled, tensor
from tests.launch import ROOT

_MEMORY = 3 << 30


def deep(make, inner, levels):
    for _ in range(levels):
        inner = make(inner)
    return inner


def pytorch_with(pickle_bytes):
    return lambda path: archive(path, pickle_bytes, {"0": bytes(24)})


def keras_with(config=b"{}", compression=zipfile.ZIP_STORED):
    """Return a function that writes a Keras archive with this configuration and without weights."""

    def make(path):
        with zipfile.ZipFile(path, "w", compression) as file:
            file.writestr("config.json", config)
            file.writestr("model.weights.h5", bytes(1 << 20))

    return make


def declared(path, size):
    """Write a Keras archive whose directory gives `size` as the unpacked size of the weights, in bytes."""
    keras_with(compression=zipfile.ZIP_DEFLATED)(path)
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\x01\x02") + 24
    content[place : place + 4] = struct.pack("<I", size)
    path.write_bytes(content)


def hdf5_with(fill):
    """Return a function that writes an HDF5 file; `fill` receives the open file."""

    def make(path):
        with h5py.File(path, "w") as h5:
            h5["w"] = np.ones(3, np.float32)
            fill(h5)

    return make


def unwritten(h5):
    h5.create_dataset("huge", (1 << 34,), "f4", chunks=(1 << 20,))


def packed(h5):
    """Add a dataset that is compressed about 1000 to 1."""
    data = h5.create_dataset("huge", (1 << 28,), "f4", chunks=(1 << 22,), compression="gzip")
    block = io.BytesIO()
    with h5py.File(block, "w") as other:
        other.create_dataset("one", data=np.zeros(1 << 22, "f4"), chunks=(1 << 22,), compression="gzip")
        _, content = other["one"].id.read_direct_chunk((0,))
    for i in range(64):
        data.id.write_direct_chunk((i << 22,), content)


def renamed_locally(path):
    """Write an archive with an entry whose local name differs from its name in the directory."""
    archive(path, pickled({"w": tensor()}), {"0": bytes(24)})
    path.write_bytes(path.read_bytes().replace(b"a/data/0", b"a/data/1", 1))


def keras_renamed_locally(path):
    keras_with()(path)
    path.write_bytes(path.read_bytes().replace(b"model.weights.h5", b"model.weights.h6", 1))


def overlapping(path):
    """Write an archive with two entries that share their bytes: a small file could unpack to any size."""
    value = {"v": tensor(key="0"), "w": tensor(key="1")}
    archive(path, pickled(value), {"0": bytes(24), "1": bytes(24)})
    content = bytearray(path.read_bytes())
    first, second = content.index(b"PK\x03\x04", content.index(b"a/byteorder")), content.rindex(b"PK\x01\x02")
    content[second + 42 : second + 46] = struct.pack("<I", first)
    path.write_bytes(content)


def of_later_version(path):
    """Write an archive that only a later version of zip can extract."""
    zipped(path, {"config.json": b"{}"})
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 6 : at + 8] = struct.pack("<H", 99)
    path.write_bytes(content)


LISTS = deep(lambda inner: [inner, inner], [], 60)
# Each tuple holds the previous one twice, and the last is a key.
TUPLES = b"\x80\x02})" + b"2\x86" * 60 + b"Ns."
# Bytes of a pickle, since pickle.dumps raises RecursionError for such deep lists.
DEEP = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."

# Files that take much time or memory without limits; each is read in a separate process.
EXPENSIVE = {
    "lists in lists": ("pt", pytorch_with(pickle.dumps(LISTS, 2)), "data.pkl: expected"),
    "tuples as a key": ("pt", pytorch_with(TUPLES), "data.pkl: expected"),
    "names": (
        "pt",
        pytorch_with(pickled([{("k" * 100_000): [tensor()] * 20_000}])),
        "data.pkl: expected",
    ),
    "window over a storage": (
        "pt",
        lambda path: archive(
            path,
            pickled({"w": tensor(count=1 << 20, shape=(1 << 19, 1 << 19), stride=(1, 1))}),
            {"0": bytes(1 << 22)},
        ),
        "w: expected at most 1048576 elements, as its storage has, got 274877906944",
    ),
    "unwritten": ("h5", hdf5_with(unwritten), "huge: expected"),
    "packed": ("h5", hdf5_with(packed), "huge: expected"),
    "packed weights": (
        "keras",
        lambda path: declared(path, 1 << 31),
        "expected at most",
    ),
}


@pytest.mark.parametrize("case", EXPENSIVE, ids=lambda case: case.replace(" ", "-"))
def test_hostile_file_takes_little_time_and_memory(case, tmp_path):
    ending, make, words = EXPENSIVE[case]
    path = tmp_path / f"bad.{ending}"
    make(path)
    done = subprocess.run(
        [sys.executable, "-m", "hvdx", "average", path, path, "-o", tmp_path / f"mean.{ending}"],
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY)),
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr[-2000:]
    assert done.stderr.startswith(f"hvdx: {path}: ")
    assert words in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


MALFORMED = {
    "deep lists": ("pt", pytorch_with(DEEP), "data.pkl: expected"),
    "long integer as a key": ("pt", pytorch_with(pickle.dumps({10**5000: []}, 2)), "data.pkl: expected"),
    "long integer as an offset": ("pt", pytorch_with(pickled(tensor(offset=10**5000))), "a tensor without a shape"),
    "long count": ("pt", pytorch_with(pickled(tensor(count=10**5000))), "an invalid storage"),
    "65 dimensions": ("pt", pytorch_with(pickled(tensor(shape=(1,) * 65, stride=(1,) * 65))), "the maximum is 64"),
    "bytes that are not there": ("pt", pytorch_with(b"\x80\x05\x96" + b"\xff" * 6 + b"\0\0."), "data.pkl: expected"),
    "long alignment": (
        "pt",
        lambda path: zipped(path, {"a/data.pkl": pickled({"w": 1}), "a/.storage_alignment": b"9" * 5000}),
        ".storage_alignment: expected at most 64 bytes, got 5000",
    ),
    "another name": ("pt", renamed_locally, "a/data/0: expected"),
    "overlapping entries": ("pt", overlapping, "a/data/"),
    "weights of another name": ("keras", keras_renamed_locally, "model.weights.h5: it is damaged"),
    "deep configuration": ("keras", keras_with(b"[" * 900 + b"]" * 900), "config.json: "),
    "very deep configuration": ("keras", keras_with(b"[" * 50_000 + b"]" * 50_000), "config.json: "),
    "large configuration": (
        "keras",
        keras_with(b'"' + b" " * (1 << 25) + b'"', compression=zipfile.ZIP_DEFLATED),
        "config.json: ",
    ),
    "configuration of another kind": (
        "keras",
        keras_with(json.dumps({"class_name": "__keras_tensor__", "config": 3}).encode()),
        "config.json: ",
    ),
    "reference of another kind": ("keras", keras_with(b'{"input_layers": [[{}, 0, 0]], "layers": 3}'), ": "),
    "deep attribute": (
        "h5",
        hdf5_with(lambda h5: h5.attrs.update(model_config="[" * 900 + "]" * 900)),
        "model_config: expected JSON",
    ),
    "empty attribute": (
        "h5",
        hdf5_with(lambda h5: h5.attrs.update(model_config=h5py.Empty("f4"))),
        "model_config: expected JSON",
    ),
    "shape of long integers": (
        "safetensors",
        lambda path: headed(path, {"w": {"dtype": "F32", "shape": [10**4000] * 2, "data_offsets": [0, 4]}}),
        "its header: expected",
    ),
    "shape of many dimensions": (
        "safetensors",
        lambda path: headed(path, {"w": {"dtype": "F32", "shape": [1 << 60] * 500, "data_offsets": [0, 4]}}),
        "its header: expected",
    ),
    # Half a million take 40 s to read.
    "tensors without elements": (
        "safetensors",
        lambda path: headed(
            path, {f"w{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(80_000)}
        ),
        "its header: expected at most 4194",
    ),
    "opcodes": ("pt", pytorch_with(b"\x80\x02" + b"N0" * (3 << 20) + b"N."), "data.pkl: expected at most 4194"),
    "name that leaves the archive": (
        "pt",
        lambda path: zipped(path, {"a/data.pkl": pickled({"w": 1}), "a/../../.bashrc": b""}),
        "a/../../.bashrc: expected an entry within the archive",
    ),
    "absolute name": (
        "keras",
        lambda path: zipped(path, {"config.json": b"{}", "/etc/motd": b""}),
        "/etc/motd: expected an entry within the archive",
    ),
    "later zip version": ("keras", of_later_version, "expected a zip archive"),
    "control codes": (
        "safetensors",
        lambda path: headed(path, {"\x1b[2Jw": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
        "\\x1b[2Jw: expected",
    ),
}


def zipped(path, entries):
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries.items():
            file.writestr(name, content)


def headed(path, header):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["w.safetensors", "w.keras", "w.pt", "w.h5", "w", "model.safetensors.index.json"])
def test_file_that_is_none_is_refused(kind, name, tmp_path, capsys):
    path = tmp_path / name
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    for given in (path, tmp_path):
        assert main(["average", str(given), str(given), "-o", str(tmp_path / "mean.keras")]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.replace(" ", "-"))
def test_malformed_file_is_reported_in_one_line(case, tmp_path, capsys):
    ending, make, words = MALFORMED[case]
    path = tmp_path / f"bad.{ending}"
    # Python refuses to print such long integers in decimal, but pickles store them as bytes.
    make(path)
    assert main(["average", str(path), str(path), "-o", str(tmp_path / f"mean.{ending}")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hvdx: {path}: ")
    assert words in error
    assert error.count("\n") == 1
    assert len(error) < 1000


def test_expanded_tensor_is_read_once(tmp_path):
    """An expanded tensor costs only its stored elements."""
    for i in range(2):
        value = {"w": tensor(count=2, shape=(1 << 40, 2), stride=(0, 1))}
        archive(tmp_path / f"{i}.pt", pickled(value), {"0": np.full(2, i, "<f4").tobytes()})
    average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "mean.pt")
    assert open_network(tmp_path / "mean.pt").tensors["w"].array().tolist() == [[0.5, 0.5]]
    value = {"w": tensor(count=2, shape=(1 << 39, 2), stride=(0, 1))}
    archive(tmp_path / "2.pt", pickled(value), {"0": bytes(8)})
    with pytest.raises(AverageError, match=r"2\.pt: shapes of expanded tensors\.w\[0\]: expected 1099511627776"):
        average([tmp_path / "0.pt", tmp_path / "2.pt"], tmp_path / "other.pt")


def test_objects_in_hdf5_that_are_not_tensors_are_copied(tmp_path):
    def fill(h5):
        h5["nothing"] = h5py.Empty("f4")
        h5["kind"] = np.dtype("f4")

    for i in range(2):
        hdf5_with(fill)(tmp_path / f"{i}.h5")
    average([tmp_path / "0.h5", tmp_path / "1.h5"], tmp_path / "mean.h5")
    with h5py.File(tmp_path / "mean.h5") as h5:
        assert sorted(h5) == ["kind", "nothing", "w"]
        assert h5["nothing"].shape is None
        assert isinstance(h5["kind"], h5py.Datatype)
