"""Weights without a gradient that belong to a rank, or that count over all ranks; values that a train_step returns."""

# Tests: hvdx/keras/adapters/rank_local.py, hvdx/keras/distribute.py, hvdx/keras/fit/state.py

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.errors import ConfigError
from tests.ranks import models

QUEUE, EPOCHS = 12, 2


class Contrastive(keras.Model):
    """Model with a queue of unit vectors, as in NNCLR and MoCo, and with counters of samples."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.layers.Dense(4)
        self.memory = keras.layers.Layer(name="memory")
        self.queue = self.memory.add_weight(shape=(QUEUE, 4), initializer=_unit_vectors, trainable=False, name="queue")
        self.seen = self.add_weight(shape=(), initializer="zeros", dtype="int64", trainable=False, name="seen")
        self.seen_as_float = self.add_weight(shape=(2,), initializer="zeros", trainable=False, name="by_parity")
        self.last = self.add_weight(shape=(), initializer="zeros", dtype="int64", trainable=False, name="last")
        self.compile(keras.optimizers.SGD(0.1))

    def call(self, x):
        return self.encoder(x)

    def train_step(self, data):
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        with tf.GradientTape() as tape:
            z = keras.ops.normalize(self.encoder(x), axis=1)
            similarity = keras.ops.max(keras.ops.matmul(z, keras.ops.transpose(self.queue)), axis=1)
            loss = -keras.ops.mean(similarity)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.queue.assign(keras.ops.concatenate([z, self.queue[: -z.shape[0]]], axis=0))
        self.seen.assign_add(z.shape[0])
        self.seen_as_float.assign_add([1.0, 0.0])
        self.last.assign(hvdx.rank())
        return {
            "loss": loss,
            "each": similarity,
            "ragged": similarity[: 1 + hvdx.rank()],
            "rank": tf.constant([hvdx.rank(), 1]),
        }


def _unit_vectors(shape, dtype=None):
    return keras.ops.normalize(keras.random.normal(shape, dtype=dtype), axis=1)


def _model(seed, built=True):
    keras.utils.set_random_seed(seed)
    model = Contrastive()
    if built:
        model(np.zeros((models.BATCH, models.FEATURES), "float32"))
    return model


def _fit(model, *callbacks, epochs=EPOCHS):
    return model.fit(hvdx.shard(models.data()[0], models.BATCH), epochs=epochs, verbose=0, callbacks=callbacks).history


def _everywhere(value):
    return world.start().all_gather_object(np.asarray(value), "test")


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("strategy", ["all_reduce:engine=mpi", "threshold:max_staleness=inf"])
def test_queue_stays_on_its_rank_and_counters_are_summed(strategy, tmp_path, capfd):
    folder = hvd.broadcast_object(str(tmp_path), 0)
    model = _model(seed=hvdx.rank(), built=strategy.startswith("all_reduce"))
    callback = hvd.Distribute(strategy, local=[model.memory], summed=[model.seen, model.seen_as_float])
    logs = _fit(model, callback, hvd.Checkpoint(folder))
    # The queue keeps its unit vectors, and each rank its own.
    queues = _everywhere(model.queue)
    np.testing.assert_allclose(np.linalg.norm(queues, axis=2), 1.0, rtol=1e-5)
    assert all((queue != queues[0]).any() for queue in queues[1:])
    # The counters are those of one process.
    steps = EPOCHS * models.STEPS * hvdx.size()
    assert [int(seen) for seen in _everywhere(model.seen)] == [steps * models.BATCH] * hvdx.size()
    assert _everywhere(model.seen_as_float)[-1].tolist() == [steps, 0.0]
    # Another integer becomes that of rank 0, which says so.
    assert [int(last) for last in _everywhere(model.last)] == [0] * hvdx.size()
    told = capfd.readouterr().err
    assert ("last: different on the ranks" in told) == (hvdx.rank() == 0)
    # A checkpoint holds the queue of each rank.
    again = _model(seed=9)
    restarted = hvd.Distribute(strategy, local=[again.queue], summed=[again.seen])
    _fit(again, restarted, hvd.Checkpoint(folder))
    np.testing.assert_array_equal(again.queue, model.queue)
    assert int(again.seen) == int(model.seen)
    # Arrays that a train_step returns become the mean, element by element.
    for name in ("loss", "each", "ragged", "rank"):
        everyone = _everywhere(logs[name])
        assert all(np.array_equal(theirs, everyone[0]) for theirs in everyone), name
    np.testing.assert_allclose(logs["rank"][-1], [(hvdx.size() - 1) / 2, 1])
    # One line in a process, so the second case prints none.
    assert ("'ragged'" in told) == (hvdx.rank() == 0 and strategy.startswith("all_reduce"))


@pytest.mark.sizes(1, 2)
def test_wrong_lists_are_refused():
    model = _model(seed=0)
    kernel = model.encoder.kernel
    for options, expected in (
        ({"local": "queue"}, "expected variables or layers"),
        ({"local": [kernel]}, "expected a weight that no gradient reaches, got a trainable one"),
        ({"summed": [keras.Variable(1.0)]}, "the model does not track"),
        ({"local": model.queue, "summed": [model.memory]}, "in both"),
    ):
        with pytest.raises(ConfigError, match=expected):
            _fit(model, hvd.Distribute("all_reduce:engine=mpi", **options))


class _Fits(keras.callbacks.Callback):
    """Callback that trains the same model in the middle of an epoch."""

    def __init__(self, *callbacks):
        super().__init__()
        self.callbacks = callbacks

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            _fit(self.model, *self.callbacks, epochs=1)


def test_nested_fit_of_the_same_model():
    model = _model(seed=0)
    with pytest.raises(ConfigError, match="one inside another"):
        _fit(model, hvd.Distribute("all_reduce:engine=mpi"), _Fits(hvd.Distribute("all_reduce:engine=mpi")))
    # A fit after an exception is no nested one.
    _fit(model, hvd.Distribute("all_reduce:engine=mpi"))
    models.assert_identical(model)
