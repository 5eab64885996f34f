"""Look-ups in a split table and a split softmax, with their gradients, on virtual ranks."""

# Tests: hvdx/comm/split_tensors.py

import numpy as np
import pytest
import tensorflow as tf

from hvdx.comm.split_tensors import SplitTensors
from hvdx.errors import ConfigError
from hvdx.keras.layers import split_collectives
from tests.strategies.virtual import on_all

# Ids of each rank, in a table of 7 rows, and labels of as many classes.
IDS = ([6, 0, 6, 3, 0], [], [3, 6, 5])
BOUNDS = (0, 3, 5, 7)
TABLE = np.random.default_rng(0).normal(size=(7, 2))
LOGITS = np.random.default_rng(1).normal(size=(8, 7))


def test_look_up_returns_the_rows_of_the_ids_and_the_gradient_of_each():
    def run(comm):
        ranks, ids = SplitTensors(comm.channel("a group")), IDS[comm.rank]
        part = tf.Variable(TABLE[BOUNDS[comm.rank] : BOUNDS[comm.rank + 1]])
        weights = np.arange(1.0, len(ids) + 1)[:, None] * 10**comm.rank
        with tf.GradientTape() as tape:
            lookup = ranks.send_ids(tf.constant(ids, tf.int64), BOUNDS, "table")
            before = ranks.sent
            found = split_collectives.rows_of_ids(ranks, tf.gather(part, lookup.rows), lookup)
            forward = ranks.sent - before
            total = tf.reduce_sum(found * weights)
        return found.numpy(), tape.gradient(total, part), forward

    results = on_all(3, run)
    expected = np.zeros_like(TABLE)
    for rank, (found, _, _) in enumerate(results):
        np.testing.assert_array_equal(found, TABLE[np.array(IDS[rank], int)])
        for i, row in enumerate(IDS[rank]):
            expected[row] += (i + 1) * 10**rank
    gradients = [gradient for _, gradient, _ in results]
    np.testing.assert_array_equal(np.concatenate([tf.convert_to_tensor(g).numpy() for g in gradients]), expected)
    # One gradient for each occurrence: rows 0, 0; 3, 3; 6, 6, 6, 5.
    assert [len(g.indices) for g in gradients] == [2, 2, 4]
    # Rank 1 sends row 3 to both others, rank 2 row 6 to rank 0: once each, 16 bytes.
    assert [sent for _, _, sent in results] == [0, 32, 16]


def test_split_softmax_is_that_of_whole_logits():
    labels = np.concatenate([np.array(ids, int) for ids in IDS])
    weights = np.arange(1.0, 9)

    def run(comm):
        ranks = SplitTensors(comm.channel("a group"))
        begin = sum(len(ids) for ids in IDS[: comm.rank])
        mine = slice(begin, begin + len(IDS[comm.rank]))
        columns = tf.constant(LOGITS[:, BOUNDS[comm.rank] : BOUNDS[comm.rank + 1]])
        with tf.GradientTape() as tape:
            tape.watch(columns)
            everyone, counts, first = ranks.gather_labels(tf.constant(labels[mine]), columns, None)
            losses = split_collectives.softmax_losses(ranks, columns, everyone, counts, first)
            total = tf.reduce_sum(losses * weights[mine])
        return losses, tape.gradient(total, columns)

    results = on_all(3, run)
    whole = tf.constant(LOGITS)
    with tf.GradientTape() as tape:
        tape.watch(whole)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, whole)
        total = tf.reduce_sum(losses * weights)
    np.testing.assert_allclose(np.concatenate([mine for mine, _ in results]), losses, rtol=1e-12)
    gradient = np.concatenate([g for _, g in results], axis=1)
    np.testing.assert_allclose(gradient, tape.gradient(total, whole), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("ids", "rows", "said"),
    [
        ([7], 3, "table: expected ids from 0 to 6, got 7 on rank 1"),
        ([1], 2, r"logits of the 3 rows of the group, got \[2, 2, 2\]"),
        ([-1], 3, "labels from 0 to 6, got -1"),
    ],
)
def test_ids_labels_and_logits_that_do_not_fit_are_refused_on_all_ranks(ids, rows, said):
    def run(comm):
        ranks = SplitTensors(comm.channel("a group"))
        mine = tf.constant(ids if comm.rank == 1 else [0], tf.int64)
        columns = tf.zeros([rows, BOUNDS[comm.rank + 1] - BOUNDS[comm.rank]])
        calls = [lambda: ranks.gather_labels(mine, columns, None), lambda: ranks.send_ids(mine, BOUNDS, "table")]
        with pytest.raises(ConfigError, match=said):
            calls["ids" in said]()

    on_all(3, run)
