"""Map-style datasets in `shard`: samples that Python reads one by one."""

import sys

import numpy as np
import pytest

import hvdx
from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.fit.agreement.sample import sample
from hvdx.keras.fit.arrays import tensors_of


class Squares:
    """Samples that are read one by one; `read` has their positions."""

    def __init__(self, count=24, make=lambda i: {"x": [float(i), i * i], "name": f"n{i}"}):
        self.count, self.make, self.read = count, make, []

    def __len__(self):
        return self.count

    def __getitem__(self, position):
        self.read.append(position)
        return self.make(position)


@pytest.mark.parametrize("framework", ["tensorflow", "jax"])
def test_samples_are_read_once_and_in_the_order_of_arrays(framework, monkeypatch):
    monkeypatch.setattr(backend, "name", lambda: framework)
    source = Squares()
    changes = [((0, 1), [5, 3])]
    shares = [hvdx.shard(source, global_batch_size=8, balance=changes, rank=r, size=2) for r in (0, 1)]
    whole = [np.asarray(b) for b in hvdx.shard(np.arange(24), 8, rank=0, size=1)]
    source.read.clear()
    steps = list(zip(*shares, strict=True))
    assert sorted(source.read) == list(range(24))
    for step, positions in zip(steps, whole, strict=True):
        x, names = (np.concatenate([np.asarray(batch[key]) for batch in step]) for key in ("x", "name"))
        assert x.tolist() == [[float(i), i * i] for i in positions]
        assert x.dtype == np.float32
        assert [name if isinstance(name, str) else name.decode() for name in names] == [f"n{i}" for i in positions]


def test_samples_are_split_and_may_stand_beside_arrays():
    training, validation = hvdx.shard((Squares(), np.arange(24)), 4, validation_split=0.25, rank=0, size=1)
    for share, count in ((training, 16), (validation, 6)):
        pairs = [(batch["x"].numpy()[:, 0], labels.numpy()) for batch, labels in share]
        assert sum(len(labels) for _, labels in pairs) == count
        assert all(np.array_equal(x, labels) for x, labels in pairs)


def test_samples_that_differ_each_time_are_not_compared_over_the_ranks():
    random = np.random.default_rng(1)
    found = sample(tensors_of(Squares(64, lambda i: (random.normal(size=3), 3 * i * i))))
    assert [len(rows) for rows in found.rows] == [0, 64]


class Endless(Squares):
    def __len__(self):
        return sys.maxsize


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Endless(), r"expected samples with an end, got Endless that repeats them\. Do: leave .repeat\(\) out"),
        (Squares(0), "got Squares with none"),
        (Squares(make=lambda i: None), "expected samples of numbers or strings, got NoneType in the first"),
        (Squares(make=lambda i: np.zeros(i + 1)), r"expected samples of one shape, got \(1,\) and \(2,\)"),
    ],
)
def test_samples_that_make_no_batches_are_named(source, message, monkeypatch):
    monkeypatch.setattr(backend, "name", lambda: "jax")
    with pytest.raises(ConfigError, match=message):
        list(hvdx.shard(source, 2, shuffle=False, rank=0, size=1))
