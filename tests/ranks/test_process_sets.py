"""Process sets and alltoall."""

# Tests: hvdx/keras/horovod/process_sets.py

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx.keras as hvd
from hvdx.errors import ConfigError, ReplicaError


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("graph", [False, True])
def test_alltoall_gives_each_rank_its_part(graph):
    rank, size = hvd.rank(), hvd.size()
    mine = 10.0 * rank + np.arange(size)
    splits = [1 + r for r in range(size)]
    rows = keras.Variable(np.full((sum(splits), 2), rank, "float32"))

    def step(value):
        return hvd.alltoall(value), hvd.alltoall(rows, splits=splits)

    equal, (parts, counts) = (tf.function(step) if graph else step)(tf.constant(mine))
    np.testing.assert_array_equal(equal, [10.0 * r + rank for r in range(size)])
    np.testing.assert_array_equal(counts, [1 + rank] * size)
    np.testing.assert_array_equal(parts, np.repeat(np.arange(size), 1 + rank)[:, None] * np.ones((1, 2)))
    with pytest.raises(ConfigError, match="splits"):
        hvd.alltoall([1.0], splits=[2] * size)
    if size > 1:
        with pytest.raises(ConfigError, match="divide"):
            hvd.alltoall([1.0])
    a, b = hvd.grouped_reducescatter([mine, mine[:, None]], op=hvd.Sum)
    np.testing.assert_allclose(a, [sum(10.0 * r + rank for r in range(size))])
    np.testing.assert_allclose(b, [[float(a[0])]])


@pytest.mark.sizes(1, 2)
def test_invalid_process_sets_are_refused():
    rank, size = hvd.rank(), hvd.size()
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.size(), everyone.rank(), everyone.included()) == (0, size, rank, True)
    assert float(hvd.allreduce(1.0, op=hvd.Sum, process_set=everyone)) == size
    for ranks in ([0, 0], [], ["0"], 3):
        with pytest.raises(ConfigError, match="ProcessSet"):
            hvd.ProcessSet(ranks)
    for ranks in (range(size), [0, size]):
        with pytest.raises(ConfigError, match=re.escape("add_process_set")):
            hvd.add_process_set(ranks)
    new = hvd.ProcessSet([0])
    assert new.size() is new.rank() is None
    with pytest.raises(ConfigError, match="added"):
        hvd.allreduce(1.0, process_set=new)
    with pytest.raises(ConfigError, match="AllReduce"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), strategy="threshold", process_set=new)
    if size > 1:
        with pytest.raises(ReplicaError, match="on all ranks"):
            hvd.add_process_set([rank])
