"""Eager steps, which most of these tests use, give the results of traced steps in each adapter."""

import keras
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from tests.ranks import models

STRATEGIES = {
    "graph": (hvdx.AllReduce, 1e-6),
    # Rounding may keep an element below tau in one of the two runs; it is then sent in the next step.
    "host": (lambda: hvdx.Threshold(tau=2.0**-12), 2.0**-11),
    "averaging": (lambda: hvdx.ParameterAveraging(4), 1e-6),
    "server": (
        lambda: hvdx.ParameterServer("colocated", staleness="bound", max_staleness=0, aggregate=hvdx.size()),
        1e-6,
    ),
}


@pytest.mark.parametrize("adapter", STRATEGIES)
def test_eager_and_traced_steps_agree(adapter):
    make, tolerance = STRATEGIES[adapter]
    trained = []
    for eager in (True, False):
        tf.config.run_functions_eagerly(eager)
        model = models.network(keras.layers.BatchNormalization, lambda: keras.layers.Dense(4), seed=hvdx.rank())
        models.compiled(model, keras.optimizers.SGD(0.1, momentum=0.9))
        before = [w.copy() for w in model.get_weights()]
        models.fit(model, [hvd.Distribute(make())])
        assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
        trained.append(model)
    models.assert_close(*trained, tolerance)
