"""After a rank is killed while checkpoints are written, the next job resumes bit for bit.

tests/keras/checkpoint/test_faults.py tries every operation of a save; these tests have real processes and a launcher.
"""

import json
import os
import signal
import time

import pytest

from hvdx.cli.common.mpi_tools import mpirun_command
from hvdx.cli.common.processes import process_group
from hvdx.keras.checkpoint.files import Arrays
from hvdx.keras.checkpoint.folder import SHARED, of_rank
from tests import warm
from tests.launch import ROOT, environment, run

RANKS, KILLS = 2, 4
# More epochs than a job trains before it is killed.
EPOCHS = 70
LIMIT = 120

# Saves after every step, so a write is in progress almost all the time.
SCRIPT = """
import hashlib, os, sys
import numpy as np, keras
import hvdx, hvdx.keras
hvdx.init()
folder, epochs = sys.argv[1], int(sys.argv[2])
keras.utils.set_random_seed(0)
random = np.random.default_rng(7)
x, y = random.normal(size=(80, 64)).astype("f4"), random.normal(size=(80, 8)).astype("f4")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(400), keras.layers.Dense(8)])
model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "mse")
class Begun(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if not hasattr(self, "done"):
            self.done = print(f"PID {hvdx.rank()} {os.getpid()}", flush=True)
callbacks = [hvdx.keras.Distribute("parameter_averaging:period=7,average_optimizer=false"), Begun()]
if folder != "none":
    callbacks.append(hvdx.keras.Checkpoint(folder, every="1 step", keep=3))
model.fit(hvdx.shard((x, y), 4), epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)
bits = b"".join(w.tobytes() for w in model.get_weights())
print(f"WEIGHTS {hvdx.rank()}", hashlib.sha256(bits).hexdigest(), flush=True)
"""


def weights(out):
    """Return the digest of the weights, which is the same on all ranks."""
    found = [line.split()[2] for line in out.splitlines() if line.startswith("WEIGHTS")]
    assert len(found) == RANKS, out
    assert len(set(found)) == 1, out
    return found[0]


def read_whole(path):
    """Read all files of a checkpoint and verify their checksums."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name in [SHARED, *map(of_rank, range(manifest["ranks"]))]:
        for array in Arrays.of(path / name).values():
            assert array is not None
    return manifest["epoch"], manifest["step"]


def names(folder):
    """Return the names of the checkpoints in a folder."""
    return {path.name for path in folder.glob("epoch-*")}


def kill_one(folder, rank):
    """Train, kill a rank while the second checkpoint is written, and return the output."""
    command = [*mpirun_command(RANKS), *warm.command(environment()), "-c", SCRIPT, str(folder), str(EPOCHS)]
    said, pids, end, before = [], {}, time.monotonic() + LIMIT, names(folder)
    with process_group(command, environment(), ROOT, merged=True) as process:
        assert process.stdout is not None
        while len(pids) < RANKS:
            assert time.monotonic() < end, "".join(said)
            line = process.stdout.readline()
            assert line, "".join(said)
            said.append(line)
            if line.startswith("PID"):
                pids[int(line.split()[1])] = int(line.split()[2])
        while names(folder) == before or not list(folder.glob(".hvdx-saving-*")):
            assert time.monotonic() < end, "it saves nothing"
            time.sleep(0.001)
        os.kill(pids[rank], signal.SIGKILL)
        began = time.monotonic()
        said.append(process.communicate(timeout=LIMIT)[0])
        assert time.monotonic() - began < 10
    assert process.returncode != 0, "".join(said)
    return "".join(said)


@pytest.mark.long
def test_each_rank_in_turn_is_killed_and_every_resume_works(tmp_path):
    folder, newest = tmp_path / "ckpt", (0, 0)
    for kill in range(KILLS):
        said = kill_one(folder, kill % RANKS)
        assert ("resuming after" in said) == (kill > 0)
        assert "damaged" not in said
        # A checkpoint with its final name is complete at any moment.
        there = sorted(read_whole(path) for path in folder.glob("epoch-*"))
        assert there[-1] > newest, "a resume began before the newest checkpoint"
        newest = there[-1]
    done = run(RANKS, ["-c", SCRIPT, str(folder), str(newest[0] + 1)], LIMIT)
    assert done.code == 0, done
    straight = run(RANKS, ["-c", SCRIPT, "none", str(newest[0] + 1)], LIMIT)
    assert weights(done.out) == weights(straight.out)
    assert not list(folder.glob(".hvdx-*"))
