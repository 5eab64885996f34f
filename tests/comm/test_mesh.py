"""Groups of ranks that split layers, and the collectives of a group, on virtual ranks."""

# Tests: hvdx/comm/split_tensors.py

import numpy as np
import pytest
import tensorflow as tf

from hvdx.comm import mesh
from hvdx.comm.split_tensors import SplitTensors
from hvdx.errors import ConfigError
from tests.strategies.virtual import on_all, on_hosts


@pytest.mark.parametrize(
    ("hosts", "split", "groups"),
    [
        ("aaaa", 2, ((0, 1), (2, 3))),
        ("abab", 2, ((0, 2), (1, 3))),
        ("abab", "node", ((0, 2), (1, 3))),
        ("aabb", 4, ((0, 1, 2, 3),)),
        ("ab", 1, ((0,), (1,))),
    ],
)
def test_groups_hold_ranks_of_one_host(hosts, split, groups):
    assert mesh.arrange(list(hosts), split) == groups


@pytest.mark.parametrize(
    ("hosts", "split", "said"), [("aaa", 2, r"divisor of 3.*\[1, 3\]"), ("aab", "node", "'a': 2, 'b': 1")]
)
def test_groups_of_different_sizes_are_refused_on_all_ranks(hosts, split, said):
    with pytest.raises(ConfigError, match=said) as caught:
        mesh.arrange(list(hosts), split)
    assert caught.value.collective


@pytest.mark.parametrize("split", [0, -1, "two", 2.5, True, "1.5"])
def test_split_that_is_no_number_is_refused(split):
    with pytest.raises(ConfigError, match="positive number or 'node'"):
        mesh.parse(split)


def test_peers_hold_the_same_part():
    def run(comm):
        made = mesh.make(comm, 2)
        return made.index, made.position, made.group.all_gather_object(comm.rank, "x"), made.peers.all_gather_object(
            comm.rank, "x"
        )  # fmt: skip

    assert on_all(4, run) == [
        (0, 0, [0, 1], [0, 2]),
        (0, 1, [0, 1], [1, 3]),
        (1, 0, [2, 3], [0, 2]),
        (1, 1, [2, 3], [1, 3]),
    ]
    assert on_all(2, lambda comm: mesh.make(comm, 1)) == [None, None]


ROWS = (2, 0, 3)
BOUNDS = (0, 2, 3, 6)


def rows_of(rank, columns, dtype=np.float32):
    return (np.random.default_rng(rank).normal(size=(ROWS[rank], columns))).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64"])
def test_collectives_of_a_group(dtype):
    kind = tf.as_dtype(dtype).as_numpy_dtype

    def run(comm):
        ranks = SplitTensors(comm.channel("a group"))
        mine = (10 * rows_of(comm.rank, 6)).astype(kind)
        gathered, counts = ranks.gather_rows(tf.constant(mine))
        columns = ranks.rows_to_columns(tf.constant(mine), counts, BOUNDS)
        back = ranks.columns_to_rows(columns, counts, BOUNDS)
        total = ranks.sum_rows(gathered, counts)
        sent = ranks.send_rows(
            tf.constant(mine),
            tf.constant([len(mine) // 2, 0, len(mine) - len(mine) // 2], tf.int64),
            tf.constant([[n // 2 for n in ROWS], [0] * 3, [n - n // 2 for n in ROWS]][comm.rank], tf.int64),
        )
        return [t.numpy() for t in (gathered, counts, columns, back, total, sent)], mine, ranks.sum(
            tf.constant([comm.rank, 1.0])
        ).numpy()  # fmt: skip

    results = on_all(3, run)
    whole = np.concatenate([mine for _, mine, _ in results])
    for rank, ((gathered, counts, columns, back, total, sent), mine, small) in enumerate(results):
        np.testing.assert_array_equal(gathered, whole)
        assert counts.tolist() == list(ROWS)
        np.testing.assert_array_equal(columns, whole[:, BOUNDS[rank] : BOUNDS[rank + 1]])
        np.testing.assert_array_equal(back, mine)
        wide = mine.astype(np.float32) if np.dtype(kind).itemsize == 2 else mine
        np.testing.assert_array_equal(total, (wide + wide + wide).astype(kind))
        pieces = [np.split(m, [len(m) // 2, len(m) // 2])[rank] for _, m, _ in results]
        np.testing.assert_array_equal(sent, np.concatenate(pieces))
        assert small.tolist() == [3.0, 3.0]


def test_bytes_are_counted():
    def run(comm):
        ranks = SplitTensors(comm.channel("a group"))
        gathered, counts = ranks.gather_rows(tf.zeros([4, 3]))
        first = ranks.sent
        ranks.columns_to_rows(gathered, counts, (0, 3, 6))
        return first, ranks.sent - first

    # The rows of this rank go to the other; of its columns, the other's rows.
    assert on_all(2, run) == [(4 * 3 * 4, 4 * 3 * 4)] * 2


def test_virtual_ranks_have_hosts():
    def place(comm):
        return comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size

    def run(comm):
        part = comm.divide(comm.local_rank, comm.rank, "a test")
        return place(comm), place(part), "".join(part.hosts), part.parent_ranks

    found = on_hosts("abaab", run)
    assert [f[0] for f in found] == [(0, 3, 0, 2), (0, 2, 1, 2), (1, 3, 0, 2), (2, 3, 0, 1), (1, 2, 1, 2)]
    assert found[4][1:] == ((0, 1, 1, 2), "ab", [2, 4])
