"""Sums of buckets in a thread: the order of the ranks' exchanges, and errors."""

# Tests: hvdx/comm/buckets.py

import os
import random
import time

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from hvdx.comm.buckets import BucketThread, fill
from hvdx.comm.host_graph import HostGraphComm
from hvdx.comm.interfaces import Reduction
from hvdx.comm.launcher import usable_cores
from hvdx.comm.local import virtual_world
from hvdx.comm.sums import DenseSums
from hvdx.errors import ExchangeError
from tests.comm.test_interfaces import vector
from tests.comm.test_sums import total
from tests.strategies.virtual import on_hosts


@pytest.mark.parametrize("sizes", [[], [1], [1_200_000] * 3, [4_000_000, 1, 2, 3_000_000], [100_000] * 200])
def test_each_vector_is_in_one_bucket_the_last_first(sizes):
    buckets = fill(sizes)
    assert [i for bucket in buckets for i in bucket] == list(reversed(range(len(sizes))))
    assert len(buckets) <= 16
    assert all(sum(sizes[i] for i in bucket) >= 1_000_000 for bucket in buckets[:-1])


def test_sums_are_exchanged_in_one_order_whatever_the_order_of_arrival():
    summed = []
    thread = BucketThread(lambda vectors, scale: summed.append(float(vectors[0][0])) or [scale * v for v in vectors])
    for seed in range(3):
        summed.clear()
        for number in random.Random(seed).sample(range(8), 8):
            thread.give(number, [np.full(1, float(number))], 2.0)
        assert [float(v[0]) for (v,) in thread.take(8)] == [2.0 * n for n in range(8)]
        assert summed == list(range(8))
    thread.close()


def test_error_of_a_sum_reaches_this_step_and_the_next():
    def fail(vectors, scale):
        raise ExchangeError("rank 1 is gone")

    thread = BucketThread(fail)
    thread.give(0, [np.ones(1)], 1.0)
    for _ in range(2):
        with pytest.raises(ExchangeError, match="rank 1 is gone"):
            thread.take(2)


def test_step_after_an_interrupted_one_is_refused():
    thread = BucketThread(lambda vectors, scale: list(vectors))
    thread.give(0, [np.ones(1)], 1.0)
    with pytest.raises(ExchangeError, match="last step has ended in the middle"):
        thread.give(0, [np.ones(1)], 1.0)
    thread.close()


DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_ranks_that_give_buckets_in_different_orders_have_the_bits_of_one_sum(hosts, dtype):
    def run(comm):
        sums = DenseSums(comm)
        thread = BucketThread(lambda vectors, scale: [total(sums, vectors, scale)])
        mine = [vector(comm.rank, size, dtype) for size in (5, 1001, 17)]
        for number in random.Random(comm.rank).sample(range(3), 3):
            thread.give(number, [mine[number]], 0.5)
        found = np.concatenate([v for (v,) in thread.take(3)])
        thread.close()
        return found, total(sums, mine, 0.5)

    for parts, whole in on_hosts(hosts, run):
        assert parts.tobytes() == whole.tobytes()


@pytest.fixture
def given(monkeypatch):
    """Numbers of the buckets that have been given, in their order."""
    numbers, plain = [], BucketThread.give

    def give(thread, number, vectors, scale):
        numbers.append(number)
        plain(thread, number, vectors, scale)

    monkeypatch.setattr(BucketThread, "give", give)
    return numbers


@pytest.mark.parametrize("wire", ["none", "fp16", "bf16"])
def test_tensors_in_buckets_have_the_bits_of_one_collective(wire, given, monkeypatch):
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "2")
    tf.config.run_functions_eagerly(True)
    shapes = [(1000, 600), (7,), (600_000,), (50, 40)]

    def run(comm):
        values = np.random.default_rng(comm.rank)
        tensors = [tf.constant(values.normal(size=s), tf.float64 if s == (7,) else tf.float32) for s in shapes]
        sizes, graph = tuple(int(np.prod(s)) for s in shapes), HostGraphComm(comm)
        hows = [Reduction(wire=wire, predivide=2.0, sizes=each) for each in (sizes, (), sizes)]
        found = [[t.numpy() for t in graph.all_reduce(tensors, how, "test")] for how in hows]
        graph.close()
        return found

    try:
        for behind, together, again in on_hosts("abc", run):
            for one, two, three in zip(behind, together, again, strict=True):
                np.testing.assert_array_equal(one, two)
                np.testing.assert_array_equal(three, two)
    finally:
        tf.config.run_functions_eagerly(False)
    assert set(given) == {0, 1}


@pytest.mark.skipif(
    int(os.environ.get("TF_NUM_INTEROP_THREADS") or usable_cores()) < 2, reason="TensorFlow runs one operation at once"
)
def test_graph_gives_a_bucket_before_the_other_gradients_are_computed(given):
    """Test it after an operation that waits for all gradients, with a gradient that is a constant."""
    (comm,) = virtual_world(1)
    comm.hosts = ["a", "b"]
    graph = HostGraphComm(comm)

    def late(gradient):
        time.sleep(0.3)
        given.append("late")
        return gradient

    @tf.function
    def step(x):
        gradients = [tf.ensure_shape(tf.numpy_function(late, [x], tf.float32, stateful=False), [300_000])]
        gradients.append(tf.ones([300_000]))
        with tf.control_dependencies(gradients):
            now = tf.timestamp()
        return graph.all_reduce(gradients, Reduction(sizes=(300_000,) * 2), "test"), now

    for value in (3.0, 4.0):
        given.clear()
        (first, second), _ = step(tf.fill([300_000], value))
        assert (first.numpy()[-1], second.numpy()[0]) == (value, 1.0)
        assert given == [0, "late", 1]
    graph.close()
