"""Bad input causes a clear error on all ranks within seconds."""

# Tests: hvdx/errors.py, hvdx/comm/failure.py

import re
import socket
import time

import pytest

from hvdx.comm.failure import find_user_error
from tests.launch import run

# Seconds from the failure to the end of the job on all ranks; START adds the start of TensorFlow.
START, END = 60, 15
# The same if a rank was killed.
DEAD_END = 10

PREAMBLE = """
import os, sys, time
import numpy as np, keras, tensorflow as tf
import hvdx, hvdx.keras
hvdx.init()
rank, size = hvdx.rank(), hvdx.size()
keras.utils.set_random_seed(0)
def network(units=4):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
x, y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
def ready():
    print("READY", time.time(), flush=True)
"""


# The calls of AllReduce before its first step.
START_HOROVOD = "import hvdx; from hvdx import comm; hvdx.init(); comm.graph()"


def fails(ranks, code, *named, env=None, code_is=1, end=END):
    """Run a snippet that must fail with every text in `named`, soon after it prints READY if it does."""
    done = run(ranks, ["-c", PREAMBLE + code], timeout=START + END, env=env)
    ended = time.time()
    assert done.code not in (None, 0), done
    if code_is is not None:
        assert done.code == code_is, done
    for text in named:
        assert text in done.out, f"{text!r} is not in\n{done}"
    began = done.ready
    if began:
        assert ended - max(began) < end, done
    return done


@pytest.mark.parametrize("ranks", [4])
def test_models_of_different_shapes_end_on_all_ranks(ranks):
    code = "ready()\nnetwork(4 + rank // (size - 1)).fit(x, y, verbose=0, callbacks=[hvdx.keras.Distribute()])"
    done = fails(ranks, code, "ReplicaError", "the models differ", f"on rank {ranks - 1}")
    assert done.out.count("the models differ") == 1, "every rank says the same; one may speak"


@pytest.mark.parametrize("ranks", [4])
def test_exception_on_one_rank_within_an_epoch_ends_all(ranks):
    code = """
class Break(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and rank == size - 1:
            ready()
            raise ValueError("the disk is gone")
network().fit(x, y, batch_size=4, epochs=100, verbose=0, callbacks=[hvdx.keras.Distribute(), Break()])
"""
    who = f"rank {ranks - 1} of {ranks} on {socket.gethostname()} failed"
    fails(ranks, code, "ValueError: the disk is gone", f"{who}; ending the job on all ranks", end=DEAD_END)


def test_generator_that_fails_is_reported_with_its_own_error_and_line():
    code = """
def batches():
    for i in range(100):
        if i == 5 and rank == 1:
            ready()
            raise ValueError("image 5 is broken")
        yield x[:4], y[:4]
shapes = tf.TensorSpec((4, 3)), tf.TensorSpec((4, 1))
data = tf.data.Dataset.from_generator(batches, output_signature=shapes)
network().fit(data, steps_per_epoch=20, epochs=2, verbose=0, callbacks=[hvdx.keras.Distribute()])
"""
    done = fails(2, code)
    said = re.search(r"ending the job on all ranks: (.*)", done.out)
    assert re.fullmatch(r"ValueError: image 5 is broken \(<string>:\d+, in batches\)", said.group(1)), done


def test_error_of_a_function_that_is_traced_has_its_own_text():
    """AutoGraph wraps it, so that only its text says what was wrong."""
    text = """in user code:

    File "/home/me/train.py", line 12, in train_step  *
        self.optimizer.apply(gradients)
    File "/lib/python3.11/site-packages/hvdx/keras/adapters/base.py", line 360, in refuse_xla
        raise ConfigError(

    ConfigError: jit_compile: expected False.
"""
    assert find_user_error(text) == "ConfigError: jit_compile: expected False. (/home/me/train.py:12, in train_step)"


@pytest.mark.parametrize("strategy", ["all_reduce", "threshold:tau=0.1"])
def test_rank_that_is_killed_ends_all_and_is_named_with_its_host(strategy):
    code = f"""
import signal
class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and rank == 1:
            ready()
            os.kill(os.getpid(), signal.SIGKILL)
network().fit(x, y, batch_size=4, epochs=100, verbose=0, callbacks=[hvdx.keras.Distribute({strategy!r}), Kill()])
"""
    done = fails(2, code, code_is=None, end=DEAD_END)
    # The launcher's message, which it breaks into lines; the killed process cannot print one.
    said = " ".join(done.out.split())
    host = re.escape(socket.gethostname())
    assert re.search(rf"rank 1 .{{0,40}}on node {host} .{{0,40}}signal 9", said), done


def test_too_many_ranks_for_the_machine_are_refused():
    done = run(3, ["-c", "import hvdx; hvdx.init()"], timeout=START, env={"HVDX_RANKS_PER_CORE": "0"})
    assert done.code not in (None, 0)
    assert "3 ranks on" in done.out
    assert "expected at most 0" in done.out


def test_launcher_of_another_mpi_is_refused():
    """N singletons: the launcher started 2 ranks, and MPI finds a world of 1."""
    env = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    done = run(1, ["-c", "import hvdx; hvdx.init()"], timeout=START, env=env)
    assert done.code not in (None, 0)
    assert "Hydra started 2 ranks and MPI finds a world of 1" in done.out
    assert "hvdx doctor" in done.out


def test_unknown_strategy_gets_a_suggestion():
    code = "network().fit(x, y, verbose=0, callbacks=[hvdx.keras.Distribute()])"
    fails(2, code, "ConfigError", "did you mean all_reduce", env={"HVDX_STRATEGY": "all_redcue"})


def test_error_of_all_ranks_is_printed_once():
    done = fails(4, "ready(); raise ValueError('the same everywhere')", "ValueError: the same everywhere")
    assert done.out.count("failed; ending the job on all ranks") == 1


@pytest.mark.parametrize(
    ("stub", "named"),
    [
        ("raise ImportError('no module named horovod')", "Horovod cannot be loaded"),
        ("raise OSError('undefined symbol: _ZN10tensorflow')", "undefined symbol"),
    ],
)
def test_horovod_that_cannot_be_loaded_names_the_remedy(tmp_path, stub, named):
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text(stub)
    done = run(2, ["-c", START_HOROVOD], timeout=START, env={"PYTHONPATH": str(tmp_path)})
    assert done.code not in (None, 0)
    assert named in done.out
    assert "hvdx build-horovod" in done.out


def fake_distribution(folder, built_for):
    """Put a Horovod on the path with the version that it was built for; without one if `built_for` is None."""
    info = folder / "horovod-0.28.1.dist-info"
    info.mkdir(parents=True)
    (folder / "horovod").mkdir()
    (folder / "horovod" / "metadata.json").write_text(f'{{"tensorflow": "{built_for}"}}')
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "RECORD").write_text("horovod/metadata.json,,\n")


def test_horovod_for_another_tensorflow_names_the_remedy(tmp_path):
    fake_distribution(tmp_path, "2.15.0")
    done = run(2, ["-c", START_HOROVOD], timeout=START, env={"PYTHONPATH": str(tmp_path)})
    assert done.code not in (None, 0)
    assert "built against TensorFlow 2.15.0" in done.out
    assert "hvdx build-horovod" in done.out


HIDE_HOROVOD = """
import importlib.metadata
found = importlib.metadata.distribution
def hide(name):
    if name == "horovod":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.distribution = hide
"""


def test_missing_horovod_names_the_remedy():
    done = run(2, ["-c", HIDE_HOROVOD + START_HOROVOD], timeout=START)
    assert done.code not in (None, 0)
    assert "found none" in done.out
    assert "hvdx build-horovod" in done.out


def test_rank_that_runs_out_of_data_does_not_leave_the_others_waiting():
    code = """
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
if rank == 1:
    data = data.take(5)
ready()
network().fit(data, steps_per_epoch=10, epochs=2, verbose=0, shuffle=False, callbacks=[hvdx.keras.Distribute()])
"""
    fails(2, code, "rank 1", "ran out of data after 5 of 10 steps")


def test_one_rank_needs_no_horovod(tmp_path):
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('broken')")
    code = PREAMBLE + "network().fit(x, y, verbose=0, callbacks=[hvdx.keras.Distribute()]); print('trained')"
    done = run(1, ["-c", code], timeout=START, env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 0, done
    assert "trained" in done.out


@pytest.mark.parametrize("strategies", [("threshold:tau=0.1", "threshold:tau=0.2"), ("all_reduce", "threshold")])
def test_different_strategies_end_on_all_ranks_with_an_error_of_hvdx(strategies):
    code = f"""
ready()
network().fit(x, y, verbose=0, callbacks=[hvdx.keras.Distribute({strategies!r}[rank])])
"""
    done = fails(2, code, "ReplicaError", "the ranks were given different strategies", "mpirun -x HVDX_STRATEGY")
    assert done.out.count("hvdx: ReplicaError") == 1, "every rank says the same; one may speak"


def test_rank_that_does_not_join_an_exchange_is_named():
    code = """
class Late(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            ready()
            time.sleep(30 * (rank == 1))
network().fit(x, y, batch_size=4, verbose=0, callbacks=[hvdx.keras.Distribute("threshold:tau=0.1"), Late()])
"""
    fails(2, code, "ExchangeError", "Rank 1 did not join", "HVDX_TIMEOUT", env={"HVDX_TIMEOUT": "5"})


def test_slow_rank_delays_others_without_an_error():
    code = """
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1 * (rank == 1))
callback = hvdx.keras.Distribute("threshold:target_density=0.1")
network().fit(x, y, batch_size=4, verbose=0, callbacks=[callback, Slow()])
print("waited", rank, round(callback.counters.telemetry[0].waiting, 1), callback.counters.exchanges, flush=True)
"""
    done = run(2, ["-c", PREAMBLE + code], timeout=START + END)
    assert done.code == 0, done
    waited = [float(line.split()[2]) for line in done.out.splitlines() if line.startswith("waited 0")]
    assert waited[0] > 1.0, done
