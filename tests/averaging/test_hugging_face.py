"""Averages of Hugging Face checkpoints, in any shards and in one file."""

import contextlib
import json
import os
import resource

import numpy as np
import pytest

from hvdx.averaging import average
from hvdx.averaging.formats import open_network
from hvdx.averaging.hugging_face import HuggingFace
from hvdx.averaging.safetensors import save
from hvdx.errors import AverageError


def folder(path, shards, value, **files):
    """Write a checkpoint whose shards hold the given lists of tensors; return its path."""
    path.mkdir()
    places = {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save(path / file, {name: np.full(3, value, "f4") for name in names}, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 36}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


def content(path):
    network = open_network(path)
    found = {name: tensor.array().tolist() for name, tensor in network.tensors.items()}
    network.close()
    return found


@pytest.mark.parametrize("by", [".", "model.safetensors.index.json"])
def test_mean_is_a_folder_like_the_first(by, tmp_path):
    a = folder(tmp_path / "a", [["x", "y"], ["z"]], 1, config_json="{}", tokenizer_model="t", optimizer_pt="o")
    b = folder(tmp_path / "b", [["x"], ["z", "y"]], 2, config_json="other")
    (a / "runs").mkdir()
    average([a / by, b / by], tmp_path / "mean")
    assert content(tmp_path / "mean") == dict.fromkeys("xyz", [1.5] * 3)
    weights = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
    assert {p.name for p in (tmp_path / "mean").iterdir()} == weights | {"config.json", "tokenizer.model"}
    for name in ("config.json", "model.safetensors.index.json"):
        assert (tmp_path / "mean" / name).read_bytes() == (a / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "mean"]


def test_folder_with_one_file_is_averaged(tmp_path):
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        save(tmp_path / str(i) / "model.safetensors", {"w": np.full(3, i, "f4")})
        (tmp_path / str(i) / "config.json").write_text("{}")
    average([tmp_path / "0", tmp_path / "1"], tmp_path / "mean")
    assert content(tmp_path / "mean") == {"w": [0.5] * 3}
    assert sorted(p.name for p in (tmp_path / "mean").iterdir()) == ["config.json", "model.safetensors"]


def test_shards_that_hold_a_tensor_twice_are_reported(tmp_path):
    a = folder(tmp_path / "a", [["x"], ["y"]], 1)
    save(a / "model-00002-of-00002.safetensors", {name: np.zeros(3, "f4") for name in "xy"})
    with pytest.raises(AverageError, match=r"x: expected it in model-00001.*, got it in model-00001.*, model-00002"):
        HuggingFace.open(a)


@pytest.mark.parametrize("others", [0, 200])
def test_shards_count_as_open_files(others, tmp_path):
    """The soft limit on open files is raised for shards and for files that the process has open already."""
    for i in range(2):
        folder(tmp_path / str(i), [[f"w{k}"] for k in range(60)], i)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        for _ in range(others):
            stack.enter_context(open(os.devnull))
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 80, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        average([tmp_path / "0", tmp_path / "1"], tmp_path / "mean")
    assert content(tmp_path / "mean")["w59"] == [0.5] * 3


@pytest.mark.parametrize("index", ["pytorch_model", "pytorch_model.fp16"])
def test_shards_of_pytorch_are_averaged(index, tmp_path):
    torch = pytest.importorskip("torch")
    for i in range(2):
        path = tmp_path / str(i)
        path.mkdir()
        places = {}
        for k, name in enumerate("xy"):
            torch.save({name: torch.full((2,), float(i))}, path / f"pytorch_model-{k}.bin")
            places[name] = f"pytorch_model-{k}.bin"
        (path / f"{index}.bin.index.json").write_text(json.dumps({"weight_map": places}))
    average([tmp_path / str(i) / f"{index}.bin.index.json" for i in range(2)], tmp_path / "mean")
    assert torch.load(tmp_path / "mean" / "pytorch_model-1.bin")["y"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda index: index["weight_map"].update(w="model-00001-of-00001.safetensors"),
            r"w: expected it in model-.*, got it in none",
        ),
        (lambda index: index["weight_map"].pop("x"), "x: expected it in no file, got it in model-"),
        (lambda index: index["weight_map"].update(x="../a/x.safetensors"), "not names of files"),
        (lambda index: index["weight_map"].update(x="gone.safetensors"), r"gone\.safetensors: No such file"),
        (lambda index: index["weight_map"].update(x=3), "not names of files"),
        (lambda index: index.update(weight_map=[["x", "y"]]), "expected an index with a weight_map"),
        (lambda index: index.pop("weight_map"), "expected an index with a weight_map"),
    ],
)
def test_damaged_indices_are_reported(change, message, tmp_path, untouched):
    a = folder(tmp_path / "a", [["x", "y"]], 1)
    path = a / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with untouched(tmp_path), pytest.raises(AverageError, match=message):
        HuggingFace.open(a)
    path.write_text("[" * 100_000)
    with pytest.raises(AverageError, match=r"index\.json: expected an index with a weight_map"):
        HuggingFace.open(path)
