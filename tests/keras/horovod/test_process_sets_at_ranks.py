"""Process sets, in a job of three ranks."""

from tests.launch import run

PROGRAM = """
import keras, numpy as np, tensorflow as tf
import hvdx.keras as hvd
from hvdx.errors import ConfigError
hvd.init()
rank = hvd.rank()
first = hvd.add_process_set([0])
second = hvd.add_process_set(hvd.ProcessSet([1, 2]))
mine, other = (first, second) if rank == 0 else (second, first)
assert (mine.included(), other.included(), mine.size(), mine.rank()) == (True, False, len(mine.ranks), max(rank - 1, 0))
gathered = [float(r) for r in mine.ranks]
assert hvd.allgather([float(rank)], process_set=mine).numpy().tolist() == gathered
assert float(hvd.allreduce(float(rank), op=hvd.Sum, process_set=mine)) == sum(gathered)
assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
assert hvd.broadcast_object(rank, mine.ranks[-1], process_set=mine) == mine.ranks[-1]
assert float(hvd.broadcast(float(rank), mine.ranks[-1], process_set=mine)) == mine.ranks[-1]
assert hvd.alltoall([float(rank)] * len(mine.ranks), process_set=mine).numpy().tolist() == gathered
assert hvd.reducescatter([1.0] * len(mine.ranks), op=hvd.Sum, process_set=mine).numpy().tolist() == [len(mine.ranks)]
both = tf.function(lambda x: (hvd.allreduce(x, process_set=mine), hvd.broadcast(x, mine.ranks[0], process_set=mine)))
assert [float(x) for x in both(tf.constant(float(rank)))] == [sum(gathered) / len(gathered), mine.ranks[0]]
number = mine.process_set_id
assert int(hvd.size_op(number)) == len(mine.ranks) and int(hvd.process_set_included_op(number)) == 1
variable = keras.Variable([float(rank)])
hvd.broadcast_variables([variable], mine.ranks[-1], process_set=mine)
assert float(variable[0]) == mine.ranks[-1]
try:
    hvd.allreduce(1.0, process_set=other)
except ConfigError as error:
    assert "included" in str(error), error
weight = keras.Variable([0.0])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=second)
optimizer.apply([tf.constant([float(rank)])], [weight])
assert weight.numpy().tolist() == [[0.0], [-1.5], [-1.5]][rank], weight.numpy()
with hvd.DistributedGradientTape(tf.GradientTape(), process_set=second) as tape:
    loss = float(rank) * weight
assert tape.gradient(loss, weight).numpy().tolist() == [[0.0], [1.5], [1.5]][rank]
assert hvd.remove_process_set(second) and second.size() is None
assert hvd.add_process_set([1, 2]).size() == 2
assert float(hvd.allreduce(float(rank), op=hvd.Sum)) == 3.0
hvd.shutdown()
print("DONE")
"""


def test_process_sets_have_their_own_collectives():
    done = run(3, ["-c", PROGRAM], timeout=100)
    assert done.code == 0, done
    assert done.out.count("DONE") == 3
