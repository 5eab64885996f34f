"""The parameter server in separate jobs: servers in ranks of their own, and failures of ranks."""

# Tests: hvdx/strategies/registry.py, hvdx/strategies/serving/exchange.py, hvdx/strategies/serving/server.py

import re
import time

import pytest

from tests.launch import run

# Seconds from the failure to the end of the job (END), and for the start of TensorFlow (START).
START, END = 60, 20

MODEL = """
import os, signal, sys, time
import numpy as np, keras, tensorflow as tf
import hvdx, hvdx.keras as hvd
def network():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model
x, y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
def ready():
    print("READY", time.time(), flush=True)
def train(callback, *others, epochs=2):
    model = network()
    options = dict(batch_size=4, epochs=epochs, verbose=0, shuffle=False, callbacks=[callback, *others])
    history = model.fit(x, y, **options)
    return model, history.history
class Hook(keras.callbacks.Callback):
    def __init__(self, batch, do):
        super().__init__()
        self.batch, self.do = batch, do
    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.do()
"""

# The ways to make the last rank a server.
DEDICATED = {
    "environment": ("hvdx.init(); callback = hvd.Distribute()", {"HVDX_STRATEGY": "parameter_server:servers=1"}),
    "init": ("hvdx.init(strategy=hvdx.ParameterServer(1)); callback = hvd.Distribute()", {}),
    "callback": ("callback = hvd.Distribute(hvdx.ParameterServer(1))", {}),
}


def launched(ranks, code, env=None, timeout=START + END):
    return run(ranks, ["-c", MODEL + code], timeout=timeout, env=env)


def fails(ranks, code, *named, env=None):
    """Run a snippet that must fail with every text in `named`, soon after it prints READY."""
    done = launched(ranks, code, env)
    ended = time.time()
    assert done.code not in (None, 0), done
    for text in named:
        assert text in done.out, f"{text!r} is not in\n{done}"
    began = done.ready
    if "ready()" in code:
        assert began, done
        assert ended - max(began) < END, done
    return done


# -- servers in ranks of their own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", DEDICATED)
def test_dedicated_server_is_no_worker_and_ends_silently(way):
    begin, env = DEDICATED[way]
    code = f"""
{begin}
model, history = train(callback)
steps = callback.counters.exchanges
print("WORKER", hvdx.rank(), hvdx.size(), steps, float(sum(np.abs(w).sum() for w in model.get_weights())), flush=True)
"""
    done = launched(3, code, env)
    assert done.code == 0, done
    said = [line.split()[1:] for line in done.out.splitlines() if line.startswith("WORKER")]
    assert sorted(rank for rank, *_ in said) == ["0", "1"], done
    assert {size for _, size, *_ in said} == {"2"}
    assert sum(int(steps) for _, _, steps, _ in said) == 2 * 2 * 16
    assert len({weights for *_, weights in said}) == 1
    # The only output is the line about workers and threads, and that the workers train on the same data.
    known = ("WORKER", "I0000", "hvdx: 2 workers on one host", "hvdx: WARNING: all 2 ranks train on the same data")
    others = [line for line in done.out.splitlines() if line.strip() and not line.startswith(known)]
    assert not [line for line in others if "hvdx" in line or "Error" in line or "Traceback" in line], done


@pytest.mark.long
def test_two_servers_hold_a_half_each_and_workers_can_still_call_collectives():
    code = """
hvdx.init(strategy="parameter_server:servers=2,staleness=bound,max_staleness=0,aggregate=2")
x, y = x + hvdx.rank(), y - hvdx.rank()
served, history = train(hvd.Distribute())
total = float(hvd.allreduce(float(hvdx.rank() + 1), op=hvd.Sum))
gathered = hvd.allgather(tf.constant([hvdx.rank()])).numpy().tolist()
sent = hvd.broadcast_object({"from": hvdx.rank()}, 1)
plain, _ = train(hvd.Distribute(hvdx.ParameterServer(2)))
reduced, expected = train(hvd.Distribute(hvdx.AllReduce()))
def far(model):
    return max(np.abs(a - b).max() for a, b in zip(model.get_weights(), reduced.get_weights()))
losses = max(abs(a - b) for a, b in zip(history["loss"], expected["loss"]))
print("WORKER", hvdx.rank(), total, gathered, sent, far(served) < 1e-6 < far(plain), losses < 1e-5, flush=True)
hvd.shutdown()
print("LEFT", flush=True)
"""
    done = launched(4, code)
    assert done.code == 0, done
    said = sorted(line for line in done.out.splitlines() if line.startswith("WORKER"))
    assert said == [f"WORKER {rank} 3.0 [0, 1] {{'from': 1}} True True" for rank in range(2)], done
    assert done.out.count("LEFT") == 2, done


def test_too_many_servers_are_refused():
    begin = time.time()
    done = launched(2, "hvdx.init(strategy='parameter_server:servers=2')")
    assert done.code not in (None, 0), done
    assert time.time() - begin < START
    assert "LaunchError: 2 servers and 2 ranks: expected at least one rank more than servers" in done.out
    assert "servers='colocated'" in done.out
    assert done.out.count("hvdx: LaunchError") == 1, "every rank says the same; one may speak"


def test_servers_requested_too_late_are_refused_with_the_remedies():
    code = "hvdx.shard((x, y), 4)\ntrain(hvd.Distribute(hvdx.ParameterServer(1)))"
    done = fails(3, code, "ConfigError", "hvdx.init(strategy)", "HVDX_STRATEGY=parameter_server:servers=1", "colocated")
    assert done.out.count("hvdx: ConfigError") == 1, "every rank says the same; one may speak"


# -- ranks that fail --------------------------------------------------------------------------------------------------


def test_worker_that_is_killed_ends_the_job():
    code = """
hvdx.init(strategy="parameter_server:servers=1")
def kill():
    if hvdx.rank() == 1:
        ready()
        os.kill(os.getpid(), signal.SIGKILL)
train(hvd.Distribute(), Hook(3, kill), epochs=10000)
"""
    fails(3, code)


def test_server_that_is_killed_ends_the_job():
    code = """
from mpi4py import MPI
processes = MPI.COMM_WORLD.allgather(os.getpid())
hvdx.init(strategy="parameter_server:servers=1")
def kill():
    if hvdx.rank() == 0:
        ready()
        os.kill(processes[2], signal.SIGKILL)
train(hvd.Distribute(), Hook(3, kill), epochs=10000)
"""
    fails(3, code)


def test_exception_of_a_worker_within_an_epoch_ends_the_job_with_its_own_error():
    code = """
hvdx.init(strategy="parameter_server:servers=1")
def break_down():
    if hvdx.rank() == hvdx.size() - 1:
        ready()
        raise ValueError("the disk is gone")
train(hvd.Distribute(), Hook(3, break_down), epochs=10000)
"""
    fails(3, code, "ValueError: the disk is gone", "ending the job on all ranks")


@pytest.mark.parametrize(("servers", "rank"), [("1", 1), ("colocated", 1)])
def test_worker_that_hangs_is_named(servers, rank):
    code = f"""
hvdx.init(strategy="parameter_server:servers={servers}")
def hang():
    if hvdx.rank() == {rank}:
        ready()
        time.sleep(100)
train(hvd.Distribute(), Hook(3, hang))
"""
    ranks = 3 if servers == "1" else 2
    fails(ranks, code, "ExchangeError", f"the servers wait for worker {rank}", env={"HVDX_TIMEOUT": "5"})


@pytest.mark.long
def test_worker_that_hangs_before_its_first_step_is_named():
    code = """
hvdx.init(strategy="parameter_server:servers=colocated")
class Hang(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and hvdx.rank() == 0:
            ready()
            time.sleep(100)
train(hvd.Distribute(), Hang())
"""
    fails(2, code, "ExchangeError", "wait for worker 0", env={"HVDX_TIMEOUT": "5"})


LOOP = """
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
model = network()
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
"""


@pytest.mark.parametrize("servers", ["1", "colocated"])
def test_worker_that_ends_early_does_not_leave_the_others_waiting(servers):
    """It sends DISCONNECT, and the others flush without it."""
    code = f"""
hvdx.init(strategy="parameter_server:servers={servers}")
{LOOP}
for _ in range(3):
    step()
if hvdx.rank() == 1:
    print("GONE", flush=True)
    sys.exit(0)
for _ in range(20):
    step()
hvd.flush(optimizer)
print("DONE", np.isfinite(model.get_weights()[0]).all(), flush=True)
"""
    ranks = 3 if servers == "1" else 2
    begin = time.time()
    done = launched(ranks, code, env={"HVDX_TIMEOUT": "15"})
    assert done.code == 0, done
    assert time.time() - begin < START
    assert "GONE" in done.out
    assert "DONE True" in done.out, done


@pytest.mark.long
def test_first_worker_that_ends_early_makes_the_others_time_out():
    code = f"""
hvdx.init(strategy="parameter_server:servers=1")
{LOOP}
step()
if hvdx.rank() == 0:
    sys.exit(0)
step()
hvd.flush(optimizer)
ready()
step()
"""
    fails(3, code, "ExchangeError", "wait for worker 0", env={"HVDX_TIMEOUT": "5"})


SIGNALLED = """
import os, signal
import numpy as np
from mpi4py import MPI
processes = MPI.COMM_WORLD.allgather(os.getpid())
from hvdx.strategies import ParameterServer, TensorSpec, join
comm = join(ParameterServer(servers=1))
exchange = ParameterServer(servers=1).open(comm, [TensorSpec("a", (3,), 4)])
exchange.begin([np.zeros(3, np.float32)])
weights = exchange.step([np.ones(3, np.float32)])
for number in (signal.SIGUSR1, signal.SIGTERM):
    os.kill(processes[1], number)
for _ in range(100):
    weights = exchange.step([weights[0] + np.float32(1)])
print("SERVED", exchange.flush()[0].tolist(), flush=True)
"""


def test_signal_for_all_ranks_does_not_end_a_server_before_its_workers():
    done = run(2, ["-c", SIGNALLED], timeout=START)
    assert done.code == 0, done
    assert "SERVED [101.0, 101.0, 101.0]" in done.out, done


# -- each update counts once ------------------------------------------------------------------------------------------

STRESS = """
import sys, time
import numpy as np
import hvdx
from hvdx.strategies import TensorSpec, join, resolve
strategy = resolve(sys.argv[1])
comm = join(strategy)
random, elements = np.random.default_rng(comm.rank), 5000
exchange = strategy.open(comm, [TensorSpec("a", (70, 50), 4), TensorSpec("b", (elements - 3500,), 4)])
weights, expected = [np.zeros((70, 50), np.float32), np.zeros(elements - 3500, np.float32)], np.zeros(elements)
taken = 0
for session in range(4):
    exchange.begin(weights)
    for _ in range(int(random.integers(100, 500))):
        at, by = random.integers(elements, size=20), random.integers(-3, 4, size=20)
        flat = np.zeros(elements, np.float32)
        np.add.at(flat, at, by)
        expected += flat
        taken += 1
        weights = exchange.step([weights[0] + flat[:3500].reshape(70, 50), weights[1] + flat[3500:]])
        if random.random() < 0.1:
            time.sleep(random.exponential(2e-3))
    weights = exchange.flush()
    total = comm.all_reduce_sum(expected, "expected")
    assert np.array_equal(np.concatenate([w.ravel() for w in weights]), total / comm.size), np.abs(total).max()
    mine = b"".join(w.tobytes() for w in weights)
    assert len(set(comm.all_gather_object(mine, "weights"))) == 1
assert exchange.telemetry.steps == taken
steps = sum(comm.all_gather_object(taken, "steps"))
if comm.rank == 0:
    print("EXACT", comm.size, steps, int(np.abs(total).sum()), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "servers"), [(4, "colocated:2"), (5, "1"), (6, "2")])
def test_thousands_of_updates_with_random_delays_count_once_each(ranks, servers):
    spelling = f"parameter_server:servers={servers}"
    done = run(ranks, ["-c", STRESS, spelling], timeout=START + END)
    assert done.code == 0, done
    ((workers, steps, far),) = re.findall(r"EXACT (\d+) (\d+) (\d+)", done.out)
    assert int(workers) == 4
    assert int(steps) > 2000
    assert int(far) > 0


# -- jobs without training on the server ------------------------------------------------------------------------------

IDLE = {
    "one worker": (2, "train(hvd.Distribute())"),
    "another strategy": (3, "train(hvd.Distribute('parameter_averaging'))"),
    "an early end": (3, "sys.exit(0)"),
}


@pytest.mark.long
@pytest.mark.parametrize("what", IDLE)
def test_unused_server_ends_with_the_job(what):
    ranks, code = IDLE[what]
    done = launched(ranks, f"hvdx.init(strategy='parameter_server:servers=1')\n{code}")
    assert done.code == 0, done


def test_world_with_servers_cannot_be_joined_again():
    code = "hvdx.init(strategy='parameter_server:servers=1'); hvd.shutdown(); ready(); hvdx.init()"
    fails(3, code, "LaunchError", "servers='colocated'")


def test_strategy_on_some_hosts_only_is_an_error_on_all_ranks():
    code = """
if int(os.environ["OMPI_COMM_WORLD_RANK"]):
    os.environ["HVDX_STRATEGY"] = "parameter_server:servers=1"
ready()
hvdx.init()
"""
    fails(3, code, "LaunchError", "mpirun -x HVDX_STRATEGY")
