"""Adapters between an optimiser and a strategy, on virtual ranks: threads of this process, without a launcher."""

# Tests: hvdx/keras/adapters/base.py, hvdx/keras/adapters/finite.py, hvdx/keras/adapters/graph.py
# Tests: hvdx/keras/adapters/weights.py

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx.comm.host_graph import HostGraphComm
from hvdx.keras.adapters.optimizer import attach
from hvdx.keras.adapters.weights import WeightsAdapter
from tests.ranks.test_contract import Mean
from tests.strategies.virtual import on_all


def stepped(comm, strategy, steps=3):
    """Take steps in which the gradient of rank r is r + 1; return the weight and the adapter."""
    weight, optimizer = keras.Variable(np.zeros(4, np.float32)), keras.optimizers.SGD(1.0)
    adapter = attach(optimizer, strategy, "adapters", comm=comm)
    for _ in range(steps):
        optimizer.apply([tf.fill([4], comm.rank + 1.0)], [weight])
    adapter.flush()
    adapter.load_state_dict(adapter.state_dict())
    return weight.numpy(), adapter


@pytest.mark.parametrize("placement", ["gradient", "update", "weights"])
def test_adapter_of_each_placement_combines_over_the_given_ranks(placement):
    for weight, adapter in on_all(2, lambda comm: stepped(comm, Mean(placement))):
        np.testing.assert_allclose(weight, -4.5)
        assert isinstance(adapter, WeightsAdapter) == (placement == "weights")


@pytest.mark.parametrize("strategy", [hvdx.AllReduce(), hvdx.ParameterAveraging(2)], ids=lambda s: s.name)
def test_strategies_in_the_graph_run_without_horovod(strategy):
    for weight, adapter in on_all(2, lambda comm: stepped(HostGraphComm(comm), strategy)):
        np.testing.assert_allclose(weight, -4.5)
        # 3 steps have two averages, the last of which is by the flush.
        assert adapter.cost().sent == {"all_reduce": 3 * 16, "parameter_averaging": 2 * 16}[strategy.name]


@pytest.mark.parametrize(("scaled", "expected"), [(False, (3, "w")), (True, (0, ""))])
def test_nan_is_reported_without_horovod_and_all_ranks_skip_an_overflow(scaled, expected):
    def run(comm):
        weight, optimizer = keras.Variable(np.zeros(4, np.float32), name="w"), keras.optimizers.SGD(1.0)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
        adapter = attach(optimizer, hvdx.AllReduce(), "adapters", comm=HostGraphComm(comm))
        for step in range(3):
            bad = comm.rank == 1 and step == 2
            optimizer.apply([tf.fill([4], float("nan") if bad else 1.0)], [weight])
        return comm.rank, weight.numpy(), adapter.first_bad()

    for rank, weight, first in on_all(2, run):
        np.testing.assert_array_equal(weight, np.full(4, -2.0 if scaled else np.nan))
        assert first == (expected if rank == 1 else (0, ""))


def test_rows_of_an_embedding_are_gathered_without_horovod():
    def run(comm):
        table, optimizer = keras.Variable(np.zeros((3, 2), np.float32)), keras.optimizers.SGD(1.0)
        attach(optimizer, hvdx.AllReduce(), "adapters", comm=HostGraphComm(comm))
        rows = tf.IndexedSlices(tf.ones([comm.rank + 1, 2]), tf.range(comm.rank + 1), tf.constant([3, 2]))
        optimizer.apply([rows], [table])
        return table.numpy()

    for table in on_all(2, run):
        np.testing.assert_allclose(table, [[-1, -1], [-0.5, -0.5], [0, 0]])


def test_auto_is_attached_like_other_strategies():
    for weight, adapter in on_all(2, lambda comm: stepped(comm, hvdx.Auto(), 5)):
        np.testing.assert_allclose(weight, -7.5)
        assert adapter.strategy.ready([adapter.exchange])
