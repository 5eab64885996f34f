"""`hvdx run --survive`: workers die in trainings, and the others end them with equal weights, also with spares."""

# Tests: hvdx/comm/surviving.py, hvdx/comm/spares.py, hvdx/keras/distribute.py, hvdx/keras/survival.py
# Tests: hvdx/keras/checkpoint/writer.py, hvdx/keras/checkpoint/restoring.py, hvdx/comm/mpi_mailbox.py
# Tests: hvdx/strategies/serving/client.py, hvdx/strategies/serving/worker_sessions.py

import re
import sys

import pytest

from hvdx.report.records import read
from tests import warm
from tests.launch import environment, run_command

LIMIT = 120

# Four workers. Rank 0 is killed in a step of the first fit, while a checkpoint is written; rank 2 raises an
# error at the end of an epoch of the second, whose exchanges have periods.
SCRIPT = """
import hashlib, os, signal, sys
import numpy as np, keras
import hvdx, hvdx.keras
from hvdx.comm import start
hvdx.init()
keras.utils.set_random_seed(0)
me, folder = hvdx.rank(), sys.argv[1]
x, y = np.random.default_rng(7).normal(size=(256, 6)).astype("float32"), np.arange(256, dtype="float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization(),
                          keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse")
train, validation = hvdx.shard((x, y), global_batch_size=16, validation_split=0.25)

class Deaths(keras.callbacks.Callback):
    fit = 0
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_begin(self, batch, logs=None):
        if (me, self.fit, self.epoch, batch) == (0, 1, 1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
    def on_epoch_end(self, epoch, logs=None):
        if (me, self.fit, epoch) == (2, 2, 1):
            raise ValueError("the fault of rank 2")

def fit(strategy, *more):
    Deaths.fit += 1
    model.fit(train, epochs=3, verbose=2, validation_data=validation,
              callbacks=[hvdx.keras.Distribute(strategy), Deaths(), *more])
    weights = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.weights)).hexdigest()
    assert len(set(start().all_gather_object(weights, "a test"))) == 1
    print("FIT", Deaths.fit, "ENDED", flush=True)

fit("all_reduce", keras.callbacks.CSVLogger(folder + "/log.csv"),
    keras.callbacks.ModelCheckpoint(folder + "/{epoch}.keras"), hvdx.keras.Checkpoint(folder + "/checkpoints"))
fit("threshold:period=3")

def print_samples(share):
    mine = [float(target) for _, targets in share for target in targets]
    together = [target for some in start().all_gather_object(mine, "a test") for target in some]
    print("SAMPLES", len(together), len(set(together)), "RANKS", list(start().world_ranks), flush=True)

print_samples(train)
# Shares that are made now, of a batch that the two workers who are left do not divide.
print_samples(hvdx.shard((x, y), global_batch_size=15))
print_samples(hvdx.shard((x, y), global_batch_size=15, drop_remainder=False))
"""


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_trainings_end_with_equal_weights_after_deaths(backend, tmp_path):
    pytest.importorskip(backend)
    settings = {"KERAS_BACKEND": backend, "HVDX_RECORD": str(tmp_path / "record")}
    program = [*warm.command(environment(settings)), "-c", SCRIPT, str(tmp_path)]
    done = run_command(
        [sys.executable, "-m", "hvdx", "run", "-n", "4", "--all", "--survive", *program], LIMIT, settings
    )
    assert done.code == 0, str(done)
    # Rank 1 took over the progress bar and the files of rank 0.
    assert "FIT 1 ENDED" in done.out, done
    assert "FIT 2 ENDED" in done.out, done
    assert done.out.count("Epoch 3/3") == 2, done
    assert [line.partition(",")[0] for line in (tmp_path / "log.csv").read_text().split()] == ["epoch", "0", "1", "2"]
    assert {path.name for path in tmp_path.glob("*.keras")} == {"1.keras", "2.keras", "3.keras"}
    assert "epoch-0003" in {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert not list((tmp_path / "checkpoints").glob("*saving*"))
    assert "ValueError: the fault of rank 2" in done.out, done
    lines = [line for line in done.out.splitlines() if "ranks train on" in line]
    assert [re.findall(r"rank (\d) on \S+ has died; (\d) of 4", line) for line in lines] == [[("0", "3")], [("2", "2")]]
    runs = read(tmp_path / "record")
    assert [(run.complete, run.dead, len(run.interruptions)) for run in runs] == [(True, {0}, 1), (True, {1}, 1)]
    assert min(run.goodput for run in runs) > 0.9
    assert re.findall("of the 16 rows of a step, the workers now take (.*), so", done.out) == ["6, 5, 5"], done
    # The two that are left take all samples of a pass, in 12 steps of 16.
    taken = re.findall(r"SAMPLES (.*) RANKS \[1, 3\]", done.out)
    assert sorted(taken) == ["192 192"] * 2 + ["255 255"] * 2 + ["256 256"] * 2, done


# Four workers. Rank 3 dies in `predict`, rank 2 in `evaluate`, and rank 0 in the last callback of a fit, which is a
# `CSVLogger` or one of the user's own.
EDGES = """
import os, signal, sys
import numpy as np, keras
import hvdx, hvdx.keras
hvdx.init()
keras.utils.set_random_seed(0)
me = hvdx.rank()
x, y = np.random.default_rng(7).normal(size=(203, 6)).astype("float32"), np.arange(203, dtype="float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
expected, values = model.predict(x, verbose=0), model.evaluate(x, y, verbose=0, return_dict=True)

if me == 3:
    model.predict = die
np.testing.assert_allclose(hvdx.keras.predict(model, x), expected, rtol=1e-5)
if me == 2:
    model.evaluate = die
found = hvdx.keras.evaluate(model, (x, y))
assert found.keys() == values.keys()
np.testing.assert_allclose([found[name] for name in values], list(values.values()), rtol=1e-5)

class Log(keras.callbacks.CSVLogger):
    def on_train_end(self, logs=None):
        if me == 0:
            die()
        super().on_train_end(logs)
        print("CLOSED by", me, flush=True)

class Own(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        if me == 0:
            die()

last = Own() if int(sys.argv[2]) else Log(sys.argv[1])
model.fit(hvdx.shard((x, y), 8), epochs=2, verbose=0, callbacks=[hvdx.keras.Distribute(), last])
print("ENDED", me, hvdx.rank(), hvdx.size(), flush=True)
"""


@pytest.mark.parametrize("own", [0, 1])
def test_deaths_outside_of_the_steps(own, tmp_path):
    program = [*warm.command(environment()), "-c", EDGES, str(tmp_path / "log.csv"), str(own)]
    done = run_command([sys.executable, "-m", "hvdx", "run", "-n", "4", "--all", "--survive", *program], LIMIT)
    assert "ENDED 1 0 1" in done.out, done
    assert ("CLOSED by 1" in done.out) is not bool(own), done
    if not own:
        rows = (tmp_path / "log.csv").read_text().split()
        assert [line.partition(",")[0] for line in rows] == ["epoch", "0", "1"]
    died = re.findall(r"rank (\d) on \S+ has died; (\d) of 4", done.out)
    assert died == [("3", "3"), ("2", "2"), ("0", "1")], done
    # A callback that hvdx does not know may have written something as rank 0.
    assert done.code == own, done
    assert ("rank 0 is dead, and with it may be" in done.out) is bool(own), done


# Two workers and two spares. One worker is killed in the first epoch, while `auto` measures steps, and the other in the
# third, after which the spares train alone. The learning rate depends on the losses of all epochs.
SPARES = """
import hashlib, os, signal, sys
import numpy as np, keras
import hvdx, hvdx.keras
from hvdx.comm import start
hvdx.init()
keras.utils.set_random_seed(0)
x, y = np.random.default_rng(7).normal(size=(64, 6)).astype("float32"), np.arange(64, dtype="float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.1), keras.layers.BatchNormalization(),
                          keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse")
train, comm = hvdx.shard((x, y), global_batch_size=8), start()

class Deaths(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("EPOCH", epoch, list(comm.world_ranks), flush=True)
        self.epoch = epoch
    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, comm.world_ranks[comm.rank], batch) in ((0, 0, 1), (2, 1, 1)):
            os.kill(os.getpid(), signal.SIGKILL)

rate = keras.callbacks.ReduceLROnPlateau("loss", mode="max", patience=2)
history = model.fit(train, epochs=5, verbose=0, callbacks=[
    hvdx.keras.Distribute("auto"), Deaths(), rate, hvdx.keras.Checkpoint(sys.argv[1])]).history["loss"]
mine = [float(target) for _, targets in train for target in targets]
together = [target for some in comm.all_gather_object(mine, "a test") for target in some]
history += model.fit(train, epochs=1, verbose=0, callbacks=[hvdx.keras.Distribute("all_reduce")]).history["loss"]
state = b"".join(np.asarray(w).tobytes() for w in (*model.weights, *model.optimizer.variables))
assert len(set(comm.all_gather_object(hashlib.sha256(state).hexdigest(), "a test"))) == 1
assert len(set(comm.all_gather_object(tuple(map(float, history)), "a test"))) == 1
print("ENDED", len(history), len(together), len(set(together)), list(comm.world_ranks), flush=True)
"""


def test_spares_take_the_places_of_dead_workers(tmp_path):
    program = [*warm.command(environment()), "-c", SPARES, str(tmp_path)]
    options = ["-n", "2", "--all", "--survive", "--spares", "2"]
    done = run_command([sys.executable, "-m", "hvdx", "run", *options, *program], LIMIT)
    assert done.code == 0, str(done)
    # Each epoch begins with two workers; two of them print each line.
    ranks = {epoch: re.findall(rf"EPOCH {epoch} (\[.*\])", done.out) for epoch in range(5)}
    expected = ["[0, 1]", "[1, 2]", "[1, 2]", "[2, 3]", "[2, 3]"]
    assert ranks == {epoch: [both] * 2 for epoch, both in enumerate(expected)}, done
    # The spares have the history of the dead (and the epoch of a second fit), and share all samples.
    assert done.out.count("ENDED 6 64 64 [2, 3]") == 2, done
    assert {path.name for path in tmp_path.iterdir()} == {"epoch-0004", "epoch-0005"}


# One process is killed in each epoch, a worker or a server, or hangs. All write their process numbers.
SERVERS = """
import hashlib, os, signal, sys, time
from pathlib import Path
import numpy as np, keras
import hvdx, hvdx.keras
from hvdx.comm import start
folder, way, *victims = sys.argv[1:]
(Path(folder) / os.environ["OMPI_COMM_WORLD_RANK"]).write_text(str(os.getpid()))
hvdx.init()
keras.utils.set_random_seed(0)
x, y = np.random.default_rng(7).normal(size=(240, 6)).astype("float32"), np.arange(240, dtype="float32") / 240
model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
train, comm = hvdx.shard((x, y), 4), start()
me = comm.rank

class Deaths(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.victim, self.steps, self.epoch = int(dict(enumerate(victims)).get(epoch, -1)), 0, epoch
    def on_train_batch_begin(self, batch, logs=None):
        dead = Path(folder) / f"dead-{self.victim}"
        # Worker 1 kills servers. The others leave the killer steps to take.
        if self.victim >= 0 and me == (self.victim if self.victim < comm.workers else 1):
            if batch == 3:
                dead.touch()
                if way == "sleep" and self.epoch:
                    time.sleep(1000)
                number = signal.SIGSTOP if way == "stop" and self.epoch else signal.SIGKILL
                os.kill(int((Path(folder) / str(self.victim)).read_text()), number)
        elif self.victim >= 0 and batch == 10:
            while not dead.exists():
                time.sleep(0.01)
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
    def on_epoch_end(self, epoch, logs=None):
        weights = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.weights)).hexdigest()
        assert len(set(comm.all_gather_object(weights, "a test"))) == 1
        print("EPOCH", epoch, me, list(comm.world_ranks), self.steps, logs["loss"], flush=True)

model.fit(train, epochs=3, verbose=0, callbacks=[hvdx.keras.Distribute(), Deaths()])
"""


@pytest.mark.parametrize(
    ("strategy", "processes", "way", "victims", "left", "steps"),
    [
        # The first two of three workers serve; the first also hands out the steps. The others take the steps of the
        # dead, of which those took three or four. The next server knows what the first to ask it knows, and hands out
        # again what another took since: at most the ten steps after which the others wait for a death.
        (
            "parameter_server:servers=colocated:2,staleness=scale+bound",
            3,
            "sleep",
            "01",
            ["12", "2", "2"],
            [(56, 67), (56, 60), (60, 60)],
        ),
        # Two workers and two servers. When both servers have died, the workers serve.
        ("parameter_server:servers=2", 4, "kill", "230", ["01", "01", "1"], [(60, 70), (60, 70), (56, 60)]),
        # Rank 0 orders the messages, and hands out the steps.
        ("threshold:max_staleness=inf", 3, "stop", "01", ["12", "2", "2"], [(56, 67), (56, 60), (60, 60)]),
    ],
)
def test_trainings_without_steps_in_common_go_on(strategy, processes, way, victims, left, steps, tmp_path):
    program = [*warm.command(environment()), "-c", SERVERS, str(tmp_path), way, *victims]
    done = run_command(
        [sys.executable, "-m", "hvdx", "run", "-n", str(processes), "--all", "--survive", *program],
        LIMIT,
        {"HVDX_STRATEGY": strategy, "HVDX_TIMEOUT": "5"},
    )
    assert done.code == 0, str(done)
    found = {"kill": "", "sleep": "has made no progress for 5 s", "stop": "has been stopped for 5 s"}[way]
    assert found in done.out, done
    epochs = [re.findall(rf"EPOCH {epoch} (\d) \[(.*)\] (\d+) ([\d.]+)", done.out) for epoch in range(3)]
    assert [sorted((me, ranks) for me, ranks, *_ in rows) for rows in epochs] == [
        [(me, ", ".join(ranks)) for me in ranks] for ranks in left
    ], done
    for rows, (least, most) in zip(epochs, steps, strict=True):
        assert least <= sum(int(taken) for *_, taken, _ in rows) <= most, done
    losses = [float(rows[0][3]) for rows in epochs]
    assert losses[0] > losses[1] > losses[2], done
    dead = re.findall(r"the server at rank (\d) has died\. Its \d+% of the weights", done.out)
    assert set(dead) == set(victims if "servers" in strategy else ""), done
