# Tests: hvdx/comm/horovod.py, hvdx/comm/mpi.py, hvdx/comm/mpi_mailbox.py, hvdx/comm/sums.py, hvdx/comm/tensors.py

import logging
import math
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from hvdx import comm as world
from hvdx.comm import Channel
from hvdx.comm.host_graph import HostGraphComm
from hvdx.comm.interfaces import Reduction
from hvdx.log import Log
from tests.checks import COMM_CHECKS, GRAPH_CHECKS, MAILBOX_CHECKS


@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize("engine", [world.start, lambda: world.graph(engine="mpi"), world.graph],
                         ids=["start", "mpi", "graph"])  # fmt: skip
@pytest.mark.parametrize("check", COMM_CHECKS.values(), ids=COMM_CHECKS)
def test_comm_passes(engine, check):
    check(engine())


@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize("check", GRAPH_CHECKS.values(), ids=GRAPH_CHECKS)
def test_graph_comm_passes(check):
    check(world.graph())


@pytest.mark.graph(every=True)
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("check", GRAPH_CHECKS.values(), ids=GRAPH_CHECKS)
def test_graph_comm_without_horovod_passes(check):
    check(world.graph(engine="mpi"))


@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize("check", MAILBOX_CHECKS.values(), ids=MAILBOX_CHECKS)
def test_messages_pass(check):
    check(world.start())


@pytest.mark.sizes(1, 2, 4)
def test_sum_in_order_has_the_bits_of_rank_order():
    comm = world.start()
    channel = comm.channel("a sum")  # the second way is that of channels that have no schedule of their own
    # From one element to several blocks of the schedule.
    for elements in (1, 1000, 300_001):
        for dtype in (np.float32, np.float16):
            vectors = [np.random.default_rng(r).normal(size=elements).astype(dtype) for r in range(comm.size)]
            expected = vectors[0].astype(np.float32)
            for other in vectors[1:]:
                expected += other
            for summed in (channel.sum_in_order, partial(Channel.sum_in_order, channel)):
                mine = vectors[comm.rank].copy()
                summed(mine, 0.5)
                np.testing.assert_array_equal(mine, (expected * np.float32(0.5)).astype(dtype))
    channel.close()


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("sizes", [(), (300_000,) * 4], ids=["at once", "in buckets"])
@pytest.mark.graph(every=True)
def test_sums_in_place_change_nothing_that_is_read_elsewhere(sizes):
    """Sums of a variable, a constant and two equal tensors: TensorFlow gives equal tensors one memory."""
    graph = HostGraphComm(world.start())
    graph._overlaps = bool(sizes)
    variable, how = tf.Variable(tf.ones(300_000)), Reduction(average=False, sizes=sizes)

    @tf.function
    def step():
        value = variable.read_value()
        given = [value, tf.sin(value), tf.sin(value), tf.ones(300_000)]
        sums = [graph.all_reduce(given, how, name) for name in ("first", "second")]
        return [t[0] for t in (*sums[0], *sums[1], *given)]

    ones = np.array([1.0, math.sin(1), math.sin(1), 1.0])
    for _ in range(2):
        np.testing.assert_allclose(step(), [*graph.size * ones, *graph.size * ones, *ones], rtol=1e-6)
    assert variable[0] == 1.0
    graph.close()


@pytest.mark.sizes(1, 2, 4)
def test_records_have_the_rank(monkeypatch):
    comm, found, handler = world.start(), [], logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: found.append((record.rank, record.getMessage())))
    logger = logging.getLogger("hvdx.test")
    logger.addHandler(handler)
    Log(logger.name).info("text")
    logger.removeHandler(handler)
    assert found == [(comm.rank, "text")]
