"""The main job: equal replicas, and the loss curve of one process."""

# Tests: jobs/data.py

import gzip
import json
import re
import socket

import numpy as np
import pytest

from hvdx.jobs import data, fashion_mnist, hybrid, language_model
from tests.launch import ROOT, run

JOB = str(ROOT / "jobs" / "fashion_mnist.py")

# Largest relative difference between the loss curves of one process and of 4 workers with a quarter of the batch each.
# The measured one is 1.1e-7, where one unit in the last place of float32 is 1.2e-7; see docs/benchmarks.
CURVE_TOLERANCE = 5e-6


def digests(out):
    return re.findall(r"weights of rank \d+: ([0-9a-f]{16})", out)


def train(ranks, *options, timeout=300, **env):
    done = run(ranks, [JOB, "--quiet", "--digest", *options], timeout=timeout, env=env)
    assert done.code == 0, done
    assert len(digests(done.out)) == ranks, done
    return done.out


# The next test covers 1 and 4 ranks.
@pytest.mark.parametrize(("ranks", "network"), [(2, "mlp"), (2, "cnn")])
def test_three_epochs_leave_identical_weights(ranks, network, tmp_path):
    model = tmp_path / "model.keras"
    out = train(ranks, "--model", network, "--epochs", "3", "--save", str(model))
    assert len(set(digests(out))) == 1
    accuracy = float(re.search(r"test accuracy\s+([\d.]+) %", out).group(1))
    assert accuracy > 60
    for row in ("seconds", "samples a second", "bytes sent a step", "time in communication"):
        assert row in out
    alone = (
        "import sys, keras; m = keras.models.load_model(sys.argv[1]); print(m.optimizer.name, 'hvdx' in sys.modules)"
    )
    assert run(1, ["-c", alone, str(model)]).out.strip().endswith("sgd False")


@pytest.mark.long
def test_four_workers_follow_the_curve_of_one_process(tmp_path, record_property):
    curves = {}
    for ranks, batch in ((1, 64), (4, 16)):
        file = tmp_path / f"{ranks}.json"
        out = train(ranks, "--epochs", "3", "--batch", str(batch), "--history", str(file))
        assert len(set(digests(out))) == 1
        curves[ranks] = np.array(json.loads(file.read_text())["loss"])
    difference = float(np.max(np.abs(curves[4] / curves[1] - 1)))
    record_property("largest relative difference", difference)
    print(f"largest relative difference of the loss curve: {difference:.1e}")
    assert difference < CURVE_TOLERANCE


def test_checkpoint_resumes_training(tmp_path):
    options = ("--checkpoint", str(tmp_path / "ckpt"), "--every", "5 steps")
    straight = train(2, "--epochs", "2")
    assert "going on" not in train(2, "--epochs", "1", *options)
    out = train(2, "--epochs", "2", *options)
    assert "resuming after epoch 1" in out
    assert set(digests(out)) == set(digests(straight))
    done = run(1, [JOB, "--quiet", "--epochs", "2", *options], timeout=100)
    assert done.code == 0
    assert "nothing was trained" in done.out


def test_strategy_from_the_environment_trains_and_halves_the_bytes():
    out = train(2, HVDX_STRATEGY="all_reduce:compression=bf16,groups=2")
    assert len(set(digests(out))) == 1
    assert "52.2 kB" in out


NEGATIVE = """
import os, sys
import numpy as np, keras
import {module} as hvd
hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
random = np.random.default_rng(hvd.rank())
model.fit(random.normal(size=(64, 6)), random.normal(size=(64, 3)), epochs=3, verbose=0)
import hashlib
bits = b"".join(w.tobytes() for w in model.get_weights())
print(f"weights of rank {{hvd.rank()}}: {{hashlib.sha256(bits).hexdigest()[:16]}}", flush=True)
"""


@pytest.mark.parametrize(("module", "different"), [("hvdx.keras", 1), ("horovod.tensorflow.keras", 2)])
def test_negative_control_stock_horovod_does_not_average(module, different):
    """One script, two imports: under Keras 3, stock Horovod ends without an error, but with different weights."""
    done = run(2, ["-c", NEGATIVE.format(module=module)])
    assert done.code == 0, done
    assert len(set(digests(done.out))) == different, done


MIRRORED = """
import json, os, keras, numpy as np, tensorflow as tf
from mpi4py import MPI
task = {{"type": "worker", "index": MPI.COMM_WORLD.Get_rank()}}
os.environ["TF_CONFIG"] = json.dumps({{"cluster": {{"worker": {workers}}}, "task": task}})
with tf.distribute.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((8, 4), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
"""


def test_negative_control_tf_distribute_does_not_fit():
    """TensorFlow's own way ends with an error."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        workers = [f"127.0.0.1:{s.getsockname()[1]}" for s in (one, other)]
    done = run(2, ["-c", MIRRORED.format(workers=json.dumps(workers))])
    assert done.code != 0
    assert re.search(r"ValueError: Attempt to convert a value \(PerReplica", done.out), done


def test_fashion_mnist_trains():
    try:
        data.load("fashion-mnist")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    out = train(2, "--data", "fashion-mnist", "--samples", "6400", "--hidden", "64", "--epochs", "3")
    assert len(set(digests(out))) == 1
    assert float(re.search(r"test accuracy\s+([\d.]+) %", out).group(1)) > 65


def test_missing_and_damaged_files_are_errors(tmp_path):
    done = run(2, [JOB, "--data", "fashion-mnist", "--folder", str(tmp_path)])
    assert done.code == 2, done
    assert done.out.count("apt install dataset-fashion-mnist") == 1
    images = np.zeros((2, 28, 28), np.uint8)
    header = b"\x00\x00\x08\x03" + np.array(images.shape, ">u4").tobytes()
    for content, named in ((b"hello", "IDX"), (header + images.tobytes()[:-1], "cut short")):
        for name in [file for pair in data._FILES.values() for file in pair]:
            with gzip.open(tmp_path / name, "wb") as file:
                file.write(content)
        with pytest.raises(ValueError, match=named):
            data.load("fashion-mnist", str(tmp_path))


@pytest.mark.parametrize("job", [fashion_mnist, hybrid, language_model])
def test_seed_comes_from_the_environment(job, monkeypatch):
    monkeypatch.setenv("HVDX_SEED", "7")
    assert job.arguments([]).seed == 7
    assert job.arguments(["--seed", "3"]).seed == 3
    monkeypatch.delenv("HVDX_SEED")
    assert job.arguments([]).seed == 0


def test_help_shows_examples():
    out = run(1, [JOB, "--help"]).out
    assert "mpirun -n 2 python jobs/fashion_mnist.py" in out
    assert "HVDX_STRATEGY" in out
