"""A training resumes in new processes: the same number, fewer or more; after its end, or after a rank was killed."""

import json
import os
import re
import subprocess
import time

import numpy as np
import pytest

from hvdx.keras.checkpoint.files import Arrays
from tests.launch import ROOT, run

# Trains in `FOLDER/ckpt` and writes digests of each rank's state.
SCRIPT = """
import hashlib, json, os, signal, sys, time
import numpy as np, keras
import hvdx, hvdx.keras
from hvdx.keras.adapters.optimizer import adapter_of
hvdx.init()
rank, size = hvdx.rank(), hvdx.size()
folder, epochs, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
keras.utils.set_random_seed(seed)
random = np.random.default_rng(7)
x = random.normal(size=(96, 6)).astype("float32")
y = (x[:, 0] + 2 * x[:, 1] > 0).astype("int64")
layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
model = keras.Sequential([keras.Input((6,)), *layers])
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

class Look(keras.callbacks.Callback):
    first = None

    def residuals(self):
        exchange = getattr(adapter_of(self.model.optimizer), "exchange", None)
        return [] if exchange is None else [float(a) for u in exchange.residuals for a in u.ravel()]

    def on_epoch_begin(self, epoch, logs=None):
        if self.first is None:
            self.first, self.before = epoch, self.residuals()

    def on_epoch_end(self, epoch, logs=None):
        self.after = self.residuals()

    def on_train_batch_end(self, batch, logs=None):
        if os.environ.get("KILL") == str(rank) and os.path.exists(f"{folder}/ckpt/epoch-0002"):
            print("READY", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

look = Look()
distribute = hvdx.keras.Distribute(os.environ.get("STRATEGY", "threshold:target_density=0.05"))
callbacks = [distribute, hvdx.keras.Checkpoint(f"{folder}/ckpt"), look]
model.fit(hvdx.shard((x, y), 4), epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)
digest = lambda variables: hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in variables)).hexdigest()
says = {
    "first": look.first, "before": look.before, "after": look.after, "weights": digest(model.weights),
    "optimizer": digest(model.optimizer.variables), "generators": digest([v for v in model.variables if v.ndim == 1]),
}
with open(f"{folder}/{os.environ['NAME']}-{rank}.json", "w") as file:
    json.dump(says, file)
"""

LIMIT = 300
JOB = str(ROOT / "jobs" / "fashion_mnist.py")


def train(folder, name, ranks, epochs, seed=0, **env):
    """Train in new processes; return the final report of each rank."""
    done = run(ranks, ["-c", SCRIPT, str(folder), str(epochs), str(seed)], LIMIT, {"NAME": name, **env})
    assert done.code == 0, done
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def total(says, when):
    return np.sum([s[when] for s in says], axis=0)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Train four epochs on two ranks without an interruption."""
    return train(tmp_path_factory.mktemp("straight"), "whole", 2, 4)


def assert_went_on(resumed, straight):
    """Assert that epochs 2 to 4 agree bit for bit."""
    for mine, expected in zip(resumed, straight, strict=True):
        assert (mine["first"], expected["first"]) == (2, 0)
        for name in ("weights", "optimizer", "generators", "after"):
            assert mine[name] == expected[name], name
    assert resumed[0]["weights"] == resumed[1]["weights"]


def test_new_processes_resume_bit_for_bit(tmp_path, straight):
    train(tmp_path, "one", 2, 2)
    assert_went_on(train(tmp_path, "two", 2, 4, seed=5), straight)


@pytest.mark.long
def test_momenta_under_weight_averaging_resume_bit_for_bit(tmp_path):
    strategy = {"STRATEGY": "parameter_averaging:period=5,average_optimizer=false"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    straight = train(whole, "whole", 2, 2, **strategy)
    assert straight[0]["optimizer"] != straight[1]["optimizer"]
    train(parts, "one", 2, 1, **strategy)
    for mine, expected in zip(train(parts, "two", 2, 2, seed=5, **strategy), straight, strict=True):
        assert mine["first"] == 1
        for name in ("weights", "optimizer", "generators"):
            assert mine[name] == expected[name], name


@pytest.mark.long
def test_fewer_and_more_processes_keep_the_residual(tmp_path):
    four = train(tmp_path, "four", 4, 1)
    two = train(tmp_path, "two", 2, 2, seed=1)
    three = train(tmp_path, "three", 3, 3, seed=2)
    assert [says[0]["first"] for says in (four, two, three)] == [0, 1, 2]
    for earlier, later in ((four, two), (two, three)):
        assert np.abs(total(earlier, "after")).max() > 0
        np.testing.assert_allclose(total(later, "before"), total(earlier, "after"), rtol=1e-5, atol=1e-8)
        assert len({says["weights"] for says in later}) == 1


def test_killed_rank_ends_the_job_and_the_next_job_resumes_from_its_last_checkpoint(tmp_path, straight):
    done = run(2, ["-c", SCRIPT, str(tmp_path), "4", "0"], LIMIT, {"NAME": "killed", "KILL": "1"})
    ended = time.time()
    assert done.code not in (None, 0), done
    began = done.ready
    assert ended - began[0] < 10, done
    # The launcher's message, which it breaks into lines.
    said = " ".join(done.out.split())
    assert re.search(r"rank 1 .*signal 9|rank 1 .*Killed|@1,1\].*signal 9", said), done
    assert_went_on(train(tmp_path, "again", 2, 4, seed=3), straight)
    assert not list((tmp_path / "ckpt").glob(".hvdx-*"))


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 600 kB, which holds two checkpoints of the main job and not a third."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, timeout=20, check=False, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield path
    subprocess.run(["umount", str(path)], timeout=20, check=True)


def test_full_or_read_only_disk_ends_all_ranks_and_loses_no_checkpoint(small_disk):
    command = [JOB, "--quiet", "--epochs", "9", "--checkpoint", str(small_disk / "ckpt"), "--every", "5 steps"]
    done = run(2, command, LIMIT)
    assert done.code not in (None, 0), done
    assert re.search(r"ReplicaError: .*rank 0: OSError: \[Errno 28\] No space left.*are unchanged", done.out), done
    # A failed job leaves the file with the owner of the directory; its lock is released.
    there = sorted(path.name for path in (small_disk / "ckpt").iterdir() if path.is_dir())
    assert there == ["epoch-0000-step-00000005", "epoch-0000-step-00000010"]
    for path in (small_disk / "ckpt").glob("*/*.safetensors"):
        assert len(list(Arrays.of(path).values()))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], timeout=20, check=True)
    done = run(2, command, LIMIT)
    assert done.code not in (None, 0), done
    assert re.search(r"ReplicaError: .*rank 0: OSError: \[Errno 30\] Read-only.*can be written to", done.out), done
