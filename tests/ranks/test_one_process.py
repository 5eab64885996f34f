"""N workers are one process: the matrix of batches, losses, loops and optimisers, against plain Keras."""

# Tests: hvdx/keras/adapters/rows.py, hvdx/keras/fit/balance.py, hvdx/keras/fit/batches.py
# Tests: hvdx/keras/seams/losses.py

import functools
import time
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx.errors import ConfigError
from tests.ranks import models

STEPS, WORDS, WIDTH = 6, 7, 3
#: Rows of a step of all ranks together.
WHOLE = 12
# Rows in all: full batches; a last batch of some rows on each rank; one of fewer rows than ranks; ranks with batches of
# different sizes.
DIVISIONS = {"equal": 24, "last": 24 + 5, "idle": 24 + 1, "unequal": 24}


def rows(count):
    """Return inputs with trailing zeros, targets for each step and for each row, and weights."""
    random = np.random.default_rng(5)
    x = random.normal(size=(count, STEPS, WIDTH)).astype("float32")
    for row in x:
        row[random.integers(1, STEPS + 1) :] = 0
    return {
        "x": x,
        "steps": random.normal(size=(count, STEPS, 1)).astype("float32"),
        "classes": random.integers(0, 3, (count, 1)).astype("int32"),
        "targets": random.normal(size=(count, 1)).astype("float32"),
        "weights": random.uniform(0.1, 3, count).astype("float32"),
    }


class Step(keras.Model):
    """A training step of the user's own."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), weight)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        return {"loss": loss}


def network(*outputs, mask=False, kind=keras.Model):
    """Return a small model with regularised weights, rows that do not depend on the batch, and several outputs."""
    keras.utils.set_random_seed(1)
    x = keras.Input((STEPS, WIDTH))
    places = keras.layers.Embedding(STEPS, WIDTH)(keras.ops.arange(STEPS))
    hidden = keras.layers.Masking()(x) if mask else x
    hidden = hidden if mask else hidden + keras.ops.expand_dims(places, 0)
    hidden = keras.layers.SimpleRNN(4, return_sequences=True, kernel_regularizer="l2")(hidden)
    last = keras.layers.Flatten()(hidden) if not mask else keras.layers.GlobalAveragePooling1D()(hidden)
    ends = {
        "steps": lambda: keras.layers.Dense(1, name="steps")(hidden),
        "classes": lambda: keras.layers.Dense(3, name="classes")(last),
        "targets": lambda: keras.layers.Dense(1, name="targets")(last),
    }
    made = [ends[name]() for name in outputs]
    return kind(x, made if len(made) > 1 else made[0])


def dropping(y, p):
    """Return the errors of some rows only."""
    errors = tf.reduce_mean(tf.square(y - p), -1)
    return tf.boolean_mask(errors, y[:, 0] > -0.5)


def mse(reduction):
    return keras.losses.MeanSquaredError(reduction=reduction)


_CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
#: Outputs, options of `network`, loss, and names of further arguments of `fit`.
LOSSES = {
    "mean": (["targets"], {}, mse("sum_over_batch_size"), ()),
    "sum": (["targets"], {}, mse("sum"), ()),
    "weights": (["targets"], {}, mse("sum_over_batch_size"), ("weights",)),
    "sum, weights": (["targets"], {}, mse("sum"), ("weights",)),
    "mean of weights": (["targets"], {}, mse("mean_with_sample_weight"), ("weights",)),
    "class weights": (["classes"], {}, _CLASSES, ("classes",)),
    "mask": (["steps"], {"mask": True}, mse("sum_over_batch_size"), ()),
    "mask, sum": (["steps"], {"mask": True}, mse("sum"), ()),
    "mask, weights": (["steps"], {"mask": True}, mse("mean_with_sample_weight"), ("steps",)),
    "two outputs": (["steps", "targets"], {"mask": True}, [mse("sum_over_batch_size"), mse("sum")], ()),
    "a function": (["targets"], {}, lambda y, p: tf.reduce_mean(tf.square(y - p)), ()),
    "dropped rows": (["targets"], {}, dropping, ()),
}


def train(kind, division, outputs, options, loss, more, optimizer, callbacks, whole):
    """Train a model on this rank's batches, or as one process; return it and the losses of its epochs."""
    data = rows(DIVISIONS[division])
    y = tuple(data[name] for name in outputs)
    weights = np.repeat(data["weights"][:, None], STEPS, 1) if "steps" in more else data["weights"]
    arrays = (data["x"], y if len(y) > 1 else y[0]) + ((weights,) if {"weights", "steps"} & set(more) else ())
    model = network(*outputs, **options, kind=kind)
    model.compile(optimizer(), loss, loss_weights=[0.5, 2.0] if len(outputs) > 1 else None, run_eagerly=None)
    if whole and kind is keras.Model:
        # As hvdx does. Keras' ScheduleFreeAdamW takes its first state from the weights; built in a traced step it is 0.
        model.optimizer.build(model.trainable_variables)
    given = {"epochs": 2, "verbose": 0, "shuffle": False, "callbacks": callbacks}
    if "classes" in more:
        given["class_weight"] = {0: 0.3, 1: 1.0, 2: 2.5}
    if whole:
        fed = (tf.data.Dataset.from_tensor_slices(arrays).batch(WHOLE),)
    elif division == "unequal":
        sizes = np.bincount(np.minimum(np.arange(WHOLE) // 3, hvdx.size() - 1), minlength=hvdx.size())
        sizes[0] += sizes[-1] - 1
        sizes[-1] = 1
        begin = int(sizes[: hvdx.rank()].sum())
        mine = np.arange(DIVISIONS[division]).reshape(-1, WHOLE)[:, begin : begin + sizes[hvdx.rank()]].ravel()
        fed = tf.nest.map_structure(lambda a: a[mine], arrays)
        given |= {"batch_size": int(sizes[hvdx.rank()])}
        if len(arrays) > 2:
            given["sample_weight"] = fed[2]
        fed = fed[:2]
    else:
        drop = division == "equal"
        fed = (hvdx.shard(arrays, WHOLE // hvdx.size(), shuffle=False, drop_remainder=drop),)
    history = model.fit(*fed, **given).history
    return model, history["loss"]


SGD = functools.partial(keras.optimizers.SGD, 0.02, momentum=0.5)


def compare(*arguments, optimizer=SGD, strategy=None, what=""):
    """Train on all ranks and as one process, and compare weights and losses."""
    made, losses = train(*arguments, optimizer, [hvd.Distribute(strategy)], False)
    plain, expected = train(*arguments, optimizer, [], True)
    models.assert_identical(made)
    for mine, theirs in zip(made.get_weights(), plain.get_weights(), strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5 * scale, err_msg=what)
    if arguments[0] is keras.Model:
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=what)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setenv("HVDX_ALLOW_SEPARATE", "1")  # the one process


#: Batches, kind of step and losses that run in every suite; `test_whole_matrix` has all combinations.
CASES = {
    "idle, step": ("idle", Step, {"mean", "sum", "mask"}),
    "idle, fit": ("idle", keras.Model, {"mean", "sum, weights", "class weights", "mask, weights", "two outputs"}),
    "equal, fit": ("equal", keras.Model, {"sum", "mask"}),
    "last, fit": ("last", keras.Model, {"class weights", "mask, sum", "dropped rows"}),
    "unequal, step": ("unequal", Step, {"mean of weights", "a function"}),
    "unequal, fit": ("unequal", keras.Model, {"sum", "weights", "mask", "mean of weights", "dropped rows"}),
}


def compare_losses(division, kind, names):
    for name, case in LOSSES.items():
        # Of one row that is dropped one process, too, divides 0 by 0.
        if name in names and (name, division) != ("dropped rows", "idle"):
            compare(kind, division, *case, what=f"{name}, {division}")


@pytest.mark.graph
@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize("case", CASES)
def test_every_loss_is_that_of_one_process(case):
    compare_losses(*CASES[case])


@pytest.mark.sizes(0)  # it runs if it is named
@pytest.mark.parametrize("kind", [keras.Model, Step], ids=["fit", "step"])
@pytest.mark.parametrize("division", DIVISIONS)
def test_whole_matrix(division, kind):
    compare_losses(division, kind, LOSSES)
    for name, optimizer in optimizers():
        compare(kind, division, *LOSSES["mean"], optimizer=optimizer, what=name)


def optimizers():
    """Yield Keras' optimisers with arguments that make steps of a visible size."""
    for name in dir(keras.optimizers):
        kind = getattr(keras.optimizers, name)
        if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer):
            if name in ("Optimizer", "LossScaleOptimizer", "Muon", "MultiOptimizer"):
                continue
            yield name, functools.partial(kind, learning_rate=0.01)
    yield "clipped", functools.partial(keras.optimizers.Adam, 0.01, global_clipnorm=0.1)
    yield "accumulated", functools.partial(keras.optimizers.Adam, 0.01, gradient_accumulation_steps=2)
    yield "averaged", functools.partial(keras.optimizers.SGD, 0.02, use_ema=True, ema_momentum=0.5)


def test_optimizers_are_those_of_one_process():
    for name, optimizer in optimizers():
        if name in ("Adam", "Lamb", "clipped", "accumulated", "averaged"):
            compare(keras.Model, "idle", *LOSSES["mean"], optimizer=optimizer, what=name)


@pytest.mark.graph(every=True)
@pytest.mark.parametrize("strategy", ["all_reduce:engine=horovod", "all_reduce:engine=mpi,groups=2"])
def test_engines_agree(strategy):
    for name in ("mask", "sum"):
        compare(keras.Model, "idle", *LOSSES[name], strategy=strategy, what=name)


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("strategy", ["threshold", "parameter_averaging:period=2", "threshold:placement=gradient"])
def test_other_strategies_take_ranks_without_a_batch(strategy):
    made, losses = train(
        keras.Model, "idle", *LOSSES["mask"], functools.partial(keras.optimizers.Adam, 0.01),
        [hvd.Distribute(strategy)], False,
    )  # fmt: skip
    models.assert_identical(made, optimizer=False)
    assert losses[-1] < losses[0]


@pytest.mark.sizes(2, 4)
def test_loop_of_ones_own_counts_rows():
    data = rows(WHOLE)
    sizes = [WHOLE - hvdx.size() + 1] + [1] * (hvdx.size() - 1)
    begin = sum(sizes[: hvdx.rank()])
    mine = slice(begin, begin + sizes[hvdx.rank()])

    def loop(rows_of_step, optimizer, model):
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = mse("sum_over_batch_size")(data["targets"][rows_of_step], model(data["x"][rows_of_step]))
            hvd.count_samples(optimizer, len(data["x"][rows_of_step]))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return model

    made = loop(mine, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), network("targets"))
    plain = loop(slice(None), keras.optimizers.Adam(0.01), network("targets"))
    models.assert_close(made, plain, tolerance=1e-5)


class Slow(keras.Model):
    """A model that computes ten times as long on rank 1."""

    sizes: ClassVar[list[int]] = []

    def train_step(self, data):
        def pause(x):
            time.sleep(len(x) * (1e-2 if hvdx.rank() == 1 else 1e-3))
            self.sizes.append(len(x))
            return np.float32(0)

        tf.numpy_function(pause, [data[0]], tf.float32)
        return super().train_step(data)


@pytest.mark.graph
@pytest.mark.parametrize("of", [tuple, tf.data.Dataset.from_tensor_slices])
def test_a_slow_worker_takes_fewer_rows_of_the_same_step(of, capfd, monkeypatch):
    monkeypatch.setattr(Slow, "sizes", [])
    # Of 17 rows, one rank has one more from the beginning.
    together = 17 if of is tuple else 16
    data = rows(32 * together)
    arrays = of((data["x"], data["targets"]))
    made = network("targets", kind=Slow)
    made.compile(SGD(), "mse")
    most = {0: 14, 1: 5}.get(hvdx.rank(), 16) if of is not tuple else None
    share = hvdx.shard(arrays, global_batch_size=together, max_batch=most).map(lambda x, y: (x, y))
    made.fit(share, verbose=0, callbacks=[hvd.Distribute(check_every=1)])
    assert hvdx.rank() != 1 or Slow.sizes[-1] <= together // hvdx.size() // 2, Slow.sizes
    if most is None:
        assert ("worker 1 is" in capfd.readouterr().err) == (hvdx.rank() == 0)
    else:
        assert max(Slow.sizes) <= most
    plain = network("targets")
    plain.compile(SGD(), "mse")
    plain.fit(hvdx.shard(arrays, together, rank=0, size=1), verbose=0)
    models.assert_close(made, plain, tolerance=1e-5)


def test_rows_that_ranks_do_not_divide_need_a_free_batch_size():
    model = keras.Sequential([keras.Input((WIDTH,), batch_size=4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.zeros((4 * hvdx.size() + 1, WIDTH), "float32"), np.zeros((4 * hvdx.size() + 1, 1), "float32")
    share = hvdx.shard(data, global_batch_size=len(data[0]))
    assert next(iter(share))[0].shape[0] == 4 + (hvdx.rank() == hvdx.size() - 1)
    with pytest.raises(ConfigError, match=r'fixed batch size needs as many rows on all ranks.*balance="off"'):
        model.fit(share, verbose=0, callbacks=[hvd.Distribute()])


class Choosy(Step):
    """A model that takes no step on rows that are negative."""

    def train_step(self, data):
        step = super().train_step
        return {"loss": tf.cond(tf.reduce_all(data[0] >= 0), lambda: step(data)["loss"], lambda: 0.0)}


@pytest.mark.graph(every=True)
def test_step_that_only_some_ranks_take_is_an_error():
    inputs = keras.Input((1,))
    model = Choosy(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    x = np.ones((3, 1), np.float32)
    x[1] -= 2 * (hvdx.rank() == 1)
    with pytest.raises(tf.errors.UnknownError, match=r"ExchangeError: the all-reduce.*in step [23] of epoch 1"):
        model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=[hvd.Distribute()])
