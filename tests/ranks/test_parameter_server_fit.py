"""The parameter server at any number of ranks, with servers in threads of the workers."""

# Tests: hvdx/keras/adapters/weights.py, hvdx/strategies/serving/messages.py, hvdx/strategies/serving/client.py

import shutil
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.errors import ConfigError, ReplicaError
from hvdx.keras import checkpoint
from hvdx.keras.adapters.optimizer import adapter_of
from hvdx.keras.fit import replicas
from hvdx.keras.optimizer_state import moving_averages, slots
from hvdx.strategies import TensorSpec
from hvdx.strategies.telemetry import ServerTelemetry
from tests.ranks import models
from tests.ranks.checkpoints import of_other_ranks
from tests.ranks.models import BATCH, CLASSES, FEATURES

# Batches of one rank in an epoch.
STEPS = 6
COUNTED = np.arange(1.0, FEATURES + 1)

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "accumulating": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}
ASYNCHRONOUS = {
    "plain": {},
    "scale": {"staleness": "scale", "staleness_exponent": 0.5},
    "bound": {"staleness": "bound", "max_staleness": 2},
    "scale+bound": {"staleness": "scale+bound"},
    "aggregate": {"aggregate": 2},
}


def synchronous(servers="colocated", **options):
    """Return a strategy under which all workers take every step together."""
    return hvdx.ParameterServer(servers, staleness="bound", max_staleness=0, aggregate=hvdx.size(), **options)


def asynchronous(name="plain", servers="colocated", **options):
    chosen = ASYNCHRONOUS[name] | options
    return hvdx.ParameterServer(servers, **chosen | {"aggregate": min(chosen.get("aggregate", 1), hvdx.size())})


def data(steps=STEPS, rank=None):
    """Return the data of one rank; by default of this one."""
    random = np.random.default_rng(100 + (hvdx.rank() if rank is None else rank))
    x = random.normal(size=(steps * BATCH, FEATURES)).astype("float32")
    return x, (x[:, 0] + 2 * x[:, 1] > 0).astype("int64") + (x[:, 2] > 1)


def network(optimizer, *make_layers, seed=3, **options):
    return models.compiled(models.network(*make_layers, seed=seed), optimizer, **options)


class Count(keras.callbacks.Callback):
    """Callback that counts this rank's steps in each epoch, and the differences between replicas after it."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds, self.steps, self.differing = seconds, [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.steps.append(0)

    def on_train_batch_begin(self, batch, logs=None):
        self.steps[-1] += self.model.steps_per_execution
        time.sleep(self.seconds)

    def on_epoch_end(self, epoch, logs=None):
        self.differing.append(replicas.differing(self.model.weights, world.start()))


def fit(model, strategy, examples=None, epochs=1, callbacks=(), batch=BATCH, **options):
    """Train; return the callback, the history and the counts."""
    callback, count = hvd.Distribute(strategy), next((c for c in callbacks if isinstance(c, Count)), Count())
    x, y = examples if examples is not None else data()
    if isinstance(x, np.ndarray):
        options |= {"x": x, "y": y, "batch_size": batch}
    else:
        options |= {"x": x}
    others = [c for c in callbacks if c is not count]
    history = model.fit(**options, epochs=epochs, verbose=0, shuffle=False, callbacks=[count, callback, *others])
    return callback, history.history, count


def alone(model, steps=STEPS, epochs=1):
    """Train in this process with the batches of all ranks together, as AllReduce does; return the losses."""
    shares = [data(steps, rank) for rank in range(hvdx.size())]
    x, y = (
        np.concatenate([share[i].reshape(steps, BATCH, -1) for share in shares], axis=1).reshape(
            steps * BATCH * hvdx.size(), *shares[0][i].shape[1:]
        )
        for i in (0, 1)
    )
    batch = BATCH * hvdx.size()
    return model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0, shuffle=False).history["loss"]


def everyone(value):
    return world.start().all_gather_object(value, "test")


def assert_identical(variables):
    assert replicas.differing(list(variables), world.start()) == {}


def is_finite(variables):
    return all(np.isfinite(np.asarray(v, dtype="float64")).all() for v in variables)


def all_steps(count, epoch=0):
    """Return the steps of all ranks in an epoch."""
    return sum(everyone(count.steps[epoch]))


# -- synchronous training is AllReduce --------------------------------------------------------------------------------


@pytest.mark.graph
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize(
    ("name", "servers"),
    [
        ("sgd", "colocated"),
        ("momentum", "colocated:1"),
        ("nesterov", "colocated"),
        ("accumulating", "colocated"),
    ],
)
def test_max_staleness_0_with_all_updates_aggregated_equals_all_reduce(name, servers):
    served, reduced = network(OPTIMIZERS[name]()), network(OPTIMIZERS[name]())
    _, history, count = fit(served, synchronous(servers), epochs=2)
    expected = alone(reduced, epochs=2)
    models.assert_close(served, reduced, 1e-5)
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)
    assert count.differing == [{}, {}]
    assert count.steps == [STEPS, STEPS]
    assert not [a for a in vars(served.optimizer) if a in ("_clip_gradients", "_backend_update_step")]


def test_second_fit_keeps_momenta_like_all_reduce():
    served, reduced = network(OPTIMIZERS["momentum"]()), network(OPTIMIZERS["momentum"]())
    for _ in range(2):
        fit(served, synchronous())
        alone(reduced)
    models.assert_close(served, reduced, 1e-5)


def test_float64_weights_keep_their_precision():
    keras.config.set_dtype_policy("float64")
    model, optimizer, step = constant_gradients(hvdx.ParameterServer("colocated"), 2.0**-40)
    model.set_weights([np.ones((FEATURES, 1))])
    for _ in range(3):
        step()
    hvd.flush(optimizer)
    np.testing.assert_array_equal(model.get_weights()[0][:, 0], 1 - 3 * 2.0**-40 * COUNTED)


def train(model, optimizer, steps, examples=None):
    """Train in a custom loop."""

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    x, y = examples or data()
    for k in range(steps):
        step(x[k * BATCH : (k + 1) * BATCH], y[k * BATCH : (k + 1) * BATCH])


def in_a_loop(strategy, make=OPTIMIZERS["momentum"], seed=3):
    model = network(make(), seed=seed)
    model.optimizer = hvd.DistributedOptimizer(model.optimizer, strategy=strategy)
    return model, model.optimizer


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("servers", ["colocated:1", "colocated"])
def test_own_loop_equals_all_reduce_too(servers):
    reduced = network(OPTIMIZERS["momentum"]())
    alone(reduced, epochs=2)
    model, optimizer = in_a_loop(synchronous(servers))
    for _ in range(2):
        train(model, optimizer, STEPS)
        hvd.flush(optimizer)
        hvd.flush(optimizer)
    assert_identical(model.weights)
    models.assert_close(model, reduced, 1e-5)


# -- asynchronous training --------------------------------------------------------------------------------------------


@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_after_each_epoch_all_ranks_hold_the_same_bits_and_all_steps_were_taken(name):
    model = network(keras.optimizers.SGD(0.3), metrics=["accuracy"])
    callback, history, count = fit(model, asynchronous(name), data(16), epochs=2)
    assert count.differing == [{}] * 2
    assert_identical(model.weights)
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    for epoch in range(2):
        assert all_steps(count, epoch) == 16 * hvdx.size()
    if hvdx.size() > 1:
        (cost,) = callback.counters.telemetry
        assert sum(everyone(cost.steps)) == 2 * 16 * hvdx.size()
        for server in cost.servers:  # the last epoch
            assert server[2:5] == (16 * hvdx.size(), 16 * hvdx.size(), 0)


def constant_gradients(strategy, rate=1.0):
    """Return a step that subtracts `rate * COUNTED` from a weight; small integers, so that sums are exact."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((FEATURES,)), layer])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), strategy=strategy)

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return model, optimizer, lambda: step(tf.constant(COUNTED[None]))


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("servers", ["colocated:1", "colocated"])
def test_each_step_of_each_rank_counts_exactly_once(servers):
    model, optimizer, step = constant_gradients(hvdx.ParameterServer(servers))
    random, total = np.random.default_rng(hvdx.rank()), 0
    for _ in range(3):
        mine = int(random.integers(0, 40))
        for _ in range(mine):
            step()
            time.sleep(random.exponential(5e-4))
        hvd.flush(optimizer)
        total += sum(everyone(mine))
        np.testing.assert_array_equal(model.get_weights()[0][:, 0], -total / hvdx.size() * COUNTED)


def test_aggregated_updates_count_as_their_mean():
    model, optimizer, step = constant_gradients(synchronous())
    for _ in range(7):
        step()
    hvd.flush(optimizer)
    np.testing.assert_allclose(model.get_weights()[0][:, 0], -7 * COUNTED, rtol=1e-6)


@pytest.mark.sizes(2, 4)
def test_slow_rank_takes_fewer_steps_than_others():
    last = hvdx.size() - 1
    count, examples = Count(0.2 if hvdx.rank() == last else 0.0), data(20)
    model = network(OPTIMIZERS["sgd"]())
    fit(model, asynchronous(), examples, callbacks=[count])
    taken = everyone(count.steps[0])
    assert sum(taken) == 20 * hvdx.size()
    if hvdx.size() > 1:
        # The order of the others depends on the time at which each has traced its step.
        assert taken[last] < max(taken[:last])
        assert taken[last] < 15
    assert_identical(model.weights)


@pytest.mark.sizes(2, 4)
def test_bound_makes_fast_ranks_wait_for_slow_ones():
    count = Count(0.02 if hvdx.rank() == hvdx.size() - 1 else 0.0)
    model = network(OPTIMIZERS["sgd"]())
    fit(model, asynchronous("bound"), data(10), callbacks=[count])
    taken = everyone(count.steps[0])
    assert sum(taken) == 10 * hvdx.size()
    # A fast rank may get one more step before the bound delays its update.
    assert max(taken) - min(taken) <= 3


@pytest.mark.graph
def test_steps_per_execution_are_taken_together():
    model = network(OPTIMIZERS["sgd"](), steps_per_execution=2)
    callback, _, count = fit(model, asynchronous(), epochs=2)
    assert [all_steps(count, epoch) for epoch in range(2)] == [STEPS * hvdx.size()] * 2
    if hvdx.size() > 1:
        assert sum(everyone(callback.counters.telemetry[0].steps)) == 2 * STEPS * hvdx.size()
    assert_identical(model.weights)


def test_steps_per_epoch_and_data_that_repeats():
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH).repeat()
    model = network(OPTIMIZERS["sgd"]())
    _, _, count = fit(model, asynchronous(), (batches, None), epochs=2, steps_per_epoch=4)
    assert [all_steps(count, epoch) for epoch in range(2)] == [4 * hvdx.size()] * 2
    assert_identical(model.weights)


@pytest.mark.sizes(2, 4)
def test_ranks_with_different_numbers_of_batches_take_all_of_them_together():
    mine = 3 + 2 * hvdx.rank()
    expected = sum(everyone(mine))
    x, y = data(mine)
    for examples in ((x, y), (tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH), None)):
        model = network(OPTIMIZERS["sgd"]())
        _, _, count = fit(model, asynchronous(), examples, epochs=2)
        assert [all_steps(count, epoch) for epoch in range(2)] == [expected] * 2
        assert_identical(model.weights)


def test_validation_sees_the_weights_of_all():
    model, seen = network(OPTIMIZERS["sgd"]()), []

    class Look(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seen.append(replicas.differing(self.model.weights, world.start()))

    held_out = data(4, rank=50)
    _, history, count = fit(
        model, asynchronous(), epochs=4, callbacks=[Look()], validation_data=held_out, validation_freq=2
    )
    assert seen == [{}, {}]
    assert count.differing == [{}] * 4
    assert len(history["val_loss"]) == 2
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(*held_out, verbose=0), rel=1e-5)
    assert len(set(everyone(tuple(history["loss"])))) == 1
    assert len(set(everyone(tuple(history["val_loss"])))) == 1


# -- changes to weights besides steps ---------------------------------------------------------------------------------


def test_weights_that_a_script_sets_between_epochs_and_fits_count_once():
    class Add(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.set_weights([w + 1 for w in self.model.get_weights()])

    model = network(keras.optimizers.SGD(0.0, momentum=0.9))
    before = model.get_weights()
    for _ in range(2):
        fit(model, asynchronous(), epochs=2, callbacks=[Add()])
        model.set_weights([w + 1 for w in model.get_weights()])
    fit(model, asynchronous())
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(a, b + 6, rtol=1e-6)
    assert_identical(model.weights)


@pytest.mark.graph
def test_layers_built_in_the_first_step_are_those_of_rank_0():
    def unbuilt(rank):
        keras.utils.set_random_seed(rank)
        return models.compiled(
            keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(CLASSES)]), keras.optimizers.SGD(0.0)
        )

    model, first = unbuilt(hvdx.rank()), unbuilt(0)
    _, _, count = fit(model, asynchronous(), epochs=2)
    first.build((None, FEATURES))
    models.assert_close(model, first, 1e-7)
    assert count.differing == [{}, {}]
    assert all_steps(count) == STEPS * hvdx.size()


@pytest.mark.parametrize("strategy", [asynchronous, synchronous])
def test_two_optimizers_have_servers_for_their_own_weights(strategy):
    model = models.TwoPlayers()
    model.compile(momentum=0.9)
    _, history, count = fit(model, strategy(), epochs=3)
    assert count.differing == [{}] * 3
    assert all_steps(count) == STEPS * hvdx.size()
    assert is_finite(model.weights)
    if strategy is synchronous:
        # With updates that are four steps old and this momentum, the loss may not fall within three epochs.
        assert history["my_loss"][-1] < history["my_loss"][0]


def test_layers_may_be_frozen_between_fits():
    model = network(OPTIMIZERS["momentum"]())
    optimizer = model.optimizer
    for frozen in (False, True, False):
        model.layers[0].trainable = not frozen
        models.compiled(model, optimizer)
        before = model.layers[0].get_weights()[0]
        callback, _, _ = fit(model, asynchronous(codec="threshold:0.2"))
        after = model.layers[0].get_weights()[0]
        assert_identical(model.weights)
        assert np.array_equal(before, after) == frozen
        if hvdx.size() > 1:
            assert sum(everyone(callback.cost().steps)) == STEPS * hvdx.size()


def test_batch_normalisation_and_constraints_hold_on_all_ranks():
    model = network(
        OPTIMIZERS["momentum"](),
        lambda: keras.layers.Dense(5, kernel_constraint=keras.constraints.UnitNorm()),
        keras.layers.BatchNormalization,
    )
    _, _, count = fit(model, asynchronous(), epochs=2)
    assert count.differing == [{}, {}]
    assert is_finite(model.weights)
    np.testing.assert_allclose(np.linalg.norm(model.get_weights()[0], axis=0), 1, atol=1e-5)


def test_moving_averages_of_weights_end_equal():
    model = network(keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9))
    _, _, count = fit(model, asynchronous(), epochs=2)
    assert_identical([*model.weights, *moving_averages(model.optimizer)])
    assert count.differing == [{}, {}]
    for weight, average in zip(model.trainable_weights, moving_averages(model.optimizer), strict=True):
        np.testing.assert_array_equal(weight, average)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: keras.optimizers.Ftrl(0.1), r"optimizer Ftrl: .*Use AllReduce\(\)"),
        (lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3), "ema_overwrite_frequency"),
    ],
)
def test_optimizers_that_assign_weights_are_refused(make, says):
    if hvdx.size() == 1:
        return
    with pytest.raises(ConfigError, match=says):
        fit(network(make()), asynchronous())


def test_options_that_do_not_fit_the_ranks_are_refused():
    if hvdx.size() == 1:
        return
    with pytest.raises(ConfigError, match=r"HVDX_STRATEGY=parameter_server:servers=1.*servers='colocated'"):
        hvd.Distribute(hvdx.ParameterServer(1))
    with pytest.raises(ConfigError, match=rf"aggregate: expected at most {hvdx.size()}"):
        hvd.Distribute(hvdx.ParameterServer("colocated", aggregate=hvdx.size() + 1))
    with pytest.raises(ConfigError, match=rf"servers: expected at most {hvdx.size()}"):
        hvd.Distribute(hvdx.ParameterServer(f"colocated:{hvdx.size() + 1}"))
    with pytest.raises(ConfigError, match="check_every=3"):
        hvd.Distribute(asynchronous(), check_every=3)


# -- ranks that skip steps --------------------------------------------------------------------------------------------


# An eager rank without a step opens no exchange; one that traces the step does.
@pytest.mark.graph(every=True)
@pytest.mark.parametrize(
    ("strategy", "batches"), [(asynchronous, 1), (asynchronous, STEPS), (synchronous, 1), (synchronous, STEPS)]
)
def test_overflow_of_one_rank_skips_its_steps_alone_and_no_rank_hangs(strategy, batches):
    keras.config.set_dtype_policy("mixed_float16")
    model = network(OPTIMIZERS["momentum"]())
    x, y = data()
    if hvdx.rank() == 0:
        # From its first step on, in which worker 0 sends its weights to the servers.
        x[: batches * BATCH] = np.inf
    _, _, count = fit(model, strategy(), (x, y), epochs=2)
    optimizer = model.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert count.differing == [{}, {}]
    assert is_finite(model.weights)
    assert all_steps(count) == STEPS * hvdx.size()
    scales = everyone(float(optimizer.dynamic_scale))
    if hvdx.size() > 1:
        assert scales[0] < min(scales[1:])
        assert (int(optimizer.inner_optimizer.iterations) == 0) == (hvdx.rank() == 0 and batches == STEPS)


@pytest.mark.graph
def test_ranks_that_accumulate_for_longer_than_an_epoch_do_not_block_others():
    model = network(keras.optimizers.SGD(0.1, gradient_accumulation_steps=5))
    before = model.get_weights()
    count = Count(0.02 if hvdx.rank() == 0 else 0.0)
    fit(model, asynchronous(), data(4), epochs=3, callbacks=[count])
    assert count.differing == [{}] * 3
    assert all_steps(count) == 4 * hvdx.size()
    assert any((a != b).any() for a, b in zip(model.get_weights(), before, strict=True))


@pytest.mark.sizes(2, 4)
def test_nan_of_one_rank_is_refused_and_reported(capfd):
    last, (x, y) = hvdx.size() - 1, data()
    if hvdx.rank() == last and last:
        x[0] = np.nan
    model = network(OPTIMIZERS["momentum"]())
    callback, _, count = fit(model, asynchronous(), (x, y))
    assert is_finite([*model.weights, *slots(model.optimizer)])
    assert count.differing == [{}]
    if hvdx.size() == 1:
        return
    (cost,) = callback.counters.telemetry
    refused = everyone(cost.skipped)
    assert refused[last] >= 1
    assert not any(refused[:last])
    assert all(server[2] + server[4] == STEPS * hvdx.size() for server in cost.servers)
    assert all(server[4] == refused[last] for server in cost.servers)
    # Each rank reports the count of all ranks, because users read rank 0's record.
    assert callback.cost().full()["refused_updates"] == refused[last]
    said = f"rank {last}: its update was refused: it held NaN or infinity in the gradient of {model.weights[0].path}.\n"
    assert (said in capfd.readouterr().err) == (hvdx.rank() == last)


def test_updates_that_overflow_are_refused_though_their_gradients_are_fine(capfd):
    def make():
        return keras.optimizers.SGD(1e38 if hvdx.rank() == 0 else 0.1)

    if hvdx.size() == 1:
        return
    model, optimizer = in_a_loop(hvdx.ParameterServer("colocated", codec="fp16"), make)
    train(model, optimizer, 2)
    hvd.flush(optimizer)
    assert is_finite(model.weights)
    assert_identical(model.weights)
    assert everyone(adapter_of(optimizer).cost().skipped) == [2, *[0] * (hvdx.size() - 1)]


# -- lists of variables in custom loops -------------------------------------------------------------------------------


def two_weights(strategy):
    """Return an optimiser, two weights, and a step that subtracts 1 from each element of the named weights."""
    weights = {name: keras.Variable(np.zeros(FEATURES, "float32"), name=name) for name in ("one", "two")}
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(list(weights.values()))
    optimizer = hvd.DistributedOptimizer(optimizer, strategy=strategy)

    traced = {}

    def step(*names):
        def apply():
            optimizer.apply([tf.ones(FEATURES)] * len(names), [weights[name] for name in names])

        # A function whose tracing an exception ended cannot be traced again.
        function = traced.pop(names, None) or tf.function(apply, autograph=False)
        function()
        traced[names] = function

    return optimizer, *weights.values(), step


@pytest.mark.graph
def test_lists_that_share_a_variable_are_refused_between_two_flushes():
    if hvdx.size() == 1:
        return
    optimizer, *_, step = two_weights(asynchronous())
    step("one", "two")
    with pytest.raises(ConfigError, match=r"variable two: expected it in one list.*keras\.flush") as caught:
        step("two")
    assert caught.value.collective
    hvd.flush(optimizer)
    # Both lists are open now, so the ranks need no further agreement.
    step("two")
    with pytest.raises(tf.errors.OpError, match=r"ConfigError: .* variable two"):
        step("one", "two")
    hvd.flush(optimizer)


def test_lists_that_share_a_variable_may_follow_each_other():
    optimizer, first, second, step = two_weights(hvdx.ParameterServer("colocated"))
    for _ in range(2):
        for names in (("one", "two"), ("two",)):
            step(*names)
            hvd.flush(optimizer)
    np.testing.assert_array_equal(first.numpy(), np.full(FEATURES, -2))
    np.testing.assert_array_equal(second.numpy(), np.full(FEATURES, -4))


def test_lists_without_common_variables_are_allowed_together():
    optimizer, first, second, step = two_weights(hvdx.ParameterServer("colocated"))
    for _ in range(2):
        for _ in range(3):
            step("one")
            step("two")
        hvd.flush(optimizer)
    for variable in (first, second):
        np.testing.assert_array_equal(variable.numpy(), np.full(FEATURES, -6))


def test_worker_without_a_step_before_the_first_flush_is_named_by_all():
    if hvdx.size() == 1:
        return
    optimizer, first, second, step = two_weights(asynchronous())
    hvd.flush(optimizer)  # does nothing if no worker has taken a step
    last = hvdx.size() - 1
    first_call = (lambda: hvd.flush(optimizer)) if hvdx.rank() == last else (lambda: step("one", "two"))
    with pytest.raises(
        ReplicaError, match=rf"optimizer sgd.*: .* got none of worker {last}, .*Take at least one step on each"
    ):
        first_call()
    # The workers can continue after the error.
    for _ in range(2):
        step("one", "two")
        hvd.flush(optimizer)
        if hvdx.rank() < last:
            step("one", "two")
        hvd.flush(optimizer)
    assert_identical([first, second])


# -- codecs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp16", "bf16", "threshold:0.2"])
def test_codecs_make_updates_smaller_and_training_still_learns(codec):
    model = network(keras.optimizers.SGD(0.3), lambda: keras.layers.Dense(64, "tanh"))
    callback, history, count = fit(model, asynchronous("scale", codec=codec), data(12), epochs=2)
    assert count.differing == [{}] * 2
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    if hvdx.size() > 1:
        (cost,) = callback.counters.telemetry
        numbers = cost.elements * cost.steps
        # Float32 takes four bytes an element; half-precision messages take two and a header.
        assert 0 < cost.messages < (2.5 if codec != "threshold:0.2" else 1.8) * numbers


def test_synchronous_with_half_precision_updates_is_near_all_reduce():
    served, reduced = network(OPTIMIZERS["momentum"]()), network(OPTIMIZERS["momentum"]())
    fit(served, synchronous(codec="fp16"))
    alone(reduced)
    models.assert_close(served, reduced, 2e-3)


class Look(keras.callbacks.Callback):
    """Callback that records the residual before the first step and after the last."""

    def residuals(self):
        exchange = getattr(adapter_of(self.model.optimizer), "exchange", None)
        return (
            np.zeros(0)
            if exchange is None
            else np.concatenate([a.ravel().astype("float64") for a in exchange.residuals])
        )

    def on_epoch_begin(self, epoch, logs=None):
        if not hasattr(self, "epoch"):
            self.epoch, self.before = epoch, self.residuals()

    def on_epoch_end(self, epoch, logs=None):
        self.after = self.residuals()


def test_residual_is_kept_from_fit_to_fit():
    model, first, then = network(OPTIMIZERS["sgd"]()), Look(), Look()
    fit(model, asynchronous(codec="threshold:0.05"), callbacks=[first])
    fit(model, asynchronous(codec="threshold:0.05"), callbacks=[then])
    if hvdx.size() > 1:
        assert np.abs(first.after).max() > 0
        np.testing.assert_array_equal(then.before, first.after)
        assert (then.after != then.before).any()


# -- telemetry --------------------------------------------------------------------------------------------------------


def test_telemetry_is_in_the_logs_and_adds_up():
    if hvdx.size() == 1:
        return
    model, seen = network(OPTIMIZERS["sgd"](), lambda: keras.layers.Dense(200)), []

    class Live(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(dict(logs))

    callback, history, _ = fit(model, asynchronous(), epochs=2, callbacks=[Live()])
    (cost,) = callback.counters.telemetry
    assert {"staleness", "MB_sent", "loss"} <= set(seen[0])
    counters = callback.cost().full()
    expected = {"max_staleness", "refused_updates", "updates_per_second", "ms_exchanging", "s_ending", "MB_received"}
    assert expected < {*counters} == {*ServerTelemetry().full()}
    assert {*counters} & {*history} == {"staleness", "MB_sent"}
    assert history["MB_sent"][-1] == pytest.approx(callback.counters.bytes_sent / 1e6)
    assert counters["updates_per_second"] > 0
    # Each rank has one server, which has seen every update.
    assert [server[0] for server in cost.servers] == list(range(hvdx.size()))
    assert sum(cost.staleness.values()) == cost.steps * hvdx.size()
    assert min(cost.staleness) >= 1
    assert counters["max_staleness"] == max(cost.staleness)
    assert all(working <= opened for *_, working, opened in cost.servers)
    # Sent and received bytes agree except for headers, and are near the expected number.
    specs = [TensorSpec(w.path, tuple(w.shape), 4) for w in model.trainable_weights]
    sent, received = sum(everyone(cost.sent)), sum(everyone(cost.received))
    each = 2 * 4 * sum(s.elements for s in specs) * (hvdx.size() - 1) / hvdx.size()
    expected = each * sum(everyone(cost.steps))
    assert sent == pytest.approx(received, rel=0.1)
    assert sent == pytest.approx(expected, rel=0.35)
    assert sent > expected


# -- checkpoints ------------------------------------------------------------------------------------------------------


def everything(model):
    return [*model.weights, *model.optimizer.variables]


@pytest.fixture
def folder(tmp_path):
    """Return one folder for all ranks."""
    return hvd.broadcast_object(tmp_path, 0) / "ckpt"


def saved_fit(model, strategy, folder, epochs, *callbacks, keep=3):
    # Shuffled, in an order that the checkpoint must save.
    examples = hvdx.shard(models.data(), BATCH), None
    return fit(model, strategy, examples, epochs, [hvd.Checkpoint(folder, keep=keep), *callbacks])


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("codec", ["none", "threshold:0.1"])
def test_synchronous_training_resumes_bit_for_bit(folder, codec):
    strategy = synchronous(codec=codec)
    straight = network(OPTIMIZERS["momentum"]())
    looked = Look()
    _, history, _ = saved_fit(straight, strategy, folder, 3, looked)
    if hvdx.rank() == 0:
        shutil.rmtree(folder / "epoch-0003")
    everyone("it is gone")
    resumed, look = network(OPTIMIZERS["momentum"](), seed=11 + hvdx.rank()), Look()
    callback, later, _ = saved_fit(resumed, strategy, folder, 3, look)
    assert look.epoch == 2
    assert later["loss"] == history["loss"][2:]
    for a, b in zip(everything(resumed), everything(straight), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    np.testing.assert_array_equal(look.after, looked.after)
    if hvdx.size() > 1:
        assert bool(np.abs(look.before).any()) == (codec != "none")
        assert callback.cost().full()["updates_per_second"] > 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_distributes_residuals(folder, ranks):
    strategy = synchronous(codec="threshold:0.1")
    saved_fit(network(OPTIMIZERS["momentum"]()), strategy, folder, 1)
    factor = int(ranks != hvdx.size())
    _, files = of_other_ranks(
        folder / "epoch-0001",
        ranks,
        lambda rank, arrays: {k: v * (rank * factor + 1) if k.endswith(".residual") else v for k, v in arrays.items()},
    )
    model, look = network(OPTIMIZERS["momentum"](), seed=8), Look()
    _, _, count = saved_fit(model, strategy, folder, 2, look)
    assert look.epoch == 1
    assert count.differing == [{}]
    if hvdx.size() > 1:
        names = sorted(n for n in files[0] if n.startswith("strategy.0.") and n.endswith(".residual"))
        expected = sum(np.concatenate([f[n].astype("float64") for n in names]) for f in files)
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(sum(everyone(look.before)), expected, rtol=1e-5, atol=1e-6)


def test_other_servers_and_codecs_resume_from_a_checkpoint(folder):
    def loop(strategy, seed):
        model, optimizer = in_a_loop(strategy, seed=seed)
        epoch = checkpoint.restore(folder, model) or 0
        exchange = getattr(adapter_of(optimizer), "exchange", None)
        residuals = [] if exchange is None else np.concatenate([a.ravel() for a in exchange.residuals])
        train(model, optimizer, STEPS)
        checkpoint.save(folder, model, epoch + 1)
        after = (
            [] if hvdx.size() == 1 else np.concatenate([a.ravel() for a in adapter_of(optimizer).exchange.residuals])
        )
        assert_identical(model.weights)
        return epoch, residuals, after

    _, _, after = loop(hvdx.ParameterServer("colocated:1", codec="threshold:0.1"), 3)
    epoch, before, _ = loop(hvdx.ParameterServer("colocated", codec="threshold:0.1"), 4)
    assert epoch == 1
    np.testing.assert_array_equal(before, after)
    assert loop(hvdx.ParameterServer("colocated"), 5)[0] == 2
    assert loop(hvdx.ParameterServer("colocated", codec="threshold:0.1"), 6)[0] == 3


def test_training_continues_from_a_checkpoint_restored_within_an_epoch(folder):
    model, optimizer = in_a_loop(asynchronous())
    train(model, optimizer, 2)
    checkpoint.save(folder, model, 1)
    saved = model.get_weights()
    train(model, optimizer, 2)
    checkpoint.restore(folder, model)
    for a, b in zip(model.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(a, b)
    optimizer.learning_rate = 0.0
    for variable in slots(optimizer):
        variable.assign(tf.zeros(variable.shape, variable.dtype))
    train(model, optimizer, 2)
    hvd.flush(optimizer)
    for a, b in zip(model.get_weights(), saved, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)


# -- errors on all ranks ----------------------------------------------------------------------------------------------


def test_workers_with_different_models_are_refused():
    if hvdx.size() == 1:
        return
    units = 4 + (hvdx.rank() == hvdx.size() - 1)
    with pytest.raises(ReplicaError, match="the models differ"):
        fit(network(OPTIMIZERS["sgd"](), lambda: keras.layers.Dense(units)), asynchronous())
    model = network(OPTIMIZERS["sgd"](), lambda: keras.layers.Dense(units))
    optimizer = hvd.DistributedOptimizer(model.optimizer, strategy=asynchronous())
    with pytest.raises(ReplicaError, match="exchange different variables"):
        train(model, optimizer, 1)


def test_workers_with_different_strategies_are_refused():
    if hvdx.size() == 1:
        return
    mine = asynchronous("scale" if hvdx.rank() else "plain")
    with pytest.raises(ReplicaError, match="different strategies"):
        fit(network(OPTIMIZERS["sgd"]()), mine)


def test_fit_ended_by_an_exception_leaves_nothing_behind():
    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == hvdx.rank() + 1:
                raise KeyboardInterrupt

    served, reduced = network(OPTIMIZERS["sgd"]()), network(OPTIMIZERS["sgd"]())
    with pytest.raises(KeyboardInterrupt):
        fit(served, asynchronous(), data(10), callbacks=[Break()])
    everyone("all were interrupted")
    served.set_weights(reduced.get_weights())
    models.compiled(served, served.optimizer)
    _, _, count = fit(served, synchronous())
    alone(reduced)
    models.assert_close(served, reduced, 1e-5)
    assert all_steps(count) == STEPS * hvdx.size()


@pytest.mark.parametrize("codec", ["none", "threshold:0.2"])
def test_fit_after_an_exception_restarts_a_scripts_own_optimizer(codec):
    """The first push must not include changes of the weights between the two fits."""

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == hvdx.rank() + 1:
                raise KeyboardInterrupt

    strategy = hvdx.ParameterServer("colocated", codec=codec)
    model, optimizer = in_a_loop(strategy, OPTIMIZERS["sgd"])
    with pytest.raises(KeyboardInterrupt):
        fit(model, strategy, data(10), callbacks=[Break()])
    everyone("all were interrupted")
    residuals = Look.residuals(type("", (), {"model": model}))
    wanted = [np.full_like(w, 3 + hvdx.rank()) for w in model.get_weights()]
    model.set_weights(wanted)
    models.compiled(model, optimizer)
    optimizer.learning_rate = 0.0
    look = Look()
    _, _, count = fit(model, strategy, callbacks=[look])
    assert count.differing == [{}]
    if hvdx.size() > 1:
        np.testing.assert_array_equal(look.before, residuals)
        assert bool(residuals.any()) == (codec != "none")
    elif codec != "none":
        return
    residual = sum(everyone(residuals - look.after)) / hvdx.size() if hvdx.size() > 1 else 0.0
    got = np.concatenate([w.ravel() for w in model.get_weights()])
    np.testing.assert_allclose(got, 3 + residual, atol=1e-5)
