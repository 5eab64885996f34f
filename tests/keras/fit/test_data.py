"""Shares of data for any rank and size, tested in one process."""

# Tests: hvdx/keras/fit/arrays.py

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx.errors import ConfigError
from hvdx.keras.fit import arrays
from hvdx.keras.fit import data as shares
from hvdx.keras.fit.agreement.sample import sample


def batches(dataset):
    return [b.numpy().tolist() for b in dataset]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_array_shares_are_disjoint_equal_and_those_of_one_process(size, shuffle):
    data = np.arange(50)
    shares = [hvdx.shard(data, 4, shuffle=shuffle, rank=r, size=size) for r in range(size)]
    whole = hvdx.shard(data, 4 * size, shuffle=shuffle, rank=0, size=1)
    orders = []
    for _ in range(3):
        epoch = [batches(share) for share in shares]
        assert len({len(e) for e in epoch}) == 1
        seen = [i for e in epoch for b in e for i in b]
        assert len(set(seen)) == len(seen) == 50 // (4 * size) * 4 * size
        assert [[i for b in step for i in b] for step in zip(*epoch, strict=True)] == batches(whole)
        orders.append(seen)
    assert (orders[0] != orders[1]) == (orders[1] != orders[2]) == shuffle
    assert int(shares[0].cardinality()) == len(epoch[0])


def test_array_order_depends_on_seed_and_number_of_the_epoch():
    data = np.arange(32)
    first = hvdx.shard(data, 4, seed=5, rank=0, size=2)
    assert [batches(first), batches(first)][1] == batches(hvdx.shard(data, 4, seed=5, rank=0, size=2, initial_epoch=1))
    assert batches(hvdx.shard(data, 4, seed=6, rank=0, size=2)) != batches(hvdx.shard(data, 4, seed=5, rank=0, size=2))


def test_global_random_seed_does_not_matter():
    orders = []
    for seed in (1, 2):
        tf.random.set_seed(seed)
        orders.append(batches(hvdx.shard(np.arange(32), 4, rank=0, size=2)))
    assert orders[0] == orders[1]


def test_autotuning_is_off_for_a_share_of_arrays():
    """Otherwise the end of a fit may wait up to a minute for the tuning thread."""
    assert hvdx.shard((np.zeros((8, 2)), np.zeros(8)), 2, rank=0, size=2).options().autotune.enabled is False


def test_arrays_in_any_structure_stay_together():
    data = {"x": np.arange(12.0).reshape(12, 1), "y": np.arange(12)}
    for batch in hvdx.shard(data, 3, rank=1, size=2):
        np.testing.assert_array_equal(batch["x"].numpy().ravel(), batch["y"].numpy())


def test_remainder_can_be_kept_for_validation():
    for count in (3, 5, 8, 9, 13, 40):
        shares = [
            hvdx.shard(np.arange(count), 2, shuffle=False, drop_remainder=False, rank=r, size=3) for r in range(3)
        ]
        assert sorted(i for s in shares for b in s for i in b.numpy()) == list(range(count))
        assert [int(s.cardinality()) for s in shares] == [len(batches(s)) for s in shares]
        counts = [sum(map(len, batches(s))) for s in shares]
        assert max(counts) - min(counts) <= 1


def test_steps_count_without_a_remainder_too():
    share = hvdx.shard(np.arange(20), 4, rank=0, size=2, steps=2, drop_remainder=False)
    assert len(list(share)) == 2


@pytest.mark.parametrize("batch", [None, 2])
def test_dataset_shares_are_disjoint_and_equal(batch):
    def source():
        return tf.data.Dataset.range(23)

    shares = [hvdx.shard(source(), batch, rank=r, size=3) for r in range(3)]
    orders = []
    for _ in range(2):
        epoch = [[int(i) for b in share for i in np.ravel(b)] for share in shares]
        assert len({len(e) for e in epoch}) == 1
        seen = [i for share in epoch for i in share]
        assert len(set(seen)) == len(seen) == 23 // (3 * (batch or 1)) * 3 * (batch or 1)
        orders.append(seen)
    assert orders[0] != orders[1]


def test_dataset_of_unknown_size_needs_steps():
    unknown = tf.data.Dataset.range(20).filter(lambda i: i < 18)
    with pytest.raises(ConfigError, match="steps="):
        hvdx.shard(unknown, 2, rank=0, size=2)
    share = hvdx.shard(unknown, 2, steps=3, rank=0, size=2)
    assert int(share.cardinality()) == len(batches(share)) == 3


def test_position_in_a_share_is_known_while_an_older_share_is_collected():
    old = hvdx.shard(np.arange(8), 2, rank=0, size=2)
    share = hvdx.shard(np.arange(8), 2, rank=0, size=2)
    held, (drawn, _) = shares.hold_shares(), shares.state()
    del old
    gc.collect()
    next(iter(share))
    assert shares.started_share(drawn) == len(drawn) - 1
    assert shares.position_after(drawn, 3, len(drawn) - 1) == ([*drawn[:-1], 0], 1)
    held.clear()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: hvdx.shard(np.arange(8)), "batch_size"),
        (lambda: hvdx.shard(np.arange(8), 0), "batch_size"),
        (lambda: hvdx.shard((np.arange(8), np.arange(9)), 2), "one length"),
        (lambda: hvdx.shard(np.arange(8), 3, rank=0, size=4), "12 samples or more"),
        (lambda: hvdx.shard(np.arange(8), 2.5), "an integer of 1 or more, got 2.5"),
        (lambda: hvdx.shard(np.arange(8), 2, global_batch_size=4), "got both"),
        (
            lambda: hvdx.shard(np.arange(8), global_batch_size=4, balance="off", rank=0, size=3),
            'multiple of the 3 ranks.*3 or 6, or leave out balance="off"',
        ),
        (lambda: hvdx.shard(np.arange(8), global_batch_size=2, rank=0, size=3), "3 ranks, got 2. Do: give 3 or"),
        (lambda: hvdx.shard(np.arange(8), 2, max_batch=1), "max_batch: expected global_batch_size="),
        (lambda: hvdx.shard(np.arange(8), 2, max_batch=0), "max_batch: expected an integer of 1 or more"),
        (lambda: hvdx.shard(tf.data.Dataset.range(8), 2, validation_split=0.5), "dataset.skip"),
        (lambda: hvdx.shard(np.arange(8), 2, validation_split=1.5), "between 0 and 1"),
        (lambda: hvdx.shard(np.arange(2), 1, validation_split=0.9), "leaves 0 for training and 2 for"),
        (lambda: hvdx.shard([[1.0, 2.0], [3.0]], 1), "ragged.constant"),
        (lambda: hvdx.shard((np.ones(3), (i for i in range(3))), 1), "builtins.generator"),
        (lambda: hvdx.shard((np.ones(3), tf.sparse.eye(3)), 1), "dense or ragged"),
        (lambda: hvdx.shard((np.ones(3), np.array([None, 1, 2], object)), 1), "Python objects"),
        (lambda: hvdx.shard((np.ones(3), 1.0), 1), "single value"),
        (lambda: hvdx.shard((None, None), 1), "expected arrays"),
        (lambda: hvdx.shard(np.arange(8), 2, rank=2, size=2), "rank"),
        (lambda: hvdx.shard(np.arange(2), 2, drop_remainder=False, rank=0, size=3), "at least one"),
        (lambda: hvdx.shard(np.arange(8), 2, steps=9, rank=0, size=1), "steps: expected 1 to 4.*got 9"),
        (lambda: hvdx.shard(tf.data.Dataset.range(3), 2, rank=0, size=2), "do not fill"),
        (lambda: hvdx.shard(tf.data.Dataset.from_tensor_slices(["a", "b"]), rank=0, size=3), "3 ranks.*more files"),
        (lambda: hvdx.shard(tf.data.Dataset.range(3), 1, steps=2, rank=0, size=2), "steps=2"),
    ],
)
def test_shard_refuses_bad_arguments(call, named):
    with pytest.raises(ConfigError, match=named):
        call()


def one(data, **options):
    return next(iter(hvdx.shard(data, 2, shuffle=False, rank=0, size=1, **options)))


def test_arrays_are_cast_and_lists_are_inputs_as_in_fit():
    a, b = np.ones((4, 2)), np.zeros((4, 2), "float16")
    (first, second), y, absent, weights = one(([a, b], tf.range(4), None, np.ones(4)))
    assert [t.dtype for t in (first, second, y, weights)] == [tf.float32, tf.float32, tf.int32, tf.float32]
    assert first.shape == second.shape == (2, 2)
    assert absent is None
    assert len(one([a, b])) == 2


def test_lists_and_ragged_tensors_are_arrays():
    x, y, words, ragged = one(
        ([[1.0, 2.0], [3.0, 4.0]], [np.int64(0), np.int64(1)], ["a", "b"], tf.ragged.constant([[1], [2, 3]]))
    )
    assert (x.numpy().tolist(), y.numpy().tolist()) == ([[1.0, 2.0], [3.0, 4.0]], [0, 1])
    assert (words.numpy().tolist(), ragged.to_list()) == ([b"a", b"b"], [[1], [2, 3]])


def test_pandas_is_taken_as_in_fit():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0], "c": ["u", "v"]})
    x, column = one((frame[["a", "b"]], {"c": frame["c"]}))
    assert (x.dtype, x.numpy().tolist()) == (tf.float32, [[1.0, 3.0], [2.0, 4.0]])
    assert column["c"].numpy().tolist() == [[b"u"], [b"v"]]


def test_validation_split_is_that_of_fit():
    """The model's loss is the mean of the samples, so it tells which samples are for validation."""
    x = np.arange(10.0)[:, None] ** 2
    model = keras.Sequential([keras.Input((1,)), keras.layers.Lambda(lambda t: t)])
    model.compile("sgd", loss=lambda y, prediction: prediction)
    expected = model.fit(x, x, validation_split=0.31, verbose=0).history
    parts = [hvdx.shard((x, x), 2, validation_split=0.31, rank=rank, size=2) for rank in range(2)]
    held_out = [float(v) for _, share in parts for batch, _ in share for v in np.ravel(batch)]
    assert np.mean(held_out) == pytest.approx(expected["val_loss"][0])
    trained = [float(v) for share, _ in parts for batch, _ in share for v in np.ravel(batch)]
    assert not set(trained) & set(held_out)
    assert len(trained) == 4


def test_global_batch_size_is_divided_among_the_ranks():
    assert [len(b) for b in batches(hvdx.shard(np.arange(12), global_batch_size=6, rank=0, size=3))] == [2, 2]
    share = hvdx.shard(tf.data.Dataset.range(12), global_batch_size=6, rank=0, size=2)
    assert [len(b) for b in batches(share)] == [3, 3]


def test_fit_takes_shares_of_every_form():
    inputs = [keras.Input((2,)), keras.Input((2,))]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.add(inputs)))
    model.compile("sgd", "mse")
    a = np.ones((4, 2))
    for data in (([a, a], [1.0, 2.0, 3.0, 4.0]), ((a, a), a[:, 0], a[:, 1])):
        model.fit(hvdx.shard(data, 2, rank=0, size=2), verbose=0)
    model.predict(hvdx.shard(([a, a], None, a[:, 0]), 2, rank=0, size=2), verbose=0)


def test_large_arrays_stay_where_they_are(monkeypatch, tmp_path):
    """A memmap too; batches, samples of the data and validation are those of small arrays, which become tensors."""
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, (40, 3))
    x[:], y = np.random.default_rng(0).random((40, 3)), np.arange(40, dtype=np.int16)
    small = hvdx.shard({"x": x, "y": y}, 4, validation_split=0.3, rank=1, size=2)
    expected = arrays.tensors_of((x, y))
    monkeypatch.setattr(arrays, "_LARGE", 0)
    copies, read = [], arrays.Rows.read
    monkeypatch.setattr(arrays.Rows, "read", lambda rows, at: copies.append(len(at)) or read(rows, at))
    large = hvdx.shard({"x": x, "y": y}, 4, validation_split=0.3, rank=1, size=2)
    for ours, theirs in zip(large, small, strict=True):
        assert ours.element_spec == theirs.element_spec
        for mine, other in zip(ours, theirs, strict=True):
            assert {k: v.numpy().tobytes() for k, v in mine.items()} == {
                k: v.numpy().tobytes() for k, v in other.items()
            }
    assert max(copies) <= 4
    found = arrays.tensors_of((x, y))
    assert np.shares_memory(found[0]._array, x)
    assert sample(found).digest() == sample(expected).digest()
    held = [weakref.ref(rows) for rows in found]
    del found
    gc.collect()
    assert not any(reference() for reference in held)


def test_batches_of_an_array_that_is_not_contiguous_are_read_without_a_copy_of_it():
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(1 << 21), 1 << 19)  # 6 TB if they were copied
    (batch,) = hvdx.shard(windows[:, ::2], 3, steps=1, shuffle=False, rank=0, size=1)
    assert batch.shape == (3, 1 << 18)
    assert batch[2, :2].numpy().tolist() == [2, 4]


def test_large_array_is_freed_with_its_dataset(monkeypatch):
    monkeypatch.setattr(arrays, "_LARGE", 0)
    array = np.arange(8.0)
    iterator = iter(hvdx.shard(array, 2, shuffle=False, rank=0, size=1))
    gc.collect()
    assert next(iterator).numpy().tolist() == [0, 1]
    held = weakref.ref(array)
    del array, iterator
    gc.collect()
    assert held() is None
