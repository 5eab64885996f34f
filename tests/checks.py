"""The battery that every communicator passes, at any number of ranks."""

import numpy as np
import tensorflow as tf

from hvdx.comm import Comm, GraphComm
from hvdx.comm.base import Reduction


def check_place(comm: Comm) -> None:
    """Ranks are 0..size-1, each once."""
    assert comm.all_gather_object(comm.rank, "ranks") == list(range(comm.size))
    assert 0 <= comm.local_rank < comm.local_size <= comm.size


def check_objects(comm: Comm) -> None:
    """Objects of different sizes, empty ones too, come in rank order."""
    mine = {"rank": comm.rank, "ballast": "x" * (1000 * comm.rank)}
    everyone = comm.all_gather_object(mine, "objects")
    assert [o["rank"] for o in everyone] == list(range(comm.size))
    assert [len(o["ballast"]) for o in everyone] == [1000 * r for r in range(comm.size)]
    assert comm.all_gather_object(None, "nothing") == [None] * comm.size


def check_sums(comm: Comm) -> None:
    """float64 sums are exact for whole numbers, and an empty vector is no special case."""
    vector = np.arange(5.0) + 2.0**40 * (comm.rank + 1)
    expected = comm.size * np.arange(5.0) + 2.0**40 * sum(range(1, comm.size + 1))
    np.testing.assert_array_equal(comm.all_reduce_sum(vector, "sum"), expected)


def check_broadcast(comm: Comm) -> None:
    """Every dtype a model holds arrives bit for bit, from the last rank too."""
    for dtype in (tf.float32, tf.float16, tf.int64, tf.int32, tf.bool, tf.uint8):
        value = tf.cast(tf.fill([2, 3], comm.rank % 2), dtype)
        (got,) = comm.broadcast([value], comm.size - 1, f"broadcast {dtype.name}")
        np.testing.assert_array_equal(np.asarray(got), np.full([2, 3], (comm.size - 1) % 2, dtype.as_numpy_dtype))
    assert comm.broadcast([], 0, "nothing") == []


def check_gather(comm: GraphComm) -> None:
    """Ragged first dimensions, none at all included."""
    mine = tf.fill([comm.rank, 2], float(comm.rank))
    expected = np.concatenate([np.full([r, 2], r) for r in range(comm.size)])
    np.testing.assert_array_equal(comm.all_gather(mine, "gather").numpy(), expected)


def check_reductions(comm: GraphComm) -> None:
    """Every way to reduce agrees with NumPy, eagerly and in a graph, with the same bits on all ranks."""
    everyone = [_tensors(rank) for rank in range(comm.size)]
    sums = [sum(ts[i].astype(np.float64) for ts in everyone) for i in range(3)]
    cases = {
        "plain": (Reduction(), 1e-6),
        "sum": (Reduction(average=False), 1e-6),
        "fp16": (Reduction(wire="fp16"), 2e-3),
        "bf16": (Reduction(wire="bf16"), 2e-2),
        "bf16 sum": (Reduction(wire="bf16", average=False), 2e-2),
        "two groups": (Reduction(groups=2), 1e-6),
        "more groups than tensors": (Reduction(groups=9), 1e-6),
        "named groups": (Reduction(groups=((2, 0),)), 1e-6),
        "predivided": (Reduction(predivide=2.0), 1e-6),
    }
    for name, (how, tolerance) in cases.items():
        factor = 1 / comm.size if how.average else 1.0
        mine = [tf.constant(t) for t in _tensors(comm.rank)]
        eager = comm.all_reduce(mine, how, f"eager {name}")
        graph = tf.function(lambda ts, how=how, name=name: comm.all_reduce(ts, how, f"graph {name}"))(mine)
        for got in (eager, graph):
            for tensor, total in zip(got, sums, strict=True):
                np.testing.assert_allclose(tensor.numpy(), total * factor, rtol=tolerance, atol=tolerance)
            bits = [t.numpy().tobytes() for t in got]
            assert all(other == bits for other in comm.all_gather_object(bits, f"bits of {name}")), name


def check_slices(comm: GraphComm) -> None:
    """Rows of embeddings, gathered or dense, with repeated rows and none at all."""
    rows = [] if comm.rank == comm.size - 1 and comm.size > 1 else [0, comm.rank % 4, 3, 3]
    mine = tf.IndexedSlices(tf.ones([len(rows), 2]) * (comm.rank + 1), tf.constant(rows, tf.int64), tf.constant([4, 2]))
    dense = np.zeros([4, 2])
    np.add.at(dense, rows, comm.rank + 1.0)
    expected = comm.all_reduce_sum(dense.ravel(), "expected").reshape(4, 2) / comm.size
    for sparse in ("gather", "dense"):
        for wire in ("none", "fp16", "bf16"):
            (got,) = comm.all_reduce([mine], Reduction(sparse=sparse, wire=wire), f"slices {sparse} {wire}")
            np.testing.assert_allclose(
                tf.convert_to_tensor(got).numpy(), expected, rtol=1e-6 if wire == "none" else 1e-2
            )


def _tensors(rank: int) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    return [random.normal(size=shape).astype(np.float32) for shape in ((7, 3), (), (11,))]


COMM_CHECKS = {check.__name__: check for check in (check_place, check_objects, check_sums, check_broadcast)}

GRAPH_CHECKS = {check.__name__: check for check in (check_gather, check_reductions, check_slices)}
