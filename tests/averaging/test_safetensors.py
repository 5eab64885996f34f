"""Averages of safetensors files, written and read by the library."""

import json

import ml_dtypes
import numpy as np
import pytest

from hvdx.averaging import average
from hvdx.averaging.formats import open_network
from hvdx.averaging.safetensors import Safetensors, save
from hvdx.errors import AverageError


def damaged(tmp_path, header, data=b"", length=None):
    """Write a file with the given header; return its path."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_mean_of_files_of_the_library_is_that_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    from safetensors import safe_open

    generator = torch.Generator().manual_seed(0)
    kinds = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"]
    networks = []
    for i in range(3):
        tensors = {k: (torch.randn(33, 17, generator=generator) * 2).to(getattr(torch, k)) for k in kinds}
        tensors |= {"large": torch.randn(700, 900, generator=generator), "scalar": torch.randn((), generator=generator)}
        tensors |= {"steps": torch.arange(5), "mask": torch.tensor([True, False]), "empty": torch.ones(0, 3)}
        networks.append(tensors)
        library.save_file(tensors, tmp_path / f"{i}.safetensors", {"format": "pt", "run": str(i)})
    average([tmp_path / f"{i}.safetensors" for i in range(3)], tmp_path / "mean.safetensors")
    result = library.load_file(tmp_path / "mean.safetensors")
    assert set(result) == set(networks[0])
    for name, found in result.items():
        first = networks[0][name]
        wide = torch.complex128 if first.is_complex() else torch.float64
        expected = (sum(n[name].to(wide) for n in networks) / 3).to(first.dtype)
        assert found.dtype == first.dtype
        assert found.shape == first.shape
        assert found.flatten().view(torch.uint8).equal(expected.flatten().view(torch.uint8)), name
    with safe_open(tmp_path / "mean.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "run": "0"}


def test_weighted_mean_is_that_of_numpy(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(50, 40)).astype("f4") for _ in range(3)]
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, array in zip(paths, arrays, strict=True):
        library.save_file({"w": array}, path)
    average(paths, tmp_path / "mean.safetensors", weights=[0.5, 0.3, 0.2])
    wide = [a.astype("f8") for a in arrays]
    expected = (wide[0] * 0.5 + wide[1] * 0.3 + wide[2] * 0.2).astype("f4")
    assert library.load_file(tmp_path / "mean.safetensors")["w"].tobytes() == expected.tobytes()


def test_save_writes_what_the_library_reads(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    arrays = {
        "b": np.arange(3, dtype="f2"),
        "a": np.arange(12.0).reshape(3, 4).T,
        "big": np.array([1, 2], ">i4"),
        "scalar": np.array(2.5, "f4"),
        "flag": np.array([True, False]),
    }
    save(tmp_path / "w.safetensors", arrays, {"made by": "a test"})
    found = library.load_file(tmp_path / "w.safetensors")
    own = Safetensors.open(tmp_path / "w.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        np.testing.assert_array_equal(own.tensors[name].array(), array)
    assert own.tensors["b"].dtype == np.float16


def test_small_floats_are_read_without_the_library(tmp_path):
    kinds = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    for i in range(2):
        save(tmp_path / f"{i}.safetensors", {k: np.array([i, 1.0], getattr(ml_dtypes, k)) for k in kinds})
    average([tmp_path / "0.safetensors", tmp_path / "1.safetensors"], tmp_path / "mean.safetensors")
    mean = open_network(tmp_path / "mean.safetensors")
    assert {name: t.array().astype("f8").tolist() for name, t in mean.tensors.items()} == {k: [0.5, 1.0] for k in kinds}


def test_order_of_the_tensors_may_differ(tmp_path):
    values = np.array([0, 1, 0, 2], "f4").tobytes()
    for name, order in (("a", ("x", "y")), ("b", ("y", "x"))):
        header = {order[0]: entry(), order[1]: entry(begin=8, end=16)}
        damaged(tmp_path, header, values).rename(tmp_path / f"{name}.safetensors")
    average([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tmp_path / "mean.safetensors")
    assert open_network(tmp_path / "mean.safetensors").tensors["x"].array().tolist() == [0, 1.5]


def test_format_is_recognised_by_its_content(tmp_path):
    save(tmp_path / "model.bin", {"w": np.ones(2)})
    assert isinstance(open_network(tmp_path / "model.bin"), Safetensors)


def test_batch_normalisation_warns(tmp_path):
    for name in "ab":
        save(tmp_path / f"{name}.safetensors", {"bn.running_var": np.ones(2)})
    with pytest.warns(UserWarning, match="batch normalisation"):
        average([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tmp_path / "mean.safetensors")


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{", b"", "the length of its header: expected 2"),
        (b"{]", b"", "its header: expected JSON"),
        (b"[]", b"", "its header: expected JSON"),
        (b"\xff\xfe", b"", "its header: expected JSON"),
        (b'{"w":' * 3000, b"", "its header: expected JSON"),
        (b'{"w": {}, "w": {}}', b"", "a name occurs twice"),
        ({"w": {"dtype": "F32", "shape": [2]}}, b"", "its header: expected JSON"),
        ({"w": entry(shape=[2.0])}, b"x" * 8, "its header: expected JSON"),
        ({"w": entry(shape=[-2])}, b"x" * 8, "its header: expected JSON"),
        ({"w": entry(shape=[True])}, b"x" * 4, "its header: expected JSON"),
        ({"w": entry(dtype=["F32"])}, b"x" * 8, "its header: expected JSON"),
        ({"w": entry(begin=-8, end=0)}, b"x" * 8, "its header: expected JSON"),
        ({"w": entry(dtype="F4")}, b"x" * 8, "w: expected one of BOOL.*got F4"),
        ({"w": entry(end=4)}, b"x" * 4, "w: expected 8 bytes"),
        ({"w": entry(end=9)}, b"x" * 9, "w: expected 8 bytes at 0, got the range from 0 to 9"),
        ({"w": entry(begin=8, end=16)}, b"x" * 16, "w: expected 8 bytes at 0, got the range from 8 to 16"),
        ({"w": entry(), "v": entry(begin=4, end=12)}, b"x" * 12, "v: expected 8 bytes at 8"),
        ({"w": entry(shape=[1 << 60], end=1 << 62)}, b"x" * 8, "w: expected .* the file ends"),
        ({"w": entry()}, b"x" * 12, "expected .* bytes, got"),
    ],
)
def test_damaged_headers_are_reported(header, data, words, tmp_path):
    path = damaged(tmp_path, header, data)
    with pytest.raises(AverageError, match=words) as caught:
        Safetensors.open(path)
    assert str(path) in str(caught.value)


def test_length_of_the_header_is_limited(tmp_path):
    with pytest.raises(AverageError, match="expected 2 to 100000000 bytes, got 100000001"):
        Safetensors.open(damaged(tmp_path, b"{}", length=100_000_001))
    with pytest.raises(AverageError, match="its header: expected 99 bytes"):
        Safetensors.open(damaged(tmp_path, b"{}", length=99))


def test_truncated_anywhere_is_reported(tmp_path, untouched):
    whole = tmp_path / "a.safetensors"
    save(whole, {"w": np.ones(3, "f4"), "v": np.ones((2, 2), "f2")})
    content = whole.read_bytes()
    short = tmp_path / "b.safetensors"
    for length in range(len(content)):
        short.write_bytes(content[:length])
        with untouched(tmp_path), pytest.raises(AverageError, match=r"b\.safetensors: "):
            average([whole, short], tmp_path / "mean.safetensors")


def test_dtype_that_the_format_lacks_is_reported(tmp_path):
    with pytest.raises(AverageError, match="w: safetensors has no complex128"):
        save(tmp_path / "w.safetensors", {"w": np.ones(1, "c16")})


def test_missing_ml_dtypes_is_reported(tmp_path, monkeypatch):
    path = damaged(tmp_path, {"w": entry("BF16", end=4)}, b"x" * 4)
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(AverageError, match=r"bad\.safetensors: .*pip install ml_dtypes"):
        Safetensors.open(path)
