"""Averages of MXNet lists of arrays, written and read by Gluon."""

import struct
import subprocess

import ml_dtypes
import numpy as np
import pytest

from hvdx.averaging import average
from hvdx.averaging.formats import open_network
from hvdx.averaging.mxnet import MXNet
from hvdx.errors import AverageError

V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
FLAGS = ["f4", "f8", "f2", "u1", "i4", "i1", "i8", "?", "i2", "u2", "u4", "u8", ml_dtypes.bfloat16]

MAKE = """
import sys
import mxnet as mx
from mxnet.gluon import nn

for seed in range(3):
    mx.random.seed(seed)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4), nn.Dense(300, in_units=700))
    net.initialize(mx.init.Xavier())
    net[1].running_mean.set_data(mx.nd.random.normal(shape=(4,)))
    net[1].running_var.set_data(mx.nd.random.uniform(1, 2, shape=(4,)))
    net.save_parameters(f"{sys.argv[1]}/{seed}.params")
    arrays = [mx.nd.random.normal(shape=(5, 6)).astype(t) for t in ("float64", "float16", "float32")]
    mx.nd.save(f"{sys.argv[1]}/list{seed}.params", [*arrays, mx.nd.ones((3,), dtype="int64")])
"""
CHECK = """
import sys
import mxnet as mx
import numpy as np
from mxnet.gluon import nn

net = nn.HybridSequential()
net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4), nn.Dense(300, in_units=700))
net.load_parameters(f"{sys.argv[1]}/mean.params")
for name in ("", "list"):
    inputs = [mx.nd.load(f"{sys.argv[1]}/{name}{seed}.params") for seed in range(3)]
    mean = mx.nd.load(f"{sys.argv[1]}/{name}mean.params")
    keys = list(mean) if isinstance(mean, dict) else range(len(mean))
    assert len(mean) == len(inputs[0]) and (not isinstance(mean, dict) or list(mean) == list(inputs[0]))
    for key in keys:
        total = inputs[0][key].astype("float64") + inputs[1][key].astype("float64") + inputs[2][key].astype("float64")
        expected = (total / 3).astype(mean[key].dtype)
        assert mean[key].dtype == inputs[0][key].dtype and mean[key].shape == inputs[0][key].shape, key
        assert mean[key].asnumpy().tobytes() == expected.asnumpy().tobytes(), key
        print("equal", key)
assert np.abs(mx.nd.load(f"{sys.argv[1]}/mean.params")["1.running_mean"].asnumpy()).sum() > 0
"""
NUMPY_SHAPES = """
import sys
import mxnet as mx

mx.npx.set_np()
if sys.argv[2] == "make":
    for seed in range(2):
        mx.npx.save(f"{sys.argv[1]}/{seed}.params", {"scalar": mx.np.array(seed * 2.0), "empty": mx.np.ones((0, 3))})
else:
    mean = mx.npx.load(f"{sys.argv[1]}/mean.params")
    assert mean["scalar"].shape == () and float(mean["scalar"]) == 1.0 and mean["empty"].shape == (0, 3), mean
"""


def run(python, program, *words):
    done = subprocess.run([python, "-c", program, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.mxnet
@pytest.mark.filterwarnings("ignore:the networks have batch normalisation")
def test_mean_of_gluon_files_is_that_of_mxnet(mxnet_python, tmp_path):
    run(mxnet_python, MAKE, tmp_path)
    for name in ("", "list"):
        average([tmp_path / f"{name}{seed}.params" for seed in range(3)], tmp_path / f"{name}mean.params")
    assert run(mxnet_python, CHECK, tmp_path).count("equal") == 8 + 4


@pytest.mark.mxnet
def test_scalars_and_empty_arrays_are_kept(mxnet_python, tmp_path):
    run(mxnet_python, NUMPY_SHAPES, tmp_path, "make")
    average([tmp_path / "0.params", tmp_path / "1.params"], tmp_path / "mean.params")
    run(mxnet_python, NUMPY_SHAPES, tmp_path, "check")


# The tests below write files by hand and do not need MXNet.


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
