"""Averages of PyTorch files, written by torch.save and read by torch.load; and pickles that contain code."""

# Tests: hvdx/averaging/torch_pickle.py, hvdx/averaging/torch_values.py

import collections
import contextlib
import io
import os
import pickle
import pickletools
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from hvdx.averaging import average, pytorch
from hvdx.averaging.formats import open_network
from hvdx.averaging.pytorch import PyTorch
from hvdx.averaging.torch_pickle import read_pickle
from hvdx.errors import AverageError
from tests.averaging.torch_files import FLOATS, REBUILD, Calls, Name, Stored, archive, pickled, tensor
from tests.launch import ROOT


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def flat(value, prefix=()):
    """Yield (keys, tensor) for every tensor in nested dictionaries and lists."""
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(item, (*prefix, key))
    elif hasattr(value, "stride"):
        yield prefix, value


def expected_mean(torch, tensors):
    first = tensors[0]
    if not (first.is_floating_point() or first.is_complex()):
        return first
    wide = torch.complex128 if first.is_complex() else torch.float64
    return (sum(t.detach().to(wide) for t in tensors) / len(tensors)).to(first.dtype)


def assert_mean(torch, inputs, result):
    """Check that every tensor in `result` is the mean that PyTorch computes, bit for bit."""
    found, sources = dict(flat(result)), [dict(flat(i)) for i in inputs]
    assert list(found) == list(sources[0])
    for keys, got in found.items():
        expected = expected_mean(torch, [g[keys] for g in sources])
        assert got.dtype == expected.dtype, keys
        assert got.shape == expected.shape, keys
        assert got.stride() == sources[0][keys].stride(), keys
        raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in (got, expected)]
        assert raw[0].equal(raw[1]), keys


def averaged(torch, tmp_path, nests, **options):
    """Return the mean of saved values, after a check that PyTorch loads it the same with and without mmap."""
    paths = [tmp_path / f"{i}.pt" for i in range(len(nests))]
    for path, nest in zip(paths, nests, strict=True):
        torch.save(nest, path)
    out = tmp_path / "mean.pt"
    average(paths, out, **options)
    mapped = torch.load(out, mmap=True, weights_only=True)
    result = torch.load(out, weights_only=True)
    assert all(a.equal(b) for (_, a), (_, b) in zip(flat(mapped), flat(result), strict=True) if a.dtype.itemsize > 1)
    return result


@pytest.mark.filterwarnings("ignore:the networks have batch normalisation")
def test_mean_of_state_dictionaries_is_that_of_torch(torch, tmp_path):
    def network():
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.BatchNorm2d(8),
            torch.nn.Flatten(),
            torch.nn.LSTM(8, 5, bidirectional=True),
        )

    torch.manual_seed(0)
    networks = [network() for _ in range(3)]
    for net in networks:
        net[1](torch.randn(16, 8, 4, 4))
    states = [net.state_dict() for net in networks]
    result = averaged(torch, tmp_path, states)
    assert_mean(torch, states, result)
    assert result["1.running_mean"].abs().sum() > 0
    assert networks[0].load_state_dict(result).missing_keys == []


def test_mean_of_a_training_checkpoint_is_that_of_torch(torch, tmp_path):
    def checkpoint(epoch):
        net = torch.nn.Linear(30, 20)
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.randn(4, 30)).square().sum().backward()
        optimizer.step()
        return {
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
            "history": [epoch, {"loss": 0.5}],
            "notes": ("a", b"b", None, torch.device("cpu"), torch.float32, torch.Size([1, 2]), {1, 2}, torch.strided),
        }

    nests = [checkpoint(epoch) for epoch in (3, 4)]
    result = averaged(torch, tmp_path, nests)
    assert_mean(torch, nests, result)
    assert result["epoch"] == 3
    assert "optimizer.state.0.exp_avg" in open_network(tmp_path / "mean.pt").tensors


def test_mean_of_every_dtype_is_that_of_torch(torch, tmp_path):
    kinds = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"]
    whole = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
    nests = []
    for _ in range(3):
        nest = {k: (torch.randn(40, 11) * 2).to(getattr(torch, k)) for k in kinds}
        nest |= {k: torch.ones(3).to(getattr(torch, k)) for k in whole}
        nests.append(nest | {"scalar": torch.randn(()), "empty": torch.ones(0, 4), "large": torch.randn(900, 700)})
    result = averaged(torch, tmp_path, nests)
    assert_mean(torch, nests, result)


def test_strides_offsets_and_shared_storages_are_kept(torch, tmp_path):
    def nest():
        tied, base, overlapped = torch.randn(6, 5), torch.randn(20, 30), torch.randn(10)
        return {
            "tied": tied,
            "again": tied,
            "transposed": torch.randn(300, 400).t(),
            "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "part": torch.randn(10)[3:6],
            "left": base[:, :10],
            "right": base[:, 10:],
            "first": overlapped[:6],
            "last": overlapped[4:],
            "rows": base[3:5],
            "expanded": torch.randn(1, 4).expand(3, 4),
            "columns": torch.randn(6, 4)[:, ::2],
        }

    torch.manual_seed(0)
    nests = [nest() for _ in range(3)]
    result = averaged(torch, tmp_path, nests)
    assert_mean(torch, nests, result)
    assert result["tied"].data_ptr() == result["again"].data_ptr()
    assert result["left"].data_ptr() + 40 == result["right"].data_ptr()
    # Elements that no tensor covers are copied from the first file.
    sources = torch.load(tmp_path / "0.pt")
    for name, (shape, stride, offset) in {"part": ((3,), (1,), 0), "columns": ((6, 2), (4, 2), 1)}.items():
        between = [nest[name].as_strided(shape, stride, offset) for nest in (result, sources)]
        assert between[0].equal(between[1])
        assert between[0].abs().sum() > 0


def test_tied_tensors_must_be_tied_in_all_files(torch, tmp_path, untouched):
    tied = torch.ones(3)
    torch.save({"a": tied, "b": tied}, tmp_path / "0.pt")
    torch.save({"a": tied, "b": tied.clone()}, tmp_path / "1.pt")
    with untouched(tmp_path), pytest.raises(AverageError, match=r"1\.pt: .*tensors that share elements"):
        average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "mean.pt")


def test_parameters_and_attributes_are_read(torch, tmp_path):
    def nest():
        parameter, marked, plain = (
            torch.nn.Parameter(torch.randn(3)),
            torch.nn.Parameter(torch.randn(3)),
            torch.randn(3),
        )
        marked.mark = plain.mark = "m"
        return {"p": parameter, "m": marked, "t": plain, "b": torch.nn.Buffer(torch.randn(2))}

    nests = [nest() for _ in range(2)]
    for i, one in enumerate(nests):
        torch.save(one, tmp_path / f"{i}.pt")
    average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "mean.pt")
    result = torch.load(tmp_path / "mean.pt", weights_only=False)
    assert_mean(torch, nests, result)
    assert result["m"].mark == result["t"].mark == "m"


def test_single_tensor_is_averaged(torch, tmp_path):
    result = averaged(torch, tmp_path, [torch.ones(3), torch.zeros(3)], weights=[1, 3])
    assert result.tolist() == [0.25] * 3


def test_archive_has_the_layout_of_torch_save(torch, tmp_path):
    """The result has the same entries in the same order, correct checksums, and entries aligned for mmap."""
    averaged(torch, tmp_path, [{str(i): torch.randn(i + 1) for i in range(12)} for _ in range(2)])
    with zipfile.ZipFile(tmp_path / "mean.pt") as mean, zipfile.ZipFile(tmp_path / "0.pt") as sources:
        assert mean.testzip() is None
        assert mean.namelist() == sources.namelist()
        opened = PyTorch.open(tmp_path / "mean.pt")
        for info in mean.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            assert opened._begin(info) % 64 == 0


def test_large_entries_are_zip64(torch, tmp_path, monkeypatch):
    monkeypatch.setattr(pytorch, "_ZIP64_FROM", 1000)
    nests = [{"small": torch.randn(3), "large": torch.randn(1000)} for _ in range(2)]
    assert_mean(torch, nests, averaged(torch, tmp_path, nests))
    opened = PyTorch.open(tmp_path / "mean.pt")
    assert all(opened._begin(info) % 64 == 0 for info in opened._entries.values())


def test_weights_bin_is_recognised_by_its_content(torch, tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert isinstance(open_network(tmp_path / "pytorch_model.bin"), PyTorch)


def test_unequal_counters_are_named(torch, tmp_path, untouched):
    for i in range(2):
        torch.save({"steps": torch.tensor([7, 7 + i])}, tmp_path / f"{i}.pt")
    paths = [tmp_path / "0.pt", tmp_path / "1.pt"]
    with untouched(tmp_path), pytest.raises(AverageError, match=r"1\.pt: steps: expected 7.*got 8 at \[1\]"):
        average(paths, tmp_path / "mean.pt")
    average(paths, tmp_path / "mean.pt", swa=True)
    assert torch.load(tmp_path / "mean.pt")["steps"].tolist() == [7, 8]


def refused(torch, tmp_path, value, **options):
    path = tmp_path / "bad.pt"
    torch.save(value, path, **options)
    with pytest.raises(AverageError) as caught:
        PyTorch.open(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


class Net:
    pass


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_other_values_than_state_dictionaries_are_refused_with_the_remedy(torch, tmp_path):
    remedy = "torch.save(model.state_dict(), path)"
    text = refused(torch, tmp_path, torch.nn.Linear(1, 1))
    assert "torch.nn.modules.linear.Linear" in text
    assert remedy in text
    assert remedy in refused(torch, tmp_path, Net())
    assert "a sparse tensor" in refused(torch, tmp_path, {"w": torch.eye(2).to_sparse()})
    assert "a quantised tensor" in refused(
        torch, tmp_path, {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}
    )
    assert "meta device" in refused(torch, tmp_path, {"w": torch.ones(2, device="meta")})
    assert "conjugate" in refused(torch, tmp_path, {"w": torch.ones(2, dtype=torch.complex64).conj()})
    assert "older format" in refused(torch, tmp_path, {"w": torch.ones(2)}, _use_new_zipfile_serialization=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused_with_the_remedy(torch, tmp_path):
    path = tmp_path / "script.pt"
    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1)), path)
    with pytest.raises(AverageError, match=r"script\.pt: .*TorchScript"):
        PyTorch.open(path)


# The tests below write archives by hand and do not need PyTorch.


def test_big_endian_files_keep_their_byte_order(tmp_path):
    for i in range(2):
        array = (np.arange(6) * (i + 1)).astype(">f4")
        archive(tmp_path / f"{i}.pt", pickled({"w": tensor()}), {"0": array.tobytes()}, b"big")
    average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "mean.pt")
    mean = open_network(tmp_path / "mean.pt").tensors["w"]
    assert mean.dtype == np.dtype(">f4")
    assert mean.array().tolist() == [[0, 1.5, 3], [4.5, 6, 7.5]]


def evil(marker):
    """Return values whose pickles would make a folder, or change this process, if any of it were executed."""
    make = f"__import__('os').mkdir({str(marker)!r})"
    setter = Calls(Name("builtins", "setattr"), REBUILD, "x", 1)
    return {
        "os.system": {"w": Calls(os.system, f"mkdir {marker}")},
        "os.mkdir": {"w": Calls(os.mkdir, str(marker))},
        "eval": {"w": Calls(eval, make)},
        "exec": {"w": Calls(exec, make)},
        "subprocess": {"w": Calls(subprocess.check_call, ["mkdir", str(marker)])},
        "getattr": {"w": Calls(getattr, Name("torch._utils", "os"), "system")},
        "inside a tensor": {"w": tensor(shape=Calls(eval, make))},
        "as a key": {Calls(eval, make): 1},
        "as a storage": {"w": Stored("storage", Calls(eval, make), "0", "cpu", 6)},
        "through an allowed name": {
            "w": Calls(Name("torch._tensor", "_rebuild_from_type_v2"), eval, None, (make,), {})
        },
        "setattr": {"w": setter},
        "a module of hvdx": {"w": Calls(Name("hvdx.averaging.torch_pickle", "read_pickle"), b"", "")},
        "torch.load": {"w": Calls(Name("torch", "load"), "x")},
        "torch.hub": {"w": Calls(Name("torch.hub", "load"), "x")},
        "dotted": {"w": Calls(Name("torch", "serialization.os.system"), f"mkdir {marker}")},
        "storage that is called": {"w": Calls(FLOATS, "x")},
        "dtype that is called": {"w": Calls(Name("torch", "float32"), make)},
    }


@pytest.mark.parametrize("case", list(evil("")))
def test_code_in_a_pickle_is_refused_and_not_executed(case, tmp_path, untouched):
    marker = tmp_path / "executed"
    good = archive(tmp_path / "good.pt", pickled({"w": tensor()}), {"0": bytes(24)})
    bad = archive(tmp_path / "bad.pt", pickled(evil(marker)[case]), {"0": bytes(24)})
    with untouched(tmp_path), pytest.raises(AverageError, match=r"bad\.pt: data\.pkl: expected") as caught:
        average([good, bad], tmp_path / "mean.pt")
    assert not marker.exists()
    assert "torch.save(model.state_dict(), path)" in str(caught.value)


def test_refused_name_is_reported(tmp_path):
    bad = archive(tmp_path / "bad.pt", pickle.dumps({"w": Calls(os.system, "true")}, 2))
    with pytest.raises(AverageError, match=r"(posix|os)\.system, which loading would execute \(it was not\)"):
        PyTorch.open(bad)


@pytest.mark.parametrize(
    "name", [("torch._utils", "_rebuild_tensor_v2"), ("torch", "FloatStorage"), ("collections", "OrderedDict")]
)
def test_state_cannot_be_set_on_stand_ins(name):
    """The opcode BUILD sets the state of an object, and all files share the stand-ins."""
    reference = pickle.GLOBAL + "\n".join(name).encode() + b"\n"
    for state in ({"_body": 1, "name": "x"}, (None, {"_body": 1, "name": "x"})):
        content = b"\x80\x02" + reference + pickle.dumps(state, 2)[2:-1] + pickle.BUILD + pickle.STOP
        pickletools.dis(content, out=io.StringIO())
        with pytest.raises(AverageError, match=r"bad\.pt: expected a pickle"):
            read_pickle(content, "bad.pt")
    content = pickled({"w": tensor()})
    assert read_pickle(content, "good.pt")["w"].dtype == "f4"


def test_new_objects_of_stand_ins_are_refused():
    for make in (pickle.NEWOBJ, pickle.REDUCE + pickle.EMPTY_TUPLE + pickle.REDUCE):
        content = b"\x80\x02" + pickle.GLOBAL + b"torch\nFloatStorage\n" + pickle.EMPTY_TUPLE + make + pickle.STOP
        with pytest.raises(AverageError):
            read_pickle(content, "bad.pt")


@pytest.mark.parametrize("put", [b"r" + (1 << 31).to_bytes(4, "little"), b"p4294967296\n"])
def test_memo_takes_no_more_memory_than_its_entries(put):
    assert read_pickle(b"\x80\x02}" + put + b".", "good.pt") == {}


def test_state_of_a_dictionary_cannot_hide_its_items(tmp_path):
    """torch.save stores the versions of modules as attributes of the dictionary; these have no other effect."""

    class Hiding(collections.OrderedDict):
        def __reduce__(self):
            return collections.OrderedDict, (), {"items": 3, "_metadata": {}}, None, iter({"w": tensor()}.items())

    path = archive(tmp_path / "a.pt", pickled(Hiding()), {"0": bytes(24)})
    assert list(PyTorch.open(path).tensors) == ["w"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (tensor(count=7), "tensor: expected 28 bytes in the entry data/0, got 24"),
        (tensor(key="9"), "tensor: expected 24 bytes in the entry data/9, got none"),
        (tensor(key="../byteorder"), "expected 24 bytes"),
        (tensor(offset=1), "expected at most 6 elements, as its storage has, got a tensor that ends at 7"),
        (tensor(shape=(3, 3)), "got a tensor that ends at 9"),
        (tensor(stride=(30, 1)), "got a tensor that ends at 33"),
        (tensor(stride=(-3, 1)), "a tensor without a shape"),
        (tensor(offset=-1), "a tensor without a shape"),
        (tensor(shape=(2, 3, 1)), "a tensor without a shape"),
        (tensor(shape=(2.0, 3)), "a tensor without a shape"),
        (tensor(shape=7), "expected a pickle"),
        (tensor(kind="FloatStorage"), "an invalid storage"),
        (tensor(kind=Name("torch.storage", "UntypedStorage")), "a tensor without a shape"),
        ({"a.b": tensor(), "a": {"b": tensor()}}, "a.b: two tensors have this name"),
        (
            {"a": tensor(), "b": tensor(kind=Name("torch", "IntStorage"))},
            "a/data/0: expected one dtype in a storage",
        ),
    ],
)
def test_damaged_tensors_are_reported(value, words, tmp_path):
    path = archive(tmp_path / "bad.pt", pickled(value), {"0": bytes(24)})
    with pytest.raises(AverageError) as caught:
        PyTorch.open(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_list_that_contains_itself_is_read_once(tmp_path):
    loop = [tensor()]
    loop.append(loop)
    path = archive(tmp_path / "loop.pt", pickled(loop), {"0": bytes(24)})
    assert list(PyTorch.open(path).tensors) == ["0"]


def test_truncated_anywhere_is_reported(tmp_path, untouched):
    whole = archive(tmp_path / "a.pt", pickled({"w": tensor()}), {"0": bytes(24)})
    content = whole.read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "b.pt").write_bytes(content[:length])
        with untouched(tmp_path), pytest.raises(AverageError, match=r"b\.pt: "):
            average([whole, tmp_path / "b.pt"], tmp_path / "mean.pt")


def test_flipped_bytes_never_raise_another_error(tmp_path):
    """A changed byte raises an AverageError or goes unnoticed."""
    content = archive(tmp_path / "a.pt", pickled({"w": tensor()}), {"0": bytes(24)}).read_bytes()
    path = tmp_path / "b.pt"
    rng = np.random.default_rng(0)
    for place in range(len(content)):
        for value in {content[place] ^ 1, int(rng.integers(256))}:
            path.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
            with contextlib.suppress(AverageError):
                PyTorch.open(path)


def test_disk_that_fills_up_leaves_nothing(tmp_path, untouched, on_a_full_disk):
    """After an error the archive is closed, which writes its directory."""
    whole = tensor(count=100_000, shape=(100_000,), stride=(1,))
    scattered = tensor(count=100_000, shape=(2, 50_000), stride=(1, 2))
    for value in (whole, scattered):
        for i in range(2):
            archive(tmp_path / f"{i}.pt", pickled({"w": value}), {"0": bytes(400_000)})
        with untouched(tmp_path):
            done = on_a_full_disk([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "mean.pt")
        assert done.returncode == 2
        assert done.stderr.startswith(f"hvdx: {tmp_path / 'mean.pt'}: File too large. It was not written")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: archive(p, pickled({}), compress=zipfile.ZIP_DEFLATED), "neither compressed nor encrypted"),
        (
            lambda p: archive(p, pickled({"w": tensor()}), {"0": bytes(24)}, b"middle"),
            "byteorder: expected little or big",
        ),
        (lambda p: zipfile.ZipFile(p, "w").close(), "expected an archive as torch.save writes it"),
        (lambda p: p.write_bytes(b"nothing of the kind"), "expected a zip archive"),
        (lambda p: p.write_bytes(b""), "expected a zip archive"),
    ],
)
def test_other_archives_are_refused(make, words, tmp_path):
    make(tmp_path / "bad.pt")
    with pytest.raises(AverageError, match=words):
        open_network(tmp_path / "bad.pt")


def test_torch_is_not_imported(tmp_path):
    for i in range(2):
        archive(tmp_path / f"{i}.pt", pickled({"w": tensor()}), {"0": bytes(24)})
    program = (
        "import sys\nfrom hvdx.averaging import average\naverage(sys.argv[1:3], sys.argv[3])\n"
        "print([m for m in ('torch', 'tensorflow', 'keras', 'h5py', 'safetensors', 'mxnet') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program, *(str(tmp_path / f"{n}.pt") for n in (0, 1, "mean"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stderr
