"""Parameter averaging at any number of ranks, compared with the same arithmetic in one process."""

# Tests: hvdx/keras/adapters/graph.py, hvdx/keras/optimizer_state.py, hvdx/keras/adapters/rows.py

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras import checkpoint
from hvdx.keras.adapters import graph
from hvdx.keras.adapters.optimizer import adapter_of, attach, detach
from hvdx.keras.fit import replicas
from hvdx.keras.optimizer_state import slots
from hvdx.strategies import resolve
from tests.ranks import models
from tests.ranks.checkpoints import of_other_ranks

FEATURES, BATCH, STEPS = 6, 8, 10

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "accumulating": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}


def data(rank):
    random = np.random.default_rng(100 + rank)
    x = random.normal(size=(STEPS * BATCH, FEATURES)).astype("float32")
    return x, (x @ np.arange(FEATURES) + rank > 0).astype("float32")[:, None]


def network(optimizer, *layers, seed=3, dtype=None):
    keras.utils.set_random_seed(seed)
    inner = [keras.layers.Dense(5, "tanh", dtype=dtype), *layers, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((FEATURES,)), *inner])
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def fit(model, strategy, examples=None, epochs=1, batch=BATCH, **options):
    callback = hvd.Distribute(strategy, **options)
    x, y = examples or data(hvdx.rank())
    model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0, shuffle=False, callbacks=[callback])
    return callback


def simulated(make, period, average_optimizer, batches=None, weights=None, steps=STEPS, epochs=1):
    """Return the weights after an epoch, from models of all ranks that train one after the other in this process."""
    size = hvdx.size()
    models = [network(make()) for _ in range(size)]
    for model in models:
        model.run_eagerly = True  # tracing all models takes longer
    sizes = batches or [BATCH] * size
    since = 0
    for step in range(steps * epochs):
        for rank, model in enumerate(models):
            x, y = data(rank)
            k, b = step % steps, sizes[rank]
            model.train_on_batch(x[k * b : (k + 1) * b], y[k * b : (k + 1) * b])
        since += 1
        micro = models[0].optimizer.gradient_accumulation_steps or 1
        if since == period * micro or (step + 1) % steps == 0:
            since = 0
            groups = [[m.trainable_weights for m in models]]
            if average_optimizer:
                groups.append([slots(m.optimizer) for m in models])
            for group in groups:
                for variables in zip(*group, strict=True):
                    mean = np.average([v.numpy() for v in variables], axis=0, weights=weights)
                    for variable in variables:
                        variable.assign(mean)
    return models[hvdx.rank()]


def assert_identical(variables):
    assert replicas.differing(list(variables), world.start()) == {}


def assert_close(model, other, tolerance=1e-5):
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance)


def far(model, other):
    return max(np.abs(a - b).max() for a, b in zip(model.get_weights(), other.get_weights(), strict=True))


# -- the arithmetic -------------------------------------------------------------------------------------------------


@pytest.mark.graph
@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize(
    ("name", "average_optimizer"), [*((name, True) for name in OPTIMIZERS), ("momentum", False), ("adam", False)]
)
def test_each_rank_trains_alone_and_every_period_weights_become_their_mean(name, average_optimizer):
    model = network(OPTIMIZERS[name]())
    callback = fit(model, hvdx.ParameterAveraging(3, average_optimizer=average_optimizer))
    assert_close(model, simulated(OPTIMIZERS[name], 3, average_optimizer))
    assert_identical(model.weights)
    if average_optimizer or hvdx.size() == 1:
        assert_identical(slots(model.optimizer))
    else:
        assert name == "sgd" or replicas.differing(slots(model.optimizer), world.start())
    assert vars(model.optimizer).get("apply") is None
    if hvdx.size() > 1:
        (cost,) = callback.counters.telemetry
        micro = model.optimizer.gradient_accumulation_steps or 1
        assert (cost.steps, cost.averages) == (STEPS, -(-STEPS // (3 * micro)))
        numbers = sum(int(np.prod(w.shape)) for w in model.trainable_weights)
        numbers += sum(int(np.prod(w.shape)) for w in slots(model.optimizer)) if average_optimizer else 0
        ring = round(4 * numbers * 2 * (hvdx.size() - 1) / hvdx.size())
        assert cost.sent == cost.averages * ring


@pytest.mark.graph(every=True)
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("average_optimizer", [True, False])
def test_horovod_averages_the_same(average_optimizer, monkeypatch):
    # The matrix of 120 bytes in blocks of rows, the others at once.
    monkeypatch.setattr(graph, "_BLOCK_BYTES", 80)
    model = network(OPTIMIZERS["momentum"]())
    fit(model, hvdx.ParameterAveraging(3, average_optimizer=average_optimizer, engine="horovod"))
    assert_close(model, simulated(OPTIMIZERS["momentum"], 3, average_optimizer))
    assert_identical(model.weights)


@pytest.mark.parametrize(
    ("name", "average_optimizer"), [("sgd", True), ("momentum", True), ("nesterov", True), ("nesterov", False)]
)
def test_period_1_equals_all_reduce_for_linear_optimizers(name, average_optimizer):
    """If a step is linear in the gradients, averaging weights after it equals averaging gradients before it."""
    averaged, reduced = network(OPTIMIZERS[name]()), network(OPTIMIZERS[name]())
    fit(averaged, hvdx.ParameterAveraging(1, average_optimizer=average_optimizer))
    fit(reduced, hvdx.AllReduce())
    assert_close(averaged, reduced)


@pytest.mark.parametrize(("name", "period"), [("adam", 1), ("clipped", 1), ("sgd", 4), ("momentum", 4)])
def test_nonlinear_optimizers_and_longer_periods_differ_from_all_reduce(name, period):
    averaged, reduced = network(OPTIMIZERS[name]()), network(OPTIMIZERS[name]())
    fit(averaged, hvdx.ParameterAveraging(period))
    fit(reduced, hvdx.AllReduce())
    assert (far(averaged, reduced) > 1e-4) == (hvdx.size() > 1)


@pytest.mark.graph
@pytest.mark.sizes(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_rows_change_no_bits(monkeypatch, dtype):
    """Of weights and momenta, also where one row is larger than a block, and where the last block has fewer rows."""
    runs = []
    for block in (graph._BLOCK_BYTES, 15):
        monkeypatch.setattr(graph, "_BLOCK_BYTES", block)
        model = network(OPTIMIZERS["momentum"](), dtype=dtype)
        callback = fit(model, hvdx.ParameterAveraging(4))
        state = [*model.weights, *slots(model.optimizer)]
        assert_identical(state)
        runs.append([*map(replicas.digests, [state]), callback.counters.telemetry[0].divergence])
    assert runs[0][0] == runs[1][0]
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-4)


def test_schedule_lengthens_the_period():
    model = network(OPTIMIZERS["momentum"]())
    examples = data(hvdx.rank())
    callback = fit(model, "parameter_averaging:period=1@0/2@3/5@10", examples, epochs=2)
    if hvdx.size() > 1:
        # Averages after steps 1 2 3, 5 7 9, and at the end of each epoch: 10; then 15 and 20.
        assert callback.counters.telemetry[0].averages == 9
    assert_identical(model.weights)


@pytest.mark.sizes(2, 4)
def test_ranks_are_weighted_by_their_samples():
    sizes = [2 + rank for rank in range(hvdx.size())]
    model, mine = network(OPTIMIZERS["momentum"]()), sizes[hvdx.rank()]
    x, y = data(hvdx.rank())
    fit(model, "parameter_averaging:period=3,weighted=true", (x[: mine * STEPS], y[: mine * STEPS]), batch=mine)
    assert_close(model, simulated(OPTIMIZERS["momentum"], 3, True, batches=sizes, weights=sizes))
    assert "train_step" not in vars(model)


# -- Keras ------------------------------------------------------------------------------------------------------------


@pytest.mark.sizes(2, 4)
def test_statistics_and_moving_averages_end_equal():
    model = network(keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.9), keras.layers.BatchNormalization())
    fit(model, hvdx.ParameterAveraging(4, average_optimizer=False), epochs=2, check_every=3)
    assert_identical(model.weights)


@pytest.mark.graph
def test_layers_built_in_the_first_step_are_those_of_rank_0():
    def unbuilt(rank):
        keras.utils.set_random_seed(rank)
        model = keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0, momentum=0.9), "mse")
        return model

    model, first = unbuilt(hvdx.rank()), unbuilt(0)
    fit(model, hvdx.ParameterAveraging(4))
    first.build((None, FEATURES))
    assert_close(model, first, 1e-7)
    assert_identical([*model.weights, *slots(model.optimizer)])


def test_constraints_hold_after_an_average():
    model = network(OPTIMIZERS["sgd"](), keras.layers.Dense(4, kernel_constraint=keras.constraints.UnitNorm()))
    fit(model, hvdx.ParameterAveraging(4))
    assert_identical(model.weights)
    np.testing.assert_allclose(np.linalg.norm(model.get_weights()[2], axis=0), 1, atol=1e-5)


def test_float64_and_float32_side_by_side():
    model = network(OPTIMIZERS["momentum"](), keras.layers.Dense(4, dtype="float64"))
    fit(model, hvdx.ParameterAveraging(3))
    assert_identical([*model.weights, *slots(model.optimizer)])
    assert {w.dtype for w in model.weights} == {"float32", "float64"}


def test_frozen_layers_and_two_optimizers():
    model = models.TwoPlayers()
    model.compile(momentum=0.9)
    for frozen in (False, True):
        model.first.trainable = not frozen
        fit(model, "parameter_averaging:period=3,average_optimizer=false,weighted=true", data_of_classes())
        assert_identical(model.weights)
    assert not [a for o in (model.optimizer, model.other_optimizer) for a in vars(o) if a == "apply"]


def data_of_classes():
    x, y = data(hvdx.rank())
    return x, y.astype("int64")


@pytest.mark.sizes(2, 4)
def test_rank_with_nan_is_excluded():
    x, y = data(hvdx.rank())
    last = hvdx.size() - 1
    if hvdx.rank() == last and last > 0:
        x[BATCH] = np.nan
    model = network(OPTIMIZERS["momentum"]())
    callback = fit(model, hvdx.ParameterAveraging(4), (x, y))
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert_identical([*model.weights, *slots(model.optimizer)])
    if hvdx.size() > 1:
        assert callback.counters.telemetry[0].excluded == (hvdx.rank() == last)


def test_rank_with_nan_has_finite_momenta_afterwards():
    x, y = data(hvdx.rank())
    if hvdx.rank() == hvdx.size() - 1 and hvdx.size() > 1:
        x[BATCH] = np.nan
    model = network(OPTIMIZERS["momentum"]())
    callback = fit(model, hvdx.ParameterAveraging(4, average_optimizer=False), (x, y))
    assert all(np.isfinite(v.numpy()).all() for v in (*model.weights, *slots(model.optimizer)))
    if hvdx.size() > 1:
        assert callback.counters.telemetry[0].excluded == (hvdx.rank() == hvdx.size() - 1)


def test_statistics_of_a_rank_with_nan_are_excluded_too():
    x, y = data(hvdx.rank())
    if hvdx.rank() == hvdx.size() - 1 and hvdx.size() > 1:
        x[BATCH] = np.nan
    model = network(OPTIMIZERS["sgd"](), keras.layers.BatchNormalization())
    fit(model, hvdx.ParameterAveraging(4), (x, y))
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_nan_on_all_ranks_reaches_all_ranks():
    x, y = data(hvdx.rank())
    model = network(OPTIMIZERS["sgd"]())
    with pytest.raises(ReplicaError, match=r"NaN or infinity after epoch 1: .* on all ranks"):
        fit(model, hvdx.ParameterAveraging(4), (x * np.nan, y))
    assert_identical(model.weights)
    assert np.isnan(model.get_weights()[0]).any()


@pytest.mark.graph
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("accumulate", [None, 2])
def test_overflow_of_one_rank_skips_its_step_alone(accumulate):
    keras.config.set_dtype_policy("mixed_float16")
    model = network(keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=accumulate))
    x, y = data(hvdx.rank())
    if hvdx.rank() == 0:
        x[2 * BATCH : 3 * BATCH] = np.inf
    callback = fit(model, "parameter_averaging:period=2@0/3@6", (x, y), epochs=2)
    if hvdx.size() > 1:
        # Averages after calls 2 4 6 8 10, 13 16 19 20, because rank 0 has counted 5 updates at the sixth call;
        # with accumulation after calls 4 8 10, 14 18 20.
        assert callback.counters.telemetry[0].averages == (9 if accumulate is None else 6)
    optimizer = model.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert int(optimizer.inner_optimizer.iterations) < 2 * STEPS or hvdx.rank() != 0
    assert_identical(
        [*model.weights, *slots(optimizer), optimizer.dynamic_scale, optimizer.inner_optimizer._iterations]
    )


def test_optimizer_whose_state_is_the_weights_is_averaged_as_a_whole():
    if hvdx.size() > 1:
        with pytest.raises(ConfigError, match="average_optimizer=True"):
            attach(keras.optimizers.Ftrl(0.1), hvdx.ParameterAveraging(average_optimizer=False), "ftrl")
    model = network(keras.optimizers.Ftrl(0.1))
    fit(model, hvdx.ParameterAveraging(3))
    assert_identical([*model.weights, *slots(model.optimizer)])


def test_loss_scale_around_a_distributed_optimizer_is_refused():
    if hvdx.size() == 1:
        return
    inner = keras.optimizers.SGD(0.1)
    attach(inner, hvdx.ParameterAveraging(2), "inner")
    model = network(keras.optimizers.LossScaleOptimizer(inner))
    with pytest.raises(ConfigError, match="loss-scale"):
        model.train_on_batch(*(a[:BATCH] for a in data(0)))
    detach(inner)


def test_momenta_that_are_not_averaged_continue_in_the_next_fit():
    model = network(OPTIMIZERS["momentum"]())
    for _ in range(2):
        fit(model, hvdx.ParameterAveraging(3, average_optimizer=False))
    assert_close(model, simulated(OPTIMIZERS["momentum"], 3, False, epochs=2))


@pytest.mark.graph
def test_steps_per_execution_and_jit():
    model = network(OPTIMIZERS["sgd"]())
    model.compile(OPTIMIZERS["sgd"](), keras.losses.BinaryCrossentropy(from_logits=True), steps_per_execution=5)
    fit(model, hvdx.ParameterAveraging(3))
    assert_close(model, simulated(OPTIMIZERS["sgd"], 3, True))


# -- custom loops -----------------------------------------------------------------------------------------------------


def train(model, optimizer, steps, begin=0, counted=None):
    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        if counted:
            hvd.count_samples(optimizer, counted)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    x, y = data(hvdx.rank())
    for k in range(begin, begin + steps):
        step(x[k * BATCH : (k + 1) * BATCH], y[k * BATCH : (k + 1) * BATCH])


def in_a_loop(strategy, name="momentum", seed=3):
    model = network(OPTIMIZERS[name](), seed=seed)
    model.optimizer = hvd.DistributedOptimizer(model.optimizer, strategy=strategy)
    hvd.broadcast_variables(model.variables, 0)
    return model, model.optimizer


@pytest.mark.sizes(1, 2)
def test_distributed_optimizer_averages_in_a_loop_and_flush_at_its_end():
    model, optimizer = in_a_loop("parameter_averaging:period=3")
    train(model, optimizer, STEPS)
    if hvdx.size() > 1:
        assert replicas.differing(model.weights, world.start())
    hvd.flush(optimizer)
    hvd.flush(optimizer)
    assert_close(model, simulated(OPTIMIZERS["momentum"], 3, True))
    assert_identical(model.weights)


def test_horovods_callback_averages_at_the_end_of_an_epoch():
    model, _ = in_a_loop("parameter_averaging:period=4")
    model.compile(model.optimizer, model.loss)
    x, y = data(hvdx.rank())
    begin, seen = hvd.callbacks.BroadcastGlobalVariablesCallback(0), []

    def look(epoch, logs):
        seen.append(replicas.differing(model.weights, world.start()))

    saves = keras.callbacks.LambdaCallback(on_epoch_end=look)
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, shuffle=False, callbacks=[begin, saves])
    assert seen == [{}]
    assert_identical([*model.weights, *slots(model.optimizer)])
    assert_close(model, simulated(OPTIMIZERS["momentum"], 4, True))


def test_different_numbers_of_steps_are_an_error():
    model, optimizer = in_a_loop("parameter_averaging:period=50")
    train(model, optimizer, 3 if hvdx.rank() else 2)
    if hvdx.size() > 1:
        with pytest.raises(ReplicaError, match=r"the ranks have taken \[2, 3"):
            hvd.flush(optimizer)


def test_average_without_samples_weights_ranks_equally():
    model, optimizer = in_a_loop("parameter_averaging:period=2,weighted=true")
    train(model, optimizer, 4, counted=BATCH)
    adapter = adapter_of(optimizer)
    if adapter is not None:
        train(model, optimizer, 4, 4)
        assert int(adapter.averages) == 4
        assert_identical(model.weights)


def test_weighted_average_in_a_loop_requires_count_samples():
    model, optimizer = in_a_loop("parameter_averaging:weighted=true")
    if hvdx.size() > 1:
        with pytest.raises(ConfigError, match="count_samples"):
            train(model, optimizer, 1)
    train(model, optimizer, STEPS, counted=BATCH)
    hvd.flush(optimizer)
    assert_identical(model.weights)


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("strategy", ["parameter_averaging:period=4", "parameter_averaging:4,average_optimizer=false"])
def test_training_resumes_within_a_period_bit_for_bit(tmp_path_factory, strategy):
    strategy = resolve(strategy.replace(":4", ":period=4"))
    folder = world.start().all_gather_object(str(tmp_path_factory.mktemp("middle")), "folder")[0]
    whole, optimizer = in_a_loop(strategy, "adam")
    train(whole, optimizer, 6)
    apart = replicas.differing(whole.weights, world.start())
    assert bool(apart) == (hvdx.size() > 1)
    checkpoint.save(folder, whole, 1)
    assert replicas.differing(whole.weights, world.start()) == apart
    train(whole, optimizer, 4, 6)
    hvd.flush(optimizer)

    resumed, optimizer = in_a_loop(strategy, "adam", seed=11)
    assert checkpoint.restore(folder, resumed) == 1
    assert replicas.differing(resumed.weights, world.start()).keys() == apart.keys()
    train(resumed, optimizer, 4, 6)
    hvd.flush(optimizer)
    for a, b in zip(
        (*whole.weights, *whole.optimizer.variables), (*resumed.weights, *optimizer.variables), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    if hvdx.size() > 1:
        assert int(adapter_of(optimizer).averages) == 2


@pytest.mark.parametrize("ranks", [3])
def test_another_number_of_ranks_begins_from_the_mean(tmp_path_factory, ranks):
    folder = world.start().all_gather_object(str(tmp_path_factory.mktemp("number")), "folder")[0]
    model, optimizer = in_a_loop("parameter_averaging:period=4", "adam")
    train(model, optimizer, 6)
    checkpoint.save(folder, model, 1)
    _, saved = of_other_ranks(Path(folder) / "epoch-0001", ranks)
    resumed, optimizer = in_a_loop("parameter_averaging:period=4", "adam", seed=12)
    checkpoint.restore(folder, resumed)
    assert_identical([*resumed.weights, *resumed.optimizer.variables])
    if hvdx.size() > 1:
        for i, weight in enumerate(resumed.get_weights()):
            mean = np.mean([file[f"weights.{i}"] for file in saved], axis=0, dtype=np.float64)
            np.testing.assert_allclose(weight, mean, atol=1e-6)
    train(resumed, optimizer, 4, 6)


def test_momenta_of_another_strategy_become_their_mean(tmp_path_factory):
    folder = world.start().all_gather_object(str(tmp_path_factory.mktemp("momenta")), "folder")[0]
    model, optimizer = in_a_loop("parameter_averaging:period=2,average_optimizer=false")
    train(model, optimizer, 4)
    assert bool(replicas.differing(slots(optimizer), world.start())) == (hvdx.size() > 1)
    checkpoint.save(folder, model, 1)
    other, _ = in_a_loop("parameter_averaging:period=2", seed=12)
    checkpoint.restore(folder, other)
    assert_identical(slots(other.optimizer))
    mine = [v.numpy() for v in slots(optimizer)]
    for slot, all_of_them in zip(
        slots(other.optimizer), zip(*world.start().all_gather_object(mine, "m"), strict=True), strict=True
    ):
        np.testing.assert_allclose(slot.numpy(), np.mean(all_of_them, axis=0), atol=1e-6)


def test_other_strategies_begin_from_the_mean(tmp_path_factory):
    folder = world.start().all_gather_object(str(tmp_path_factory.mktemp("other")), "folder")[0]
    model, optimizer = in_a_loop("parameter_averaging:period=4")
    train(model, optimizer, 6)
    mean = [
        np.mean(world.start().all_gather_object(w.numpy(), "weights"), axis=0, dtype=np.float64) for w in model.weights
    ]
    checkpoint.save(folder, model, 1)
    other, _ = in_a_loop("all_reduce", seed=12)
    checkpoint.restore(folder, other)
    assert_identical([*other.weights, *other.optimizer.variables])
    for weight, expected in zip(other.get_weights(), mean, strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-6)
