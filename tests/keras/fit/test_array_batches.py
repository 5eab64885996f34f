"""Batches of NumPy arrays are those of TensorFlow's pipelines."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx.errors import ConfigError
from hvdx.keras import backend
from hvdx.keras.fit.array_batches import shuffled


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setattr(backend, "name", lambda: "jax")
    return monkeypatch


@pytest.mark.parametrize("count", [1, 2, 5, 256, 257, 65536, 65538, 300_001, 2**21 + 5])
@pytest.mark.parametrize("key", [(0, 0), (7, 3), (2**31, 300), (-3, 2**33 + 9)])
def test_order_is_that_of_tensorflow(count, key):
    positions = np.unique(np.linspace(0, count - 1, 100).astype(np.int64))
    expected = tf.random.experimental.index_shuffle(positions, tf.constant(key, tf.int64), count - 1)
    assert shuffled(positions, key, count).tolist() == expected.numpy().tolist()


def test_every_sample_is_drawn_once_where_tensorflow_loses_one():
    count = 4**8 + 1
    share = hvdx.shard(np.arange(count), 4096, rank=0, size=1, drop_remainder=False)
    assert np.sort(np.concatenate(list(share.as_numpy_iterator()))).tolist() == list(range(count))


@pytest.mark.parametrize("options", [{}, {"drop_remainder": False}, {"shuffle": False, "seed": 3, "initial_epoch": 2}])
def test_batches_of_all_epochs_are_those_of_tensorflow(options, monkeypatch):
    data = {"x": np.arange(58.0).reshape(29, 2), "absent": None}, list(range(29))

    def passes():
        shares = [hvdx.shard(data, 3, rank=rank, size=4, **options) for rank in (0, 3)]
        return [[keras.tree.map_structure(np.asarray, [*share]) for share in shares] for _ in range(2)]

    expected = passes()
    monkeypatch.setattr(backend, "name", lambda: "jax")
    found = passes()
    leaves = [keras.tree.flatten(each) for each in (expected, found)]
    for a, b in zip(*leaves, strict=True):
        assert (a.dtype, a.tolist()) == (b.dtype, b.tolist())


@pytest.mark.usefixtures("elsewhere")
def test_batches_tell_their_number_and_rows():
    share = hvdx.shard((np.zeros((29, 2)), np.zeros(29)), 3, rank=1, size=4, drop_remainder=False)
    assert (len(share), share.num_batches, share.batch_size, share.partial_batch_size) == (3, 3, 3, 1)
    assert share.shapes == [(29, 2), (29,)]


@pytest.mark.usefixtures("elsewhere")
def test_small_arrays_are_copied_and_single_values_refused():
    array = np.zeros((4, 1))
    share = hvdx.shard(array, 2, rank=0, size=2)
    array += 1
    assert [batch.tolist() for batch in share] == [[[0.0], [0.0]]]
    with pytest.raises(ConfigError, match="got the single value"):
        hvdx.shard(np.float32(1), 2, rank=0, size=1)


def test_class_weights_of_a_fit_weigh_the_rows(elsewhere):
    class Model(keras.Model):
        def fit(self, share, class_weight):
            epoch_iterator = share
            return list(epoch_iterator.get_jax_iterator())

    x, y = np.zeros((4, 1), "float32"), np.array([0, 1, 1, 2])
    share = hvdx.shard((x, y), 4, shuffle=False, rank=0, size=1)
    ((_, labels, weights),) = Model().fit(share, {1: 3.0})
    assert (labels.tolist(), weights.tolist()) == ([0, 1, 1, 2], [1.0, 3.0, 3.0, 1.0])
    with pytest.raises(ConfigError, match="class_weight: expected batches of inputs and labels, without weights"):
        Model().fit(hvdx.shard((x, y, y), 4, rank=0, size=1), {1: 3.0})
