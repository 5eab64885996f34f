"""A rank that calls `sys.exit` while the others continue ends the job, with its number and argument in the message."""

# Tests: hvdx/comm/failure.py

import time

import pytest

from tests.launch import run

START, END = 60, 15

CODE = """
import sys, time
import numpy as np, keras
import hvdx, hvdx.keras
hvdx.init()
rank = hvdx.rank()
def leave():
    print("READY", time.time(), flush=True)
    sys.exit({argument!r})
class Leave(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and rank == 1:
            leave()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
if {before} and rank == 1:
    leave()
x, y = np.ones((64, 3), "float32"), np.ones((64, 1), "float32")
model.fit(x, y, batch_size=4, epochs=1000, verbose=0, callbacks=[hvdx.keras.Distribute({strategy!r}), Leave()])
"""
SERVERS = "parameter_server:servers=colocated"
CASES = [
    ("all_reduce", 3, False, 3),
    ("all_reduce:engine=horovod", 0, False, 1),
    ("all_reduce", "no data", True, 1),
    ("threshold:tau=0.1", 3, False, 3),
    ("threshold:tau=0.1", 0, False, 1),
    (SERVERS, 3, False, 3),
    (SERVERS, 0, False, 1),
    ("parameter_averaging:period=4", 3, True, 3),
]


@pytest.mark.parametrize(("strategy", "argument", "before", "code"), CASES)
def test_rank_that_ends_is_named_and_ends_the_job(strategy, argument, before, code):
    program = CODE.format(strategy=strategy, argument=argument, before=before)
    done = run(4, ["-c", program], timeout=START + END)
    ended = time.time()
    assert done.code == code, done
    assert "rank 1 of 4 on " in done.out
    assert f"ended: sys.exit({argument!r}), and the others cannot continue without it" in done.out, done
    assert "failed; ending the job" not in done.out, "the others are not to blame"
    (began,) = done.ready
    assert ended - began < END, done


def test_ranks_that_all_exit_end_with_their_status():
    done = run(2, ["-c", "import sys, hvdx; hvdx.init(); sys.exit(5)"], timeout=START)
    assert done.code == 5, done
    assert "cannot continue" not in done.out


def test_sys_exit_that_is_caught_ends_nothing():
    """The other rank still works when the rank that caught its exit has ended."""
    code = """
import sys, time, hvdx
hvdx.init()
try:
    sys.exit(4)
except SystemExit:
    pass
if hvdx.rank() == 1:
    time.sleep(8)
print("WENT ON", flush=True)
"""
    done = run(2, ["-c", code], timeout=START)
    assert done.code == 0, done
    assert done.out.count("WENT ON") == 2
