"""Random numbers in the training step: different on each rank, and the same when the training is repeated."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from tests.ranks import models

KINDS = ("Dropout", "tf.random", "keras.random")


class Noisy(keras.layers.Layer):
    """Layer that stores the last numbers that it drew."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)
        self.seen = [tf.Variable(tf.zeros([32])) for _ in KINDS]

    def call(self, x, training=False):
        if training:
            drawn = self.dropout(tf.ones([32]), training=True), tf.random.normal([32]), keras.random.normal([32])
            for variable, numbers in zip(self.seen, drawn, strict=True):
                variable.assign(numbers)
        return x


def two_fits():
    """Return the noise at the end of two fits, and some numbers that the script draws after them."""
    hvdx.init(seed=5)
    noisy = Noisy()
    model = models.compiled(models.network(lambda: noisy, seed=5), "sgd")
    found = []
    probe = models.compiled(models.network(seed=6), "sgd")

    class Probe(keras.callbacks.Callback):
        """Callback that trains another model after the first epoch."""

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                models.fit(probe, [hvd.Distribute()], epochs=1)

    for _ in range(2):
        models.fit(model, [hvd.Distribute(), Probe()], epochs=2)
        found.append([variable.numpy().tolist() for variable in noisy.seen])
    return found, keras.random.uniform([4]).numpy().tolist()


@pytest.mark.graph(every=True)
@pytest.mark.sizes(2, 4)
def test_noise_differs_by_rank_and_fit_and_is_repeatable():
    found, after = two_fits()
    everyone = world.start().all_gather_object((found, after), "test")
    for i, kind in enumerate(KINDS):
        drawn = [tuple(fit[i]) for fits, _ in everyone for fit in fits]
        assert np.ptp(drawn[0]) > 0
        assert len(set(drawn)) == len(drawn), kind
    assert all(numbers == after for _, numbers in everyone)
    assert two_fits() == (found, after)
