"""`evaluate` and `predict` over all ranks, beside one process with all of the data."""

# Tests: hvdx/keras/inference.py

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx.errors import ConfigError, HvdxError, ReplicaError
from tests.ranks import models


def classifier(seed=0):
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")]
    return models.compiled(models.network(seed=seed), keras.optimizers.SGD(0.1), metrics=metrics)


@pytest.mark.sizes(1, 2, 4)
def test_results_are_those_of_one_process_in_the_order_of_the_data():
    model = classifier()
    # Neither the ranks nor the batches divide 23 samples evenly.
    x, y = models.data(23)
    alone = model.predict(x, verbose=0)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    samples = tf.data.Dataset.from_tensor_slices((x, y))
    for data, batch in (
        (x, 4),
        ((x, y), None),
        (samples, 4),
        (samples.batch(5), None),
        (samples.map(lambda x, y: x), 30),
    ):
        np.testing.assert_allclose(hvd.predict(model, data, batch), alone, rtol=1e-5, atol=1e-6)
        if not isinstance(data, np.ndarray) and batch != 30:
            found = hvd.evaluate(model, data, batch)
            assert found == pytest.approx(expected, rel=1e-5)
    # One sample: the other ranks have none.
    np.testing.assert_allclose(hvd.predict(model, x[:1]), alone[:1], rtol=1e-5)
    two = keras.Model(model.inputs, {"a": model.outputs[0], "b": [model.outputs[0] * 2]})
    found = hvd.predict(two, x, 3)
    np.testing.assert_allclose(found["b"][0], 2 * alone, rtol=1e-5, atol=1e-6)


class Fails(keras.Model):
    """Model that fails on rank 1."""

    def build(self, shape):
        self.built = True

    def call(self, x):
        if hvdx.rank() == 1:
            raise ValueError("on purpose")
        return x


def test_errors_are_raised_on_all_ranks_and_name_one():
    model, rank = classifier(), hvdx.rank()
    x, y = models.data(8)
    failing = Fails()
    failing.build((None, models.FEATURES))
    with pytest.raises(HvdxError, match=r"(?s)rank 1 of 2: predict: ValueError: .*on purpose"):
        hvd.predict(failing, x)
    with pytest.raises(ReplicaError, match=r"expected the same data on all ranks, got \[8, 7\] elements"):
        hvd.predict(model, x[rank:])
    with pytest.raises(ReplicaError, match=r"expected the same weights on all ranks, got .* on ranks \[1\]"):
        hvd.predict(classifier(seed=rank), x)
    with pytest.raises(ConfigError, match="rank 0 of 2: evaluate: expected all of the data, got a share"):
        hvd.evaluate(model, hvdx.shard((x, y), 2))
    with pytest.raises(ConfigError, match=r"rank 1 of 2: predict: expected a dataset of known size"):
        hvd.predict(model, tf.data.Dataset.from_tensor_slices(x).batch(2 - rank).repeat(None if rank else 1))
    with pytest.raises(ConfigError, match="rank 0 of 2: predict: expected a dataset whose order is the same"):
        hvd.predict(model, tf.data.Dataset.from_tensor_slices(x).map(abs, num_parallel_calls=2, deterministic=False))
    with pytest.raises(ConfigError, match="expected one element of the data for each of 2 ranks or more, got 1"):
        hvd.evaluate(model, (x[:1], y[:1]))
    with pytest.raises(ConfigError, match="expected a built model"):
        hvd.predict(keras.Sequential([keras.layers.Dense(1)]), x)
