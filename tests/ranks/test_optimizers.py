"""Training on N ranks with batches of b equals training on one rank with batches of N*b."""

# Tests: hvdx/keras/adapters/graph.py, hvdx/keras/distribute.py

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.errors import ConfigError, HvdxError, ReplicaError
from hvdx.keras.adapters.graph import GraphAdapter
from hvdx.keras.adapters.optimizer import adapter_of
from tests.ranks import models

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipped": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
}


def trained_like_one_process(make, layers=(), tolerance=2e-5, distribute=None, **compile_options):
    """Train both ways from the same weights and compare; return the distributed model."""
    model = models.compiled(models.network(*layers, seed=hvdx.rank()), make(), **compile_options)
    models.fit(model, [distribute or hvd.Distribute()])
    models.assert_identical(model)
    models.assert_close(model, one_process(make, tuple(layers), **compile_options), tolerance)
    return model


@functools.cache
def one_process(make, layers, **compile_options):
    """Return the model that one process trains, cached for all tests that compare with it."""
    reference = models.compiled(models.network(*layers, seed=0), make(), **compile_options)
    models.fit(reference, [], share=False)
    return reference


@pytest.mark.graph
@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_distribute_equals_one_process_with_the_whole_batch(name):
    trained_like_one_process(OPTIMIZERS[name])


@pytest.mark.graph(every=True)
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("options", ["", ",groups=3", ",compression=bf16"])
def test_horovod_equals_one_process_with_the_whole_batch(options):
    tolerance = 3e-2 if "bf16" in options else 2e-5
    distribute = hvd.Distribute(f"all_reduce:engine=horovod{options}")
    trained_like_one_process(OPTIMIZERS["momentum"], tolerance=tolerance, distribute=distribute)


@pytest.mark.graph(every=True)
def test_mpi_keeps_the_order_of_two_optimizers_and_their_loss_scales():
    """The collectives are inside conditions, which TensorFlow could run in any order."""
    model = models.TwoPlayers()
    model.compile(momentum=0.9)
    model.optimizer = keras.optimizers.LossScaleOptimizer(model.optimizer)
    model.other_optimizer = keras.optimizers.LossScaleOptimizer(model.other_optimizer)
    models.fit(model, [hvd.Distribute("all_reduce:engine=mpi")])
    models.assert_identical(model)


@pytest.mark.graph
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("options", ["engine=horovod,compression=fp16", "groups=3"])
def test_distribute_with_options_keeps_replicas_identical(options):
    spec, tolerance = f"all_reduce:{options}", 2e-5 if "groups" in options else 3e-2
    trained_like_one_process(OPTIMIZERS["momentum"], tolerance=tolerance, distribute=hvd.Distribute(spec))


@pytest.mark.sizes(2, 4)
def test_distribute_sum_adds_gradients_up():
    model = models.compiled(models.network(seed=hvdx.rank()), keras.optimizers.SGD(0.1 / hvdx.size()))
    models.fit(model, [hvd.Distribute(hvdx.AllReduce(op="sum"))])
    reference = models.compiled(models.network(seed=0), keras.optimizers.SGD(0.1))
    models.fit(reference, [], share=False)
    models.assert_close(model, reference)


@pytest.mark.graph
def test_gradient_accumulation_exchanges_once_per_update():
    callback = hvd.Distribute()
    trained_like_one_process(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), distribute=callback)
    if hvdx.size() > 1:
        assert callback.counters.exchanges == callback.counters.steps // 4


def test_gradient_accumulation_may_be_under_way_when_replicas_are_compared():
    """An epoch is not a multiple of five steps, so at its end gradients are half accumulated."""

    def make():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=5)

    model = models.compiled(models.network(seed=hvdx.rank()), make())
    models.fit(model, [hvd.Distribute(check_every=1)], epochs=1)
    models.fit(model, [hvd.Distribute(check_every=1)], epochs=2)
    reference = models.compiled(models.network(seed=0), make())
    models.fit(reference, [], share=False, epochs=1)
    models.fit(reference, [], share=False, epochs=2)
    models.assert_close(model, reference)


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("average", [True, False])
def test_backward_passes_per_step_sums_or_averages(average):
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    model = models.compiled(models.network(seed=0), optimizer)
    models.fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    # Keras averages accumulated gradients; their sum equals a rate twice as large.
    rate = 0.1 if average or hvdx.size() == 1 else 0.2
    reference = models.compiled(models.network(seed=0), keras.optimizers.SGD(rate, gradient_accumulation_steps=2))
    models.fit(reference, [], share=False)
    models.assert_identical(model)
    models.assert_close(model, reference)


@pytest.mark.graph
@pytest.mark.sizes(2, 4)
def test_mixed_float16_overflow_on_one_rank_skips_the_step_on_all():
    keras.config.set_dtype_policy("mixed_float16")
    model = models.compiled(models.network(seed=0), keras.optimizers.SGD(0.1, momentum=0.9))
    x, y = models.data(16)
    if hvdx.rank() == hvdx.size() - 1:
        x = x * np.float32(1e30)
    before = model.get_weights()
    model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=[hvd.Distribute()])
    models.assert_identical(model)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(model.optimizer.dynamic_scale) == 2.0**14


def test_mixed_float16_trains():
    keras.config.set_dtype_policy("mixed_float16")
    model = models.compiled(models.network(seed=0), keras.optimizers.Adam(0.01))
    before = model.get_weights()
    history = models.fit(model, [hvd.Distribute()], epochs=3).history["loss"]
    models.assert_identical(model)
    assert history[-1] < history[0]
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


def test_mixed_float16_through_distributed_optimizer_agrees_too():
    keras.config.set_dtype_policy("mixed_float16")
    model = models.compiled(models.network(seed=0), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x, y = models.data(16)
    if hvdx.rank() == hvdx.size() - 1:
        x = x * np.float32(1e30)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    models.assert_identical(model)


def test_mixed_float16_wrapped_too_late_is_refused():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    keras.config.set_dtype_policy("mixed_float16")
    model = models.compiled(models.network(seed=0), optimizer)
    keras.config.set_dtype_policy("float32")
    if hvdx.size() == 1:
        models.fit(model, [])
    else:
        with pytest.raises(ConfigError, match="LossScaleOptimizer"):
            models.fit(model, [])


@pytest.mark.graph
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_jit_compile_is_switched_off_and_back_on(capsys):
    def make():
        return keras.optimizers.SGD(0.1)

    model = trained_like_one_process(make, jit_compile=True)
    assert model.jit_compile is True
    if hvdx.size() > 1 and hvdx.rank() == 0:
        assert "jit_compile is off" in capsys.readouterr().err


def test_run_eagerly_trains_the_same():
    trained_like_one_process(OPTIMIZERS["momentum"], run_eagerly=True)


@pytest.mark.graph
def test_steps_per_execution_trains_the_same():
    trained_like_one_process(OPTIMIZERS["momentum"], steps_per_execution=2)


def test_frozen_layer_stays_as_rank_0_has_it():
    def frozen():
        return keras.layers.Dense(5, trainable=False)

    model = models.compiled(models.network(frozen, seed=hvdx.rank()), OPTIMIZERS["momentum"]())
    models.fit(model, [hvd.Distribute()])
    models.assert_identical(model)
    untouched = models.network(frozen, seed=0)
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], untouched.layers[0].get_weights()[0])


# No case has sparse="dense" and Adam: for repeated rows Keras' Adam takes another step than for the whole table.
@pytest.mark.graph
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize(("sparse", "name"), [("gather", "momentum"), ("gather", "adam"), ("dense", "momentum")])
def test_embedding_rows_are_exchanged(sparse, name):
    make = OPTIMIZERS[name]

    def build(seed):
        keras.utils.set_random_seed(seed)
        words = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(20, 4), keras.layers.Flatten()]
        return models.compiled(keras.Sequential([*words, keras.layers.Dense(models.CLASSES)]), make())

    words = np.random.default_rng(3).integers(0, 20, (48, 3)).astype("int32")
    classes = words.sum(axis=1) % models.CLASSES
    model = build(hvdx.rank())
    share = hvdx.shard((words, classes), 4)
    model.fit(share, epochs=2, verbose=0, shuffle=False, callbacks=[hvd.Distribute(hvdx.AllReduce(sparse=sparse))])
    models.assert_identical(model)
    reference = build(0)
    whole = hvdx.shard((words, classes), 4 * hvdx.size(), rank=0, size=1)
    reference.fit(whole, epochs=2, verbose=0, shuffle=False)
    models.assert_close(model, reference)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_variable_without_gradient_is_left_alone():
    class Idle(keras.layers.Layer):
        def build(self, shape):
            self.idle = self.add_weight(shape=(3,), name="idle")

        def call(self, x):
            return x

    trained_like_one_process(OPTIMIZERS["momentum"], layers=[Idle, lambda: keras.layers.Dense(5)])


@pytest.mark.graph
@pytest.mark.parametrize("marked_as_built", [False, True])
def test_custom_train_step_with_two_optimizers_in_an_unbuilt_model(marked_as_built):
    """Keras marks a subclass as built by `build` even where its layers get their weights in the first step."""

    class Pairs(models.TwoPlayers):
        def apply_other(self, gradients, variables):
            self.other_optimizer.apply_gradients(zip(gradients, variables, strict=True))

    keras.utils.set_random_seed(hvdx.rank())
    model = Pairs()
    if marked_as_built:
        model.build((None, models.FEATURES))
        assert model.built
        assert not model.weights
    model.compile()
    history = models.fit(model, [hvd.Distribute()], epochs=3).history["my_loss"]
    models.assert_identical(model)
    assert len(set(map(tuple, _everyone(history)))) == 1


class Lazy(keras.Model):
    """Model that has some of its weights after `build`; the first step makes the others."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(5), keras.layers.Dense(models.CLASSES)

    def build(self, shape):
        self.first.build(shape)
        self.built = True

    def call(self, x):
        return self.second(self.first(x))


@pytest.mark.graph
@pytest.mark.parametrize("strategy", ["all_reduce:engine=mpi", "threshold"])
def test_subclass_with_some_weights_after_build(strategy):
    keras.utils.set_random_seed(hvdx.rank())
    model = Lazy()
    model.build((None, models.FEATURES))
    assert (model.built, len(model.weights)) == (True, 2)
    model.compile(OPTIMIZERS["momentum"](), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    models.fit(model, [hvd.Distribute(strategy)])
    models.assert_identical(model, optimizer=strategy != "threshold")
    assert len(model.weights) == 4


def _everyone(value):
    return world.start().all_gather_object(value, "test")


@pytest.mark.graph
def test_model_compiled_twice_and_fitted_twice():
    callback = hvd.Distribute()
    model = models.compiled(models.network(seed=hvdx.rank()), OPTIMIZERS["momentum"]())
    models.fit(model, [callback])
    models.fit(model, [callback])
    models.compiled(model, OPTIMIZERS["adam"]())
    models.fit(model, [hvd.Distribute()])
    models.assert_identical(model)

    reference = models.compiled(models.network(seed=0), OPTIMIZERS["momentum"]())
    models.fit(reference, [], share=False)
    models.fit(reference, [], share=False)
    models.compiled(reference, OPTIMIZERS["adam"]())
    models.fit(reference, [], share=False)
    models.assert_close(model, reference)


def test_fit_without_the_callback_afterwards_trains_alone():
    model = models.compiled(models.network(seed=0), OPTIMIZERS["momentum"]())
    models.fit(model, [hvd.Distribute()])
    assert adapter_of(model.optimizer) is None
    if hvdx.rank() == 0:
        models.fit(model, [])


@pytest.mark.sizes(2, 4)
def test_rank_without_a_batch_takes_part_in_the_steps_of_the_others():
    x, y = models.data()
    batches = 3 + hvdx.rank()
    model = models.compiled(models.network(seed=hvdx.rank()), OPTIMIZERS["momentum"]())
    callback = hvd.Distribute()
    samples = batches * 4
    model.fit(x[:samples], y[:samples], batch_size=4, epochs=3, verbose=0, callbacks=[callback])
    models.assert_identical(model)
    longest = 3 + hvdx.size() - 1
    assert callback.counters.steps == 3 * longest
    assert int(model.optimizer.iterations) == 3 * longest


def test_unknown_number_of_steps_is_refused_on_all_ranks():
    dataset = tf.data.Dataset.from_tensor_slices(models.data()).batch(4).filter(lambda x, y: True)
    model = models.compiled(models.network(), OPTIMIZERS["sgd"]())
    if hvdx.size() == 1:
        model.fit(dataset, verbose=0, callbacks=[hvd.Distribute()])
    else:
        with pytest.raises(ReplicaError, match="steps_per_epoch"):
            model.fit(dataset, verbose=0, callbacks=[hvd.Distribute()])
        model.fit(dataset.repeat(), steps_per_epoch=3, verbose=0, callbacks=[hvd.Distribute()])
        models.assert_identical(model)


@pytest.mark.graph
def test_partial_last_execution_does_not_count_as_full():
    """Keras counts 6 batches in executions of 4 as 8 steps; the rank with only 6 must raise."""
    x, y = models.data(32)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    batches = batches.take(6) if hvdx.rank() == hvdx.size() - 1 else batches
    model = models.compiled(models.network(seed=0), OPTIMIZERS["sgd"](), steps_per_execution=4)
    if hvdx.size() == 1:
        model.fit(batches, steps_per_epoch=8, verbose=0, shuffle=False, callbacks=[hvd.Distribute()])
    elif hvdx.rank() == hvdx.size() - 1:
        callback = hvd.Distribute()
        callback._sync.params = {"steps": 8}
        with pytest.raises(HvdxError, match="ran out of data after 6 of 8"):
            callback._sync.check_enough(6)


@pytest.mark.graph
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_steps_are_counted_within_executions():
    """All steps count, skipped and accumulated ones too."""
    for policy, optimizer in (
        ("float32", keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
        ("mixed_float16", keras.optimizers.SGD(0.1)),
    ):
        keras.config.set_dtype_policy(policy)
        model = models.compiled(models.network(seed=0), optimizer, steps_per_execution=4)
        x, y = models.data(24)
        counted = []

        class Look(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None, counted=counted):
                adapter = adapter_of(self.model.optimizer)
                counted.append(int(adapter.steps.numpy()) if adapter else None)

        x = x * np.float32(1e30) if hvdx.rank() == 0 else x
        model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[hvd.Distribute(check_every=None), Look()])
        assert counted == ([6, 12] if hvdx.size() > 1 else [None, None])


@pytest.mark.graph
def test_first_group_is_sent_before_the_last_gradient_is_computed():
    """The first collective of two must not wait for the gradients of the second."""
    if hvdx.size() == 1:
        return
    optimizer = keras.optimizers.SGD()
    adapter = GraphAdapter(hvdx.AllReduce(groups=2), world.graph(), optimizer, "groups")

    @tf.function
    def step(a, b):
        return adapter.gradients([tf.identity(a, name="early"), tf.identity(b, name="late")])

    graph = step.get_concrete_function(tf.zeros(3), tf.zeros(3)).graph
    collectives = [op for op in graph.get_operations() if op.type == "HorovodGroupedAllreduce"]
    assert len(collectives) == 2
    for collective, own, other in zip(collectives, ("early", "late"), ("late", "early"), strict=True):
        ancestors, todo = set(), [collective]
        while todo:
            op = todo.pop()
            if op.name not in ancestors:
                ancestors.add(op.name)
                todo += [t.op for t in op.inputs] + list(op.control_inputs)
        assert own in ancestors
        assert other not in ancestors


def test_optimizers_in_containers_and_layers_take_part():
    class Nested(models.TwoPlayers):
        def compile(self):
            super().compile()
            self.more = {"list": [self.other_optimizer]}
            self.other_optimizer = None

        def apply_other(self, gradients, variables):
            self.more["list"][0].apply(gradients, variables)

    model = Nested()
    model.compile()
    models.fit(model, [hvd.Distribute(check_every=None)])
    models.assert_identical(model)


def test_optimizer_of_optimizers_is_refused():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    several = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    if hvdx.size() > 1:
        with pytest.raises(ConfigError, match="MultiOptimizer"):
            hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(several))


@pytest.mark.graph
def test_float8_is_refused_before_the_first_step():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16)])
    model.quantize("float8")
    model.compile("sgd", "mse")
    if hvdx.size() > 1:
        with pytest.raises(ConfigError, match="float8 scales"):
            model.fit(np.ones((8, 16)), np.ones((8, 16)), verbose=0, callbacks=[hvd.Distribute()])


def test_two_strategies_for_one_optimizer_are_refused():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.Compression.fp16)
    model = models.compiled(models.network(), optimizer)
    if hvdx.size() > 1:
        with pytest.raises(ConfigError, match="already"):
            models.fit(model, [hvd.Distribute(hvdx.AllReduce())])
