"""Warnings and errors for ranks that train separately or hold NaN."""

# Tests: hvdx/keras/adapters/finite.py, hvdx/keras/separate.py

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx.errors import ReplicaError
from hvdx.keras import separate
from tests.ranks import models


def plain(optimizer="sgd", seed=0):
    return models.compiled(models.network(seed=seed), optimizer)


def from_config():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    return type(optimizer).from_config(optimizer.get_config())


@pytest.fixture(autouse=True)
def _script_combines_nothing(monkeypatch):
    monkeypatch.setattr(separate, "_script_combines", False)


def take_steps(optimizer):
    """Train in a loop of the script's own, with data of `hvdx.shard`."""
    model = models.network()
    for x, _ in hvdx.shard(models.data(), models.BATCH):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def fit(optimizer):
    model = models.compiled(models.network(), optimizer)
    for _ in range(2):
        models.fit(model, [], epochs=1)


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("train", [fit, take_steps])
@pytest.mark.parametrize("make", [keras.optimizers.Adam, from_config])
def test_ranks_that_train_separately_are_warned_once(train, make, capfd):
    """Rank 1 says it, since rank 0 may train another model alone."""
    train(make())
    said = capfd.readouterr().err
    for text in ("each train a model of their own", "callbacks=[hvdx.keras.Distribute()]", "hvdx.keras.prepare(model"):
        assert said.count(text) == (hvdx.rank() == 1)
    if hvdx.rank() == 0:
        train(keras.optimizers.SGD())
    assert "of their own" not in capfd.readouterr().err


def test_environment_allows_separate_training(capfd, monkeypatch):
    monkeypatch.setenv("HVDX_ALLOW_SEPARATE", "1")
    models.fit(plain(), [], epochs=1)
    assert "of their own" not in capfd.readouterr().err


class ByTape(keras.Model):
    """Model that combines gradients in a custom train_step."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(models.CLASSES)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.graph(every=True)
@pytest.mark.parametrize(
    "how",
    {
        "callback": lambda: (plain(), hvd.Distribute()),
        "optimizer": lambda: (plain(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))),),
        "tape": lambda: (models.compiled(ByTape(), "sgd"),),
    }.values(),
)
def test_ranks_that_train_together_are_not_warned(how, capfd):
    model, *callbacks = how()
    for _ in range(2):  # in the second fit nothing may be traced again
        models.fit(model, callbacks, epochs=1)
    assert "of their own" not in capfd.readouterr().err


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("check_every", ["epoch", 1])
def test_nan_of_one_rank_is_found_with_its_step_and_its_variable(check_every):
    last = hvdx.size() - 1
    x, y = models.data(models.BATCH * models.STEPS)
    if hvdx.rank() == last:
        x[2 * models.BATCH, 1] = np.nan
    model = keras.Sequential([keras.Input((models.FEATURES,)), keras.layers.Dense(4, "relu", name="first"),
                              keras.layers.Dense(models.CLASSES)])  # fmt: skip
    models.compiled(model, "sgd")
    taken = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: taken.append(batch))
    with pytest.raises(
        ReplicaError, match=rf"NaN or infinity after .*step 3 of this fit on rank {last}, .*first/kernel"
    ):
        model.fit(x, y, batch_size=models.BATCH, epochs=2, shuffle=False, verbose=0,
                  callbacks=[hvd.Distribute(check_every=check_every), count])  # fmt: skip
    assert len(taken) == (models.STEPS if check_every == "epoch" else 2)


def test_weights_that_a_callback_of_rank_0_restores_reach_all():
    """Like Horovod, hvdx broadcasts after all callbacks have begun."""

    class Restore(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            if hvdx.rank() == 0:
                self.model.set_weights([w + 1 for w in self.model.get_weights()])

    model = plain(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), seed=hvdx.rank())
    expected = [w + 1 for w in hvd.broadcast_object(model.get_weights(), 0)]
    models.fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Restore()], epochs=1)
    for mine, its in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(mine, its)
