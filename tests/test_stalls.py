"""A rank that hangs is named with its position; a healthy job prints nothing; every job ends."""

# Tests: hvdx/comm/waiting.py, hvdx/comm/watchdog.py

import re
import socket

import pytest

from tests.launch import run

LIMIT = 120
HOST = socket.gethostname()

# Ranks without TensorFlow, which start in a second.
BARE = """
import os, signal, subprocess, sys, time
from hvdx import comm as world
from hvdx.comm import progress
comm = world.start()
rank, size = comm.rank, comm.size
def gather(what="the updates"):
    return comm.all_gather_object(rank, what)
gather()
"""

TRAINING = """
import sys, time
import numpy as np, keras
import hvdx, hvdx.keras
hvdx.init()
class Late(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and hvdx.rank() == 1 and self.params["epochs"] == 2 and not slept:
            load_the_next_file()
def load_the_next_file():
    slept.append(1)
    time.sleep(8)
slept = []
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((32, 3), "float32"), np.ones((32, 1), "float32")
def fit(epochs):
    callbacks = [hvdx.keras.Distribute(sys.argv[1]), Late()]
    model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks)
fit(1)  # compiles, which takes longer than the warning below
print("NOW", file=sys.stderr, flush=True)
fit(2)
print("trained", flush=True)
"""


def stall(ranks, code, *arguments, seconds=2, limit=LIMIT, **env):
    """Run `code` on some ranks; return the output and the exit status."""
    return run(ranks, ["-c", code, *arguments], limit, {"HVDX_STALL_WARNING": str(seconds), **env})


def stalls(done):
    """Return the first lines of the stall warnings."""
    return re.findall(r"hvdx: no progress for .*", done.out)


def test_rank_that_sleeps_is_named_by_one_of_the_others():
    done = stall(3, BARE + "progress.step('step 5 of epoch 1')\ntime.sleep(5 * (rank == 2))\ngather()")
    assert done.code == 0, done
    (headline,) = stalls(done)[:1]
    assert re.search(rf"for [234] s: rank 2 \({HOST}\) has not reached the updates\.", headline), done
    for rank in (0, 1):
        assert re.search(rf"  rank {rank} \({HOST}\): waits in the updates, step 5 of epoch 1, for \d s", done.out), (
            done
        )
    assert re.search(rf"  rank 2 \({HOST}\): step 5 of epoch 1, for \d s; at <string>:\d+ in <module>", done.out), done
    # The warning is repeated after twice the time only, and by one rank only.
    assert len(stalls(done)) <= 2, done


@pytest.mark.long
def test_rank_0_that_sleeps_is_named_too():
    done = stall(3, BARE + "time.sleep(5 * (rank == 0))\ngather()")
    assert done.code == 0, done
    assert f"rank 0 ({HOST}) has not reached the updates" in stalls(done)[0], done
    assert f"rank 0 ({HOST}): in no training step, for" in done.out, done
    assert len(stalls(done)) <= 2, done


def test_rank_that_compiles_has_not_stalled():
    code = """
if rank == 1:
    with progress.compiling("the kernels of Threshold"):
        time.sleep(5)
gather()
"""
    done = stall(2, BARE + code)
    assert done.code == 0, done
    assert not stalls(done), done
    assert f"hvdx: rank 1 ({HOST}) has been compiling the kernels of Threshold for" in done.out, done


# hvdx sees no waits in Horovod's collectives, and compares steps.
@pytest.mark.parametrize(
    ("strategy", "behind"),
    [
        ("all_reduce", "has not reached the all-reduce"),
        ("all_reduce:engine=horovod", "has fallen behind the others"),
    ],
)
def test_training_names_rank_host_step_and_line(strategy, behind):
    done = stall(2, TRAINING, strategy, seconds=3)
    assert done.code == 0, done
    assert done.out.count("trained") == 2, done
    said = done.out[done.out.rindex("NOW") :]
    assert re.search(rf"no progress for \d s: rank 1 \({HOST}\) {behind}", said), done
    line = r"at <string>:\d+ in load_the_next_file < <string>:\d+ in on_train_batch_end"
    assert re.search(rf"  rank 1 \({HOST}\): step 4 of epoch 1, for \d s; {line}", said), done
    assert re.search(rf"  rank 0 \({HOST}\): .*step 5 of epoch 1, for \d s", said), done


def test_rank_that_was_stopped_does_not_answer():
    code = """
if rank == 1:
    subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
gather()
print("on again", flush=True)
"""
    done = stall(2, BARE + code)
    assert done.code == 0, done
    assert done.out.count("on again") == 2, done
    assert f"rank 1 ({HOST}) has not reached the updates" in stalls(done)[0], done
    assert f"rank 1 ({HOST}): does not answer: its process is stopped or gone" in done.out, done


def test_ranks_in_different_collectives_are_distinguished():
    code = "other = comm.channel('the flags')\nif rank == 1: other.exchange([1])\nelse: gather('the metrics')"
    done = stall(3, BARE + code, HVDX_TIMEOUT="7")
    assert done.code not in (None, 0), done
    (headline,) = stalls(done)[:1]
    assert f"rank 1 ({HOST}) has joined another collective in place of the metrics" in headline, done
    assert f"rank 1 ({HOST}): waits in the flags" in done.out, done


@pytest.mark.long
def test_rank_that_has_left_is_named():
    done = stall(2, BARE + "if rank == 0: gather()", HVDX_TIMEOUT="6")
    assert done.code not in (None, 0), done
    assert f"rank 1 ({HOST}) has not reached the updates" in stalls(done)[0], done
    assert f"rank 1 ({HOST}): has left: its program has ended" in done.out, done


def test_error_of_the_time_limit_says_where_the_absent_rank_was():
    code = "progress.step('step 5 of epoch 1')\ntime.sleep(15 * (rank == 1))\ngather()"
    done = stall(2, BARE + code, seconds=60, HVDX_TIMEOUT="2")
    assert done.code not in (None, 0), done
    found = rf"Rank 1 did not join\. Last known: rank 1 \({HOST}\): step 5 of epoch 1, for \d s; at <string>:\d+"
    assert re.search(found, done.out), done
    assert not stalls(done), done


HEALTHY = """
for _ in range(1000):
    gather()
progress.step("step 1 of epoch 1")
time.sleep(4)       # in no training that it knows of: a script may do what it likes between two fits
gather()
time.sleep(rank)    # they leave one after the other
"""


@pytest.mark.long
@pytest.mark.parametrize("seconds", [1, 0])
def test_healthy_job_says_nothing(seconds):
    done = stall(3, BARE + HEALTHY, seconds=seconds)
    assert done.code == 0, done
    assert not re.search(r"hvdx|Traceback|Error", done.out), done


def test_servers_answer_and_are_not_awaited():
    code = """
import time
from hvdx.strategies import ParameterServer, join
comm = join(ParameterServer(servers=1))
time.sleep(3)       # the server idles: no stall
print("NOW", flush=True)
time.sleep(4 * (comm.rank == 1))
comm.all_gather_object(0, "the updates")
"""
    done = stall(3, code)
    assert done.code == 0, done
    idle, late = done.out.split("NOW", 1)
    assert "hvdx" not in idle, done
    assert f"rank 1 ({HOST}) has not reached the updates" in late, done
    assert f"rank 2 ({HOST}): serves the others" in late, done


@pytest.mark.long
def test_rejoined_world_is_watched():
    code = "world.stop()\ncomm = world.start()\ngather()\ntime.sleep(4 * (rank == 1))\ngather()"
    done = stall(2, BARE + code)
    assert done.code == 0, done
    assert f"rank 1 ({HOST}) has not reached the updates" in stalls(done)[0], done


def test_stall_warning_that_is_no_number_is_refused():
    done = stall(2, BARE, seconds="soon")
    assert done.code not in (None, 0), done
    assert "HVDX_STALL_WARNING: expected seconds, or 0 for no warning, got 'soon'" in done.out, done
