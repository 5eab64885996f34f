"""Averages of MXNet lists of arrays; tests/fixtures/mxnet/make.py wrote files and means with MXNet."""

import struct

import ml_dtypes
import numpy as np
import pytest

from hvdx.averaging import average
from hvdx.averaging.formats import open_network
from hvdx.averaging.mxnet import MXNet
from hvdx.errors import AverageError
from tests.launch import ROOT

V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
FLAGS = ["f4", "f8", "f2", "u1", "i4", "i1", "i8", "?", "i2", "u2", "u4", "u8", ml_dtypes.bfloat16]
# Those that MXNet 1.9.1 writes.
WRITTEN = [*FLAGS[:8], ml_dtypes.bfloat16]

FIXTURES = ROOT / "tests" / "fixtures" / "mxnet"


@pytest.mark.filterwarnings("ignore:the networks have batch normalisation")
@pytest.mark.parametrize("kind", ["gluon", "list", "types", "shapes"])
def test_mean_is_the_file_that_mxnet_writes(kind, tmp_path):
    average([FIXTURES / f"{kind}-{i}.params" for i in range(3)], tmp_path / "mean.params")
    assert (tmp_path / "mean.params").read_bytes() == (FIXTURES / f"{kind}-mean.params").read_bytes()


def test_files_of_mxnet_have_its_types_and_shapes():
    gluon, arrays, types, shapes = (
        open_network(FIXTURES / f"{kind}-mean.params").tensors for kind in ("gluon", "list", "types", "shapes")
    )
    assert len(gluon) == 8
    assert np.abs(gluon["1.running_mean"].array()).sum() > 0
    assert list(arrays) == [f"array {i}" for i in range(4)]
    assert {tensor.dtype for tensor in types.values()} == {np.dtype(kind) for kind in WRITTEN}
    assert {name: tensor.shape for name, tensor in shapes.items()} == {"scalar": (), "empty": (0, 3)}


# The tests below write files by hand.


def written(array, version=V2, storage=0, flag=None):
    """Return the bytes of one array in the encoding of MXNet."""
    kinds = [np.dtype(kind) for kind in FLAGS]
    head = struct.pack("<I", version)
    if version != V1:
        head += struct.pack("<i", storage)
    head += struct.pack(f"<i{array.ndim}q", array.ndim, *array.shape)
    return head + struct.pack("<iii", 1, 0, kinds.index(array.dtype) if flag is None else flag) + array.tobytes()


def params(path, arrays, names=None, magic=0x112):
    """Write a list of arrays, given as encoded bytes by name; return its path."""
    names = [name.encode() for name in (arrays if names is None else names)]
    text = b"".join(struct.pack("<Q", len(name)) + name for name in names)
    content = (
        struct.pack("<QQQ", magic, 0, len(arrays)) + b"".join(arrays.values()) + struct.pack("<Q", len(names)) + text
    )
    path.write_bytes(content)
    return path


def test_every_type_and_version_is_averaged(tmp_path):
    for i in range(2):
        arrays = {str(kind): np.array([[1, 0], [1, 1]]).astype(kind) for kind in FLAGS}
        arrays |= {"mean": np.array([2.0 * i]), "empty": np.ones((0, 3)), "scalar": np.array(float(i), "f4")}
        versions = {"float32": V1, "scalar": V3, "empty": V3}
        params(tmp_path / f"{i}.params", {n: written(a, versions.get(n, V2)) for n, a in arrays.items()})
    average([tmp_path / "0.params", tmp_path / "1.params"], tmp_path / "mean.params")
    found = open_network(tmp_path / "mean.params").tensors
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        if name not in ("mean", "scalar"):
            assert found[name].array().tobytes() == array.tobytes()
    assert found["mean"].array().tolist() == [1.0]
    assert found["scalar"].array() == 0.5
    first, mean = (open_network(tmp_path / f"{n}.params")._file for n in ("0", "mean"))
    assert first.size == mean.size


def test_format_is_recognised_by_its_content(tmp_path):
    assert isinstance(open_network(params(tmp_path / "model-0001", {"w": written(np.ones(2))})), MXNet)


@pytest.mark.parametrize("name", ["batchnorm0_running_mean", "bn.running_var", "aux:bn_moving_mean", "bn_moving_var"])
def test_batch_normalisation_is_recognised_by_its_names(name, tmp_path):
    assert MXNet.open(params(tmp_path / "a.params", {name: written(np.ones(2))})).normalises
    assert not MXNet.open(params(tmp_path / "b.params", {"weight": written(np.ones(2))})).normalises


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (written(np.ones(2), storage=1), r"array 0: expected a dense array, got a sparse one .*tostype\('default'\)"),
        (written(np.ones(2), version=2), "array 0: expected an array of MXNet 0.12 or later"),
        (written(np.array(1.0)), "array 0: expected an array with dimensions, got 0: it was not initialised"),
        (written(np.ones(2), flag=13), "array 0: expected a type from 0 to 12, got 13"),
        (written(np.ones(2), flag=-1), "array 0: expected a type from 0 to 12, got -1"),
        (struct.pack("<Iii", V2, 0, 1 << 20), "array 0: expected an array with dimensions, got 1048576"),
        (struct.pack("<Iiiqiii", V2, 0, 1, -1, 1, 0, 0), r"array 0: expected a shape, got \[-1\]"),
        (struct.pack("<Iiiqiii", V2, 0, 1, 1 << 60, 1, 0, 0), "array 0: expected .* the file ends"),
    ],
)
def test_damaged_arrays_are_reported(array, words, tmp_path):
    path = params(tmp_path / "bad.params", {"w": array})
    with pytest.raises(AverageError, match=words) as caught:
        MXNet.open(path)
    assert str(path) in str(caught.value)


def test_damaged_lists_are_reported(tmp_path):
    path, one = tmp_path / "bad.params", {"w": written(np.ones(2))}
    for options, words in (
        ({"magic": 0x113}, "expected the number 0x112 at its beginning, got 0x113"),
        ({"names": ["a", "b"]}, "expected 1 names, one per array, got 2"),
    ):
        with pytest.raises(AverageError, match=words):
            MXNet.open(params(path, one, **options))
    with pytest.raises(AverageError, match="expected each name once"):
        MXNet.open(params(path, one | {"v": written(np.ones(2))}, ["w", "w"]))


def test_truncated_anywhere_is_reported(tmp_path, untouched):
    whole = params(tmp_path / "a.params", {"w": written(np.ones(3)), "v": written(np.ones((2, 2), "f4"))})
    content = whole.read_bytes()
    for length in range(len(content)):
        (tmp_path / "b.params").write_bytes(content[:length])
        with untouched(tmp_path), pytest.raises(AverageError, match=r"b\.params: "):
            average([whole, tmp_path / "b.params"], tmp_path / "mean.params")
