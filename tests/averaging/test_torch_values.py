"""Objects that training scripts save beside tensors: copied from the first network, and read without executing code."""

# Tests: hvdx/averaging/torch_values.py, hvdx/averaging/torch_pickle.py

import argparse
import collections
import datetime
import pathlib
import random
import types

import numpy as np
import pytest

from hvdx.averaging import average
from hvdx.averaging.pytorch import PyTorch
from hvdx.errors import AverageError
from tests.averaging.torch_files import Calls, Name, archive, pickled, tensor


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def other_values(seed):
    """Return values of all kinds, equal for equal seeds."""
    generator = np.random.RandomState(seed)
    return {
        "counts": collections.Counter(a=seed, b=2),
        "lists": collections.defaultdict(list, {"x": [seed]}),
        "lambda": collections.defaultdict(int, y=seed),
        "arguments": argparse.Namespace(lr=seed, inner=argparse.Namespace(name="n")),
        "simple": types.SimpleNamespace(lr=seed),
        "path": pathlib.PosixPath("/data") / str(seed),
        "pure": pathlib.PurePosixPath("data"),
        "complex": complex(seed, 1),
        "when": datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
        "loss": np.float64(seed),
        "legacy": generator.get_state(),
        "random": random.Random(seed).getstate(),
        "generators": [np.random.default_rng(seed), np.random.Generator(np.random.MT19937(seed)), generator],
        "state": np.random.default_rng(seed).bit_generator.state,
        "order": np.arange(seed),
        "sets": [{seed}, frozenset([1])],
    }


def described(value):
    """Return a text that is the same for the same content."""
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return repr([described(v) for v in value]) if isinstance(value, list) else repr(value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_beside_tensors_are_the_first_networks(protocol, torch, tmp_path):
    for i in range(2):
        nest = other_values(3 + i) | {"w": torch.full((2,), float(i))}
        torch.save(nest, tmp_path / f"{i}.pt", pickle_protocol=protocol)
    average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "mean.pt")
    result = torch.load(tmp_path / "mean.pt", weights_only=False)
    assert result.pop("w").tolist() == [0.5, 0.5]
    for name, value in result.items():
        assert type(value) is type(other_values(3)[name]), name
        assert described(value) == described(other_values(3)[name]), name


def test_tensors_in_namespaces_and_default_dictionaries_are_averaged(torch, tmp_path):
    for i in range(2):
        w = torch.full((2,), float(i))
        nest = {"n": argparse.Namespace(w=w), "d": collections.defaultdict(dict, {7: {"w": w.clone()}})}
        torch.save(nest, tmp_path / f"{i}.pt")
    average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "mean.pt")
    result = torch.load(tmp_path / "mean.pt", weights_only=False)
    assert result["n"].w.tolist() == result["d"][7]["w"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("array", [np.ones(2), np.ones(2, "f2"), np.ones(2, "c8"), np.array([None])])
def test_arrays_that_would_not_be_averaged_are_refused(array, torch, tmp_path):
    torch.save({"w": torch.ones(2), "array": array}, tmp_path / "a.pt")
    with pytest.raises(AverageError, match=r"got a NumPy array of \w+, .* torch\.from_numpy"):
        PyTorch.open(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "value",
    [
        Calls(Name("builtins", "list"), tensor()),
        Calls(Name("builtins", "dict"), tensor()),
        Calls(Name("builtins", "set"), tensor()),
        Calls(Name("builtins", "frozenset"), [tensor()]),
        Calls(Name("collections", "Counter"), tensor()),
        Calls(Name("collections", "defaultdict"), tensor()),
        Calls(Name("types", "SimpleNamespace"), tensor()),
        Calls(Name("pathlib", "PosixPath"), tensor()),
    ],
)
def test_calls_cannot_hide_a_tensor(value, tmp_path):
    path = archive(tmp_path / "a.pt", pickled({"w": value}), {"0": bytes(24)})
    with pytest.raises(AverageError, match=r"data\.pkl: expected"):
        PyTorch.open(path)
