"""Jobs with split layers that start wrong, or lose a rank: each rank says why, and the job ends."""

# Tests: hvdx/keras/fit/positions.py, hvdx/keras/layers/split_layer.py

import time

import pytest

from tests.launch import run

LIMIT, END = 60, 15

TRAIN = """
import os, sys, time
import numpy as np, keras
import hvdx, hvdx.keras
from hvdx.keras.layers import SplitDense
hvdx.init(split={split!r})
class Leave(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3 and hvdx.rank() == {leaves!r}:
            print("READY", time.time(), flush=True)
            {how}
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((3,)), SplitDense(8, activation="relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
model.fit(x, y, batch_size=4, epochs={epochs}, verbose=0, callbacks=[hvdx.keras.Distribute({strategy!r}), Leave()])
print("TRAINED", model.layers[0].kernel.shape, flush=True)
"""


def program(split=2, leaves=None, how="pass", epochs=1, strategy="all_reduce"):
    return ["-c", TRAIN.format(split=split, leaves=leaves, how=how, epochs=epochs, strategy=strategy)]


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("all_reduce", "os._exit(9)"),
        ("threshold:tau=0.1", "sys.exit(3)"),
        ("all_reduce:engine=mpi", "raise KeyError(1)"),
        ("parameter_server:servers=colocated", "raise KeyError(2)"),
    ],
)
def test_rank_that_ends_is_named_and_ends_the_job(strategy, how):
    done = run(4, program(2, 2, how, 1000, strategy), timeout=LIMIT + END)
    ended = time.time()
    assert done.code not in (0, None), done
    assert "rank 2" in done.out or "rank: 2" in done.out or ",2]" in done.out, done
    assert ended - done.ready[0] < END, done


def test_split_that_does_not_fit_is_refused_on_all_ranks():
    done = run(3, program(2), timeout=LIMIT)
    assert done.code not in (0, None), done
    assert "split=2: expected a divisor of 3, the number of ranks that train" in done.out


def test_ranks_with_different_splits_are_refused():
    code = """
import os, hvdx
os.environ["HVDX_SPLIT"] = os.environ["OMPI_COMM_WORLD_RANK"].replace("0", "2")
hvdx.init()
"""
    done = run(2, ["-c", code], timeout=LIMIT)
    assert done.code not in (0, None), done
    assert "split=2 on rank 0, split=1 on rank 1" in done.out
    assert "mpirun -x HVDX_SPLIT" in done.out


def test_split_cannot_change_once_the_ranks_are_joined():
    code = """
import hvdx
hvdx.init(split=2)
hvdx.init(split="2")
try:
    hvdx.init(split=1)
except ValueError as error:
    print(error, flush=True)
"""
    done = run(2, ["-c", code], timeout=LIMIT)
    assert done.code == 0, done
    assert done.out.count("split=1: the ranks have been joined in groups of 2 already") == 2


def test_script_alone_trains_whole_layers():
    done = run(1, program("node"), timeout=LIMIT, env={"HVDX_SPLIT": "4"})
    assert done.code == 0, done
    assert "TRAINED (3, 8)" in done.out


STRATEGIES = """
import numpy as np, keras
import hvdx, hvdx.keras
from hvdx import comm
from hvdx.keras.fit import replicas
from hvdx.keras.layers import SplitDense
from hvdx.keras.weight_parts import by_ranks, whole_values
hvdx.init(split=2)
world = comm.start()
def train(strategy, make, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), make(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    random = np.random.default_rng(hvdx.rank())
    x = random.normal(size=(16, 3)).astype("float32")
    callback = hvdx.keras.Distribute(strategy)
    history = model.fit(x, x.sum(axis=1), batch_size=4, epochs=3, verbose=0, shuffle=False, callbacks=[callback])
    same = [replicas.differing(some, ranks) for ranks, some in by_ranks(model.weights, world)] in ([{}], [{}, {}])
    return history.history["loss"], whole_values(model.weights, world.mesh.group), same
def close(a, b, tolerance):
    return all(np.abs(np.asarray(x) - y).max() <= tolerance * np.abs(y).max() for x, y in zip(a, b))
"""

HOROVOD = """
for options in ({}, {"op": "sum"}, {"compression": "fp16"}):
    strategy = hvdx.AllReduce(engine="horovod", **options)
    got, expected = train(strategy, SplitDense), train(strategy, keras.layers.Dense)
    tolerance = 1e-2 if "compression" in options else 1e-5
    assert close(got[0], expected[0], tolerance) and close(got[1], expected[1], tolerance) and got[2], (options, got)
got = train(hvdx.ParameterAveraging(2, engine="horovod"), SplitDense)
assert got[2] and got[0][-1] < got[0][0], got
print("TRAINED", flush=True)
"""

SERVERS = """
strategy = hvdx.ParameterServer({servers!r}, staleness="bound", max_staleness=0, aggregate=4)
got, expected = train(strategy, SplitDense), train(strategy, keras.layers.Dense)
assert close(got[0], expected[0], 1e-5) and close(got[1], expected[1], 1e-5) and got[2], (got, expected)
print("TRAINED", flush=True)
"""


@pytest.mark.long
def test_process_sets_of_horovod_combine_parts():
    done = run(4, ["-c", STRATEGIES + HOROVOD], timeout=2 * LIMIT, env={"HVDX_STRATEGY": "all_reduce"})
    assert done.code == 0, done
    assert done.out.count("TRAINED") == 4, done


@pytest.mark.long
def test_dedicated_servers_hold_parts():
    code = STRATEGIES + SERVERS.format(servers=2)
    done = run(6, ["-c", code], timeout=2 * LIMIT, env={"HVDX_STRATEGY": "parameter_server:servers=2"})
    assert done.code == 0, done
    assert done.out.count("TRAINED") == 4, done
