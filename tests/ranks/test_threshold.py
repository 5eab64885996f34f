"""Decentralised training with compressed updates, at any number of ranks."""

# Tests: hvdx/keras/adapters/host.py, hvdx/keras/adapters/weights.py

import json
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.comm.mpi import MpiChannel
from hvdx.errors import ConfigError
from hvdx.keras.adapters import host
from hvdx.keras.adapters.optimizer import adapter_of
from hvdx.keras.fit import replicas
from hvdx.strategies.telemetry import Telemetry
from hvdx.strategies.threshold import hosts
from hvdx.strategies.threshold.hosts import MessageSums, SharedSums, open_sums

STRATEGIES = [
    "threshold:target_density=0.05",
    "threshold:tau=0.001",
    "threshold",
    "threshold:target_density=0.05,placement=gradient",
    "threshold:target_density=0.05,exchange=sharded",
    "threshold:target_density=0.05,index_coding=none",
    "threshold:target_density=0.05,period=3",
    "threshold:target_density=0.02,warmup=density:6,exchange=sharded",
    "auto",
]


def assert_identical(variables):
    """Assert the same bits on all ranks."""
    assert replicas.differing(list(variables), world.start()) == {}


# Steps of an epoch, with 8 samples on each rank.
STEPS = 4


def data(samples=8 * STEPS):
    random = np.random.default_rng(hvdx.rank())
    x = random.normal(size=(samples, 6)).astype(np.float32)
    return x, (x @ np.arange(6) > 0).astype(np.float32)[:, None]


def network(optimizer, **layer):
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, "relu", **layer), keras.layers.BatchNormalization(),
         keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    )  # fmt: skip
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def fit(model, strategy, epochs=2, batch=8, callbacks=(), examples=None, **options):
    callback = hvd.Distribute(strategy, **options)
    x, y = examples or data()
    history = model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0, callbacks=[callback, *callbacks])
    return callback, history.history


@pytest.mark.graph
@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [*((s, "sgd") for s in STRATEGIES), *((s, "adam") for s in (STRATEGIES[0], STRATEGIES[7]))],
)
def test_replicas_are_identical_and_learn(strategy, optimizer):
    made = {"sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9), "adam": lambda: keras.optimizers.Adam(0.01)}
    model = network(made[optimizer]())
    callback, history = fit(model, strategy, epochs=2, check_every=3)
    assert_identical(model.weights)
    assert history["loss"][-1] < history["loss"][0]
    if hvdx.size() > 1:
        assert callback.counters.exchanges > 0
        assert callback.counters.bytes_sent > 0
    assert not [a for a in vars(model.optimizer) if a in ("_clip_gradients", "_backend_update_step", "assign")]


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.01),
        lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
        lambda: keras.optimizers.RMSprop(0.01),
        lambda: keras.optimizers.Adagrad(0.01),
        lambda: keras.optimizers.Nadam(0.01),
        lambda: keras.optimizers.Adafactor(0.01),
        lambda: keras.optimizers.Lamb(0.01),
        lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
        lambda: keras.optimizers.SGD(0.01, momentum=0.9, clipnorm=0.1),
        lambda: keras.optimizers.SGD(0.01, momentum=0.9, gradient_accumulation_steps=3),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, 20), momentum=0.9),
    ],
)
def test_replicas_stay_identical_under_optimizers_of_keras(make):
    keras.utils.set_random_seed(3)
    layer = keras.layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(2.0))
    layer.build((None, 6))
    optimizer = hvd.DistributedOptimizer(make(), strategy="threshold:target_density=0.1")
    random = np.random.default_rng(hvdx.rank())
    for _ in range(6):
        gradients = [tf.constant(random.normal(size=w.shape), tf.float32) for w in layer.trainable_weights]
        optimizer.apply(gradients, layer.trainable_weights)
    hvd.flush(optimizer)
    assert_identical(layer.weights)


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize(("second_moments", "power"), [("mean", 0.0), ("own", -0.5)])
def test_adam_takes_the_steps_of_the_mean_gradient(second_moments, power):
    """With gradients of noise, steps that divide by one rank's second moment are shorter by the root of the ranks."""
    strategy = hvdx.Threshold(tau=2.0**-16, second_moments=second_moments)
    distributed = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), strategy=strategy)
    reference = keras.optimizers.Adam(0.01)
    mine, whole = (keras.Variable(np.zeros((40, 50), np.float32)) for _ in range(2))
    random = np.random.default_rng(3)
    for _ in range(20):
        gradients = random.normal(size=(hvdx.size(), 40, 50)).astype(np.float32)
        distributed.apply([tf.constant(gradients[hvdx.rank()])], [mine])
        reference.apply([tf.constant(gradients.mean(axis=0))], [whole])
    hvd.flush(distributed)
    ratio = np.linalg.norm(mine.numpy()) / np.linalg.norm(whole.numpy())
    assert ratio == pytest.approx(hvdx.size() ** power, rel=0.1)
    assert_identical([mine])


@pytest.mark.sizes(2, 4)
def test_hosts_add_up_their_updates(monkeypatch):
    """Two ranks to a host, over MPI, in shared memory and without; the hosts are names."""
    monkeypatch.setattr(world.start(), "hosts", [f"host {rank // 2}" for rank in range(hvdx.size())])
    opened, weights = [], []
    monkeypatch.setattr(hosts, "open_sums", lambda *examples: opened.append(open_sums(*examples)) or opened[-1])
    for _ in range(2):
        keras.utils.set_random_seed(hvdx.rank())
        model = network(keras.optimizers.Adam(0.01))
        callback, history = fit(model, "threshold:target_density=0.05,local=dense", check_every=3)
        assert_identical(model.weights)
        assert history["loss"][-1] < history["loss"][0]
        (counts,) = callback.counters.telemetry
        assert counts.inside > 0
        assert (counts.sent > 0) == (hvdx.size() > 2)
        weights.append(b"".join(w.tobytes() for w in model.get_weights()))
        monkeypatch.setattr(MpiChannel, "share", lambda self, elements: None)
    assert [type(sums) for sums in opened] == ([SharedSums, MessageSums] if hvdx.size() > 1 else [])
    assert weights[0] == weights[1]


@pytest.mark.sizes(2, 4)
def test_nan_on_one_rank_skips_the_step_and_training_continues(capfd):
    x, y = data()
    if hvdx.rank() == hvdx.size() - 1:
        x[20, 3] = np.nan
    # Batch normalisation would keep the NaN in its statistics.
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    callback = hvd.Distribute("threshold:target_density=0.1")
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=[callback])
    if hvdx.size() > 1:
        assert all(np.isfinite(w).all() for w in model.get_weights())
        assert_identical(model.weights)
        assert callback.counters.telemetry[0].skipped == 3
        assert int(model.optimizer.iterations) == 3 * STEPS
        if hvdx.rank() == 0:
            assert f"NaN or infinity on rank {hvdx.size() - 1}; all ranks skipped" in capfd.readouterr().err


@pytest.mark.graph
def test_overflow_of_a_loss_scale_is_agreed_on():
    keras.config.set_dtype_policy("mixed_float16")
    model = network(keras.optimizers.SGD(0.01, momentum=0.9))
    x, y = data()
    x = x * np.float32(1e30) if hvdx.rank() == 0 else x
    callback = hvd.Distribute("threshold:target_density=0.1", check_every=None)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    assert_identical(model.trainable_weights)
    if hvdx.size() > 1:
        assert callback.counters.exchanges == 0


@pytest.mark.sizes(2, 4)
def test_embeddings_travel_as_updates():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(20, 4), keras.layers.Flatten(),
                              keras.layers.Dense(1)])  # fmt: skip
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(hvdx.rank()).integers(20, size=(32, 3))
    fit(model, "threshold:target_density=0.2,exchange=sharded", examples=(x, np.ones((32, 1), np.float32)))
    assert_identical(model.weights)


@pytest.mark.parametrize("compiled_again", [False, True])
def test_second_fit_keeps_momenta_and_residual(compiled_again):
    if hvdx.size() == 1:
        return
    model = network(keras.optimizers.SGD(0.05, momentum=0.9))
    fit(model, "threshold:target_density=0.05")
    if compiled_again:
        # The step is traced again, by another adapter.
        model.compile(model.optimizer, model.loss)
    momenta = [np.array(m) for m in model.optimizer.momentums]
    exchanges = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            exchanges.append(adapter_of(self.model.optimizer).exchange)

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                exchanges.append([np.array(m) for m in self.model.optimizer.momentums])

    fit(model, "threshold:target_density=0.05", epochs=1, callbacks=[Look()])
    assert exchanges[0] is not None
    assert exchanges[0].telemetry.steps == STEPS
    for before, after in zip(momenta, exchanges[1], strict=True):
        np.testing.assert_array_equal(before, after)
    assert_identical(model.weights)


class Scaled(keras.layers.Layer):
    """Layer with a scalar weight and a constraint."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", constraint=keras.constraints.NonNeg())

    def call(self, x):
        return x * self.scale


@pytest.mark.parametrize("strategy", ["threshold:target_density=0.1", "threshold:tau=0.5"])
def test_weights_without_dimensions_and_constraints_that_hold_after_a_flush(strategy):
    model = keras.Sequential([keras.Input((6,)), Scaled(), keras.layers.Dense(1, kernel_constraint="NonNeg")])
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse")
    x, y = data()
    fit(model, strategy, examples=(x, -y))
    assert_identical(model.weights)
    assert all(w.numpy().min() >= 0 for w in model.layers[1].weights[:1])


@pytest.mark.graph
@pytest.mark.parametrize("per_execution", [1, 2])
def test_auto_counts_the_steps_that_it_measured(per_execution):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", steps_per_execution=per_execution)
    callback, _ = fit(model, "auto", epochs=6)
    assert_identical(model.weights)
    if hvdx.size() > 1:
        assert callback.counters.exchanges == 6 * STEPS
        assert callback.cost().steps == 6 * STEPS


def test_layers_frozen_between_fits_keep_their_residual():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    for frozen in (False, True, False):
        model.layers[0].trainable = not frozen
        model.compile(optimizer, "mse")
        callback, _ = fit(model, "threshold:target_density=0.05", epochs=1)
        assert_identical(model.weights)
        if hvdx.size() > 1:
            assert callback.counters.exchanges == STEPS
            assert callback.cost().steps == STEPS
    if hvdx.size() > 1:
        # The residual of the fit with the frozen layer has been handed over, and its exchange is closed.
        open_now = host._remembered[optimizer].opened
        assert [len(variables) for _, variables in open_now.values()] == [4]


def test_optimizers_whose_updates_cannot_be_compressed_are_refused():
    for make, remedy in ((keras.optimizers.Ftrl, "placement='gradient'"), (keras.optimizers.Lion, "such as AdamW")):
        with pytest.raises(ConfigError, match=f"optimizer {make.__name__}: .*{remedy}"):
            hvd.DistributedOptimizer(make(0.1), strategy="threshold")
    hvd.DistributedOptimizer(keras.optimizers.Lion(0.1), strategy="threshold:placement=gradient")


@pytest.mark.parametrize("make", [lambda: keras.optimizers.Ftrl(0.1), lambda: keras.optimizers.Lion(0.01)])
def test_optimizers_whose_updates_cannot_be_compressed_train_under_auto(make, monkeypatch):
    if hvdx.size() == 1:
        return
    monkeypatch.setattr(hvdx.Auto, "decide", lambda self, *measured: (hvdx.Threshold(), "made up"))
    model = network(make())
    callback, _ = fit(model, "auto")
    assert_identical(model.weights)
    assert callback.strategy.placement == "gradient"


@pytest.mark.graph
def test_steps_per_execution_and_layers_built_late():
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", steps_per_execution=4)
    callback, _ = fit(model, "threshold:target_density=0.1")
    assert_identical(model.weights)
    if hvdx.size() > 1:
        assert callback.counters.exchanges == 2 * STEPS


@pytest.mark.graph
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize(("per_execution", "expected"), [(1, "=##= ##=#"), (2, "#= ##")])
def test_ranks_train_alone_in_a_period_and_not_at_the_end_of_an_epoch(per_execution, expected):
    model, apart = network("adam"), []
    model.steps_per_execution = per_execution
    compare = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: apart.append(" " if epoch else ""),
        on_train_batch_end=lambda batch, logs: apart.append(
            "#" if replicas.differing(model.trainable_variables, world.start()) else "="
        ),
    )
    callback, _ = fit(model, "threshold:target_density=0.2,period=3", callbacks=[compare])
    assert "".join(apart) == expected
    assert_identical(model.weights)
    # Of 8 steps the first one, two periods and the last one are exchanged.
    (cost,) = callback.counters.telemetry
    assert (cost.steps, cost.encoded, cost.period) == (8, 4 * cost.elements, 3)


@pytest.mark.graph
@pytest.mark.sizes(1, 2)
def test_custom_loop_with_a_distributed_optimizer():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    hvd.broadcast_variables(model.variables, 0)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), strategy="threshold:target_density=0.1"
    )
    x, y = data()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables)
        return loss

    losses = [float(step(x, y)) for _ in range(20)]
    hvd.flush(optimizer)
    assert_identical(model.weights)
    assert losses[-1] < losses[0]


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("strategy", ["threshold:tau=0.001", "parameter_server:servers=colocated"])
def test_one_variable_in_a_loop_without_a_graph(strategy):
    weight = keras.Variable(tf.ones(4), name="weight")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy=strategy)
    for _ in range(3):
        optimizer.apply([2 * weight.value], [weight])
    hvd.flush(optimizer)
    assert_identical([weight])
    assert float(weight.numpy()[0]) < 0.9


def test_weights_take_the_mean_update():
    """Powers of two, so that all sums are exact."""
    weight = keras.Variable(tf.zeros(4), name="weight")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), strategy="threshold:tau=0.0009765625")
    for _ in range(3):
        optimizer.apply([tf.fill([4], hvdx.rank() + 1.0)], [weight])
    np.testing.assert_array_equal(weight.numpy(), np.full(4, -3 * (hvdx.size() + 1) / 2))


class Pace(keras.callbacks.Callback):
    """Callback that slows this rank down, counts its steps in each epoch, and compares the replicas after it."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.steps, self.differing = seconds, [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.steps.append(0)

    def on_train_batch_begin(self, batch, logs=None):
        self.steps[-1] += 1
        time.sleep(self.seconds)

    def on_epoch_end(self, epoch, logs=None):
        self.differing.append(replicas.differing(self.model.weights, world.start()))


def train_at_different_paces(optimizer):
    """Train with one rank that is ten times slower; return the steps of each rank in the second epoch.

    After each epoch the replicas are identical, and all steps were taken once.
    """
    last = hvdx.rank() == hvdx.size() - 1
    model, pace = network(optimizer), Pace(0.03 if last else 0.003)
    strategy = "threshold:target_density=0.1,max_staleness=inf"
    callback, history = fit(model, strategy, epochs=2, callbacks=[pace], examples=data(8 * 10))
    assert pace.differing == [{}, {}]
    assert_identical(model.weights)
    assert history["loss"][-1] < history["loss"][0]
    everyone = world.start().all_gather_object(pace.steps, "test")
    assert [sum(steps) for steps in zip(*everyone, strict=True)] == [10 * hvdx.size()] * 2
    if hvdx.size() > 1:
        (cost,) = callback.counters.telemetry
        assert cost.steps == sum(pace.steps) == sum(cost.staleness.values())
        assert {"staleness", "density"} <= history.keys()
    # The first epoch begins with the time that each rank needs to trace its step.
    return [steps[1] for steps in everyone]


@pytest.mark.graph
@pytest.mark.sizes(1, 2, 4)
def test_slow_rank_does_not_slow_the_others_down():
    steps = train_at_different_paces(keras.optimizers.SGD(0.05, momentum=0.9))
    assert hvdx.size() == 1 or steps[-1] < max(steps)


class SlowStep(keras.layers.Layer):
    """Layer that changes nothing, and delays the first step of each epoch on rank 0."""

    due = False

    def call(self, inputs):
        def wait():
            due, self.due = self.due, False
            time.sleep(1.0 if due else 0.0)
            return np.zeros((), np.float32)

        with tf.control_dependencies([tf.numpy_function(wait, [], tf.float32)]):
            return tf.identity(inputs)


@pytest.mark.graph
def test_nobody_waits_for_the_first_step_of_rank_0():
    slow, pace = SlowStep(), Pace(0.0)
    model = keras.Sequential([keras.Input((6,)), slow, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), keras.losses.BinaryCrossentropy(from_logits=True))
    delay = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: setattr(slow, "due", hvdx.rank() == 0))
    strategy = "threshold:target_density=0.1,max_staleness=inf"
    fit(model, strategy, epochs=2, callbacks=[pace, delay], examples=data(8 * 10))
    assert pace.differing == [{}, {}]
    everyone = world.start().all_gather_object(pace.steps, "test")
    assert [sum(steps) for steps in zip(*everyone, strict=True)] == [20, 20]
    assert max(everyone[0]) <= 3


def test_late_messages_resume_from_a_checkpoint(tmp_path_factory):
    folder = world.start().all_gather_object(str(tmp_path_factory.mktemp("late")), "test")[0]
    seen = []
    for epochs in (1, 3):
        model = network(keras.optimizers.SGD(0.05, momentum=0.9))
        checkpoint = hvd.Checkpoint(folder)
        fit(model, "threshold:target_density=0.1,max_staleness=inf", epochs=epochs, callbacks=[checkpoint])
        assert_identical(model.weights)
        seen.append(int(model.optimizer.iterations))
    total = world.start().all_gather_object(seen, "test")
    assert [sum(steps) for steps in zip(*total, strict=True)] == [STEPS * hvdx.size(), 3 * STEPS * hvdx.size()]


def test_tape_is_refused():
    if hvdx.size() > 1:
        with pytest.raises(ConfigError, match="DistributedOptimizer"):
            hvd.DistributedGradientTape(tf.GradientTape(), strategy="threshold")
        with pytest.raises(ConfigError, match="Distribute callback"):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="auto")


def test_three_counters_reach_logs_and_files_and_all_of_them_the_record(tmp_path, capfd):
    if hvdx.size() == 1:
        return
    folder = world.start().all_gather_object(str(tmp_path), "test")[0]
    file = tmp_path / "log.csv"
    model, seen = network(keras.optimizers.SGD(0.05, momentum=0.9)), []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs)

    callbacks = [keras.callbacks.CSVLogger(str(file)), Look()]
    callback, history = fit(model, "threshold:target_density=0.1", callbacks=callbacks, record=folder)
    assert {"density", "tau", "MB_sent", "loss"} <= set(seen[3])
    expected = {"density", "tau", "MB_sent", "loss", "accuracy"}
    assert set(history) == expected
    lines = [json.loads(line) for line in Path(folder, f"rank-{hvdx.rank()}.jsonl").read_text().splitlines()]
    counters = [line["counters"] for line in lines if line["kind"] == "epoch"][-1]
    assert {"MB_received", "bits_per_entry", "entropy_per_entry", "residual_rms", "ms_encoding"} < set(counters)
    assert set(counters) == {*Telemetry().full()}
    assert history["MB_sent"][-1] == pytest.approx(callback.counters.bytes_sent / 1e6)
    assert "time in communication" not in capfd.readouterr().out, "verbose=0 prints nothing"
    if hvdx.rank() == 0:
        assert expected <= set(file.read_text().splitlines()[0].split(","))


def test_auto_gives_its_reason_and_continues_with_one_strategy(capfd):
    model = network(keras.optimizers.SGD(0.05, momentum=0.9))
    callback, _ = fit(model, "auto", epochs=6)
    assert_identical(model.weights)
    if hvdx.size() > 1:
        chosen = [repr(callback.strategy)] * hvdx.size()
        assert world.start().all_gather_object(repr(callback.strategy), "test") == chosen
        assert type(callback.strategy).__name__ in ("AllReduce", "Threshold")
        if hvdx.rank() == 0:
            assert f"hvdx: auto: {hvdx.size()} workers, " in capfd.readouterr().err


def test_horovod_is_not_started_if_nothing_uses_it():
    """Runs in a new process, because this one has started Horovod."""
    if hvdx.size() > 1:
        return
    from tests.launch import run

    code = """
import sys
import numpy as np, keras, hvdx
hvdx.init()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((32, 3), "float32")
model.fit(x, x[:, :1], verbose=0, callbacks=[hvdx.keras.Distribute("threshold")])
print("horovod loaded:", any(m.split(".")[0] == "horovod" for m in sys.modules), flush=True)
"""
    done = run(2, ["-c", code], timeout=180)
    assert done.out.count("horovod loaded: False") == 2, done
