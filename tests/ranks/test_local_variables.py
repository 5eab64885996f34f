"""Variables that each rank trains alone."""

# Tests: hvdx/keras/adapters/local_variables.py, hvdx/keras/variables.py

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx.keras as hvd
from hvdx.errors import ConfigError
from hvdx.keras.fit import replicas
from tests.ranks import models


@pytest.mark.parametrize("option", ["keras", "tensorflow", "a list", "registered"])
def test_broadcast_leaves_local_variables_alone(option, comm):
    model = models.compiled(models.network(seed=hvd.rank()), hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    kernel, bias = model.layers[0].trainable_weights
    bias.assign(tf.fill(bias.shape, 7.0 + hvd.rank()))
    local = {
        "keras": kernel,
        "tensorflow": kernel.value,
        "a list": [kernel, bias.value],
        "registered": None,
    }[option]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)
    if option == "registered":
        callback.register_local_var(kernel)
    before = kernel.numpy()
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_train_batch_begin(0)
    np.testing.assert_array_equal(kernel.numpy(), before)
    differs = [0, 1] if option == "a list" else [0]
    assert sorted(replicas.differing(model.weights, comm)) == differs


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("scale", [True, False])
def test_gradients_of_local_variables_stay_on_their_rank(scale):
    rank, size = hvd.rank(), hvd.size()
    shared, local = keras.Variable([1.0, 1.0]), keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), scale_local_gradients=scale)
    optimizer.register_local_var(local.value)
    optimizer.apply([tf.constant([1.0, rank]), tf.constant([rank + 1.0])], [shared, local])
    np.testing.assert_allclose(shared.numpy(), [0.0, 1 - (size - 1) / 2])
    np.testing.assert_allclose(local.numpy(), [1 - (rank + 1) / (size if scale else 1)])
    with hvd.DistributedGradientTape(tf.GradientTape(), scale_local_gradients=scale) as tape:
        loss = (rank + 1.0) * (tf.reduce_sum(shared) + tf.reduce_sum(local))
    tape.register_local_source([local])
    of_local, others = tape.get_local_and_global_gradients(loss, [local, shared])
    assert [source is local for source, _ in of_local + others] == [True, False]
    np.testing.assert_allclose(of_local[0][1], [(rank + 1) / (size if scale else 1)])
    np.testing.assert_allclose(others[0][1], 2 * [(size + 1) / 2])
    if size > 1:
        with pytest.raises(ConfigError, match="first step"):
            optimizer.register_local_var(shared)


def test_partial_optimizer_under_the_guard_of_distribute(comm):
    """The comparison of replicas omits the local layer and its momenta, and another fit continues with them."""
    model = models.network(seed=0)
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), local_layers=[model.layers[0]], scale_local_gradients=False
    )
    models.compiled(model, optimizer)
    models.fit(model, [hvd.Distribute(check_every=2)], epochs=1)
    variables = [*model.weights, *optimizer.momentums]
    assert sorted(replicas.differing(variables, comm)) == [0, 1, 4, 5]
    trained, seen = model.layers[0].get_weights(), []
    note = keras.callbacks.LambdaCallback()
    note.on_train_batch_begin = lambda batch, logs: seen.append(model.layers[0].get_weights())
    models.fit(model, [hvd.Distribute(), note], epochs=1)
    for a, b in zip(seen[0], trained, strict=True):
        np.testing.assert_array_equal(a, b)
