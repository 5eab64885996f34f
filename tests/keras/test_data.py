"""Shares of data for any rank and size, tested in one process."""

import gc

import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx.errors import ConfigError
from hvdx.keras.fit import data as shares


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
        (lambda: hvdx.shard(np.arange(8), 3, rank=0, size=4), "0 steps"),
        (lambda: hvdx.shard(np.arange(8), 2, rank=2, size=2), "rank"),
        (lambda: hvdx.shard(np.arange(2), 2, drop_remainder=False, rank=0, size=3), "at least one"),
        (lambda: hvdx.shard(np.arange(8), 2, steps=9, rank=0, size=1), "got 9"),
        (lambda: hvdx.shard(tf.data.Dataset.range(3), 2, rank=0, size=2), "do not fill"),
        (lambda: hvdx.shard(tf.data.Dataset.range(3), 1, steps=2, rank=0, size=2), "steps=2"),
    ],
)
def test_shard_refuses_bad_arguments(call, named):
    with pytest.raises(ConfigError, match=named):
        call()
