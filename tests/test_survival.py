"""`hvdx run --survive`: workers die in trainings, and the others end them with equal weights, also with spares."""

# Tests: hvdx/comm/surviving.py, hvdx/comm/spares.py, hvdx/keras/fit/distribute.py, hvdx/keras/fit/replacing.py
# Tests: hvdx/keras/checkpoint/writer.py, hvdx/keras/checkpoint/newcomers.py, hvdx/strategies/serving/exchange.py
# Tests: hvdx/comm/mpi_mailbox.py, hvdx/strategies/serving/step_client.py

import re
import sys

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
train, validation = hvdx.shard((x, y), 4, validation_split=0.25)

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
mine = [float(target) for _, targets in train for target in targets]
together = [target for some in start().all_gather_object(mine, "a test") for target in some]
alone, _ = hvdx.shard((x, y), 4, validation_split=0.25, rank=0, size=1, initial_epoch=6)
first = [float(target) for _, targets in alone for target in targets][: len(together)]
print("SAMPLES", len(together), sorted(together) == sorted(first), "RANKS", list(start().world_ranks), flush=True)
"""


def test_trainings_end_with_equal_weights_after_deaths(tmp_path):
    program = [*warm.command(environment()), "-c", SCRIPT, str(tmp_path)]
    done = run_command(
        [sys.executable, "-m", "hvdx", "run", "-n", "4", "--all", "--survive", *program],
        LIMIT,
        {"HVDX_RECORD": str(tmp_path / "record")},
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
    # The two that are left take the first half of the samples of a pass: 12 steps of 4 each, none twice.
    assert "SAMPLES 96 True RANKS [1, 3]" in done.out, done


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
train, comm = hvdx.shard((x, y), 4), start()

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


# Three workers, of which the first two serve; the first also hands out the steps. One is killed in the first epoch, the
# other in the second.
SERVERS = """
import hashlib, os, signal
import numpy as np, keras
import hvdx, hvdx.keras
from hvdx.comm import start
hvdx.init()
keras.utils.set_random_seed(0)
x, y = np.random.default_rng(7).normal(size=(240, 6)).astype("float32"), np.arange(240, dtype="float32") / 240
model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")
train, comm = hvdx.shard((x, y), 4), start()
me = comm.rank

class Deaths(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch, self.steps = epoch, 0
    def on_train_batch_begin(self, batch, logs=None):
        if (me, self.epoch, batch) in ((0, 0, 3), (1, 1, 3)):
            os.kill(os.getpid(), signal.SIGKILL)
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
    def on_epoch_end(self, epoch, logs=None):
        weights = hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in model.weights)).hexdigest()
        assert len(set(comm.all_gather_object(weights, "a test"))) == 1
        print("EPOCH", epoch, me, list(comm.world_ranks), self.steps, logs["loss"], flush=True)

model.fit(train, epochs=3, verbose=0, callbacks=[
    hvdx.keras.Distribute("parameter_server:servers=colocated:2,staleness=scale+bound"), Deaths()])
"""


def test_servers_that_die_are_replaced():
    program = [*warm.command(environment()), "-c", SERVERS]
    done = run_command([sys.executable, "-m", "hvdx", "run", "-n", "3", "--all", "--survive", *program], LIMIT)
    assert done.code == 0, str(done)
    epochs = [re.findall(rf"EPOCH {epoch} (\d) \[(.*)\] (\d+) ([\d.]+)", done.out) for epoch in range(3)]
    assert [sorted((int(me), left) for me, left, *_ in rows) for rows in epochs] == [
        [(1, "1, 2"), (2, "1, 2")],
        [(2, "2")],
        [(2, "2")],
    ], done
    # The others take the steps of the dead: 60 in each epoch, of which those took three or four. Some of these are
    # handed out again, by the next server.
    steps = [sum(int(taken) for *_, taken, _ in rows) for rows in epochs]
    assert 56 <= steps[0] <= 60, done
    assert 56 <= steps[1] <= 60, done
    assert steps[2] == 60, done
    losses = [float(rows[0][3]) for rows in epochs]
    assert losses[0] > losses[1] > losses[2], done
    assert set(re.findall(r"the server at rank (\d) has died\. Its \d+% of the weights", done.out)) == {"0", "1"}, done
