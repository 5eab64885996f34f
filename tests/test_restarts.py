"""`hvdx run --max-restarts --checkpoint`: a rank is killed, and the job ends with the weights of an undisturbed one."""

# Tests: hvdx/keras/saving.py, hvdx/comm/supervision.py

import re
import sys

import pytest

from tests import warm
from tests.launch import environment, run, run_command

LIMIT = 240

# Without a Checkpoint of its own. Rank 1 kills itself in the first attempt, after a checkpoint in the second epoch.
SCRIPT = """
import hashlib, os, signal, sys, time
import numpy as np, keras
import hvdx, hvdx.keras
hvdx.init()
keras.utils.set_random_seed(0)
random = np.random.default_rng(7)
x, y = random.normal(size=(96, 6)).astype("float32"), random.normal(size=(96, 1)).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse")
folder, attempt = os.environ.get("HVDX_CHECKPOINT", ""), os.environ.get("HVDX_ATTEMPT", "")
class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        if (hvdx.rank(), attempt[-2:], self.epoch, batch) == (1, ":1", 1, 9):
            while not [name for name in os.listdir(folder) if name.startswith("epoch-0001-step")]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
data = hvdx.shard((x, y), 4)
callbacks = [hvdx.keras.Distribute("parameter_averaging:period=5,average_optimizer=false"), Kill()]
model.fit(data, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=[hvdx.keras.Distribute("all_reduce:engine=mpi")])
print("WEIGHTS", hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.weights)).hexdigest(), flush=True)
"""


def weights(done):
    assert done.code == 0, str(done)
    found = set(re.findall(r"WEIGHTS (\w+)", done.out))
    assert len(found) == 1, done
    return found


@pytest.mark.long
def test_job_with_a_killed_rank_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    program = [*warm.command(environment()), "-c", SCRIPT]
    folder = tmp_path / "ckpt"
    options = ["-n", "2", "--max-restarts", "2", "--checkpoint", str(folder), "--every", "4 steps"]
    done = run_command([sys.executable, "-m", "hvdx", "run", *options, *program], LIMIT)
    assert weights(done) == weights(run(2, ["-c", SCRIPT], LIMIT)), done
    (line,) = [line for line in done.out.splitlines() if "hvdx: attempt 1 of 3 failed" in line]
    assert re.search(r"rank 1 on \S+: killed by SIGKILL. Lost: \d s of training, all after step \d+ of epoch 2.", line)
    assert done.out.count("resuming after step") == 1
    assert "attempt 2 has finished the job" in done.out
    assert "no checkpoint" not in done.out
    # The second fit has a folder of its own.
    assert {"epoch-0003", "fit-2"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.rglob(".hvdx-*"))
    assert "\x1e" not in done.out
