"""Small models and data for the tests on ranks, and the single process that the tests compare them with."""

import keras
import numpy as np
import tensorflow as tf

import hvdx
from hvdx import comm as world
from hvdx.keras.adapters.optimizer import adapter_of, optimizers_of
from hvdx.keras.fit import replicas

FEATURES, CLASSES, BATCH = 6, 3, 4
# Steps of each rank in an epoch.
STEPS = 4


def samples():
    """Return the number of samples of all ranks in an epoch."""
    return STEPS * BATCH * hvdx.size()


def data(count=None):
    """Return the samples of an epoch, or `count` samples; the same on all ranks."""
    random = np.random.default_rng(7)
    x = random.normal(size=(samples() if count is None else count, FEATURES)).astype("float32")
    return x, (x[:, 0] + 2 * x[:, 1] > 0).astype("int64") + (x[:, 2] > 1)


def network(*make_layers, seed=0):
    """Build a network; layers draw their weights from the seed when they are made."""
    keras.utils.set_random_seed(seed)
    body = [make() for make in make_layers] or [keras.layers.Dense(5, activation="tanh")]
    return keras.Sequential([keras.Input((FEATURES,)), *body, keras.layers.Dense(CLASSES)])


def compiled(model, optimizer, **options):
    """Compile for classification, and build the optimiser, because a step that builds it would be traced twice."""
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    if model.built and adapter_of(model.optimizer) is None:
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model, callbacks, epochs=2, share=True, **options):
    """Train on this rank's share, or on all data in batches of the whole world."""
    size = hvdx.size()
    if share:
        batches = hvdx.shard(data(), BATCH)
    else:
        batches = hvdx.shard(data(), BATCH * size, rank=0, size=1)
    return model.fit(batches, epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False, **options)


def assert_identical(model, optimizer=True):
    """Assert that a model has the same bits on all ranks."""
    variables = list(model.weights)
    if optimizer:
        variables += [v for o in optimizers_of(model) for v in o.variables]
    assert replicas.differing(variables, world.start()) == {}


def assert_close(model, reference, tolerance=2e-5):
    """Assert that the weights of two models agree within float rounding."""
    for a, b in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class TwoPlayers(keras.Model):
    """Model with a custom train_step and two optimisers, each for a part of the weights, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(CLASSES)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def compile(self, momentum=0.0):
        super().compile(optimizer=keras.optimizers.SGD(0.1, momentum=momentum))
        self.other_optimizer = keras.optimizers.Adam(0.01)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.loss_fn(y, self(x, training=True))
        mine, others = self.first.trainable_variables, self.second.trainable_variables
        self.optimizer.apply(tape.gradient(loss, mine), mine)
        self.apply_other(tape.gradient(loss, others), others)
        return {"my_loss": loss}

    def apply_other(self, gradients, variables):
        self.other_optimizer.apply(gradients, variables)
