"""Batch normalisation over the samples of all ranks, compared with one process that has all samples."""

# Tests: hvdx/keras/horovod/batch_norm.py

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx.keras as hvd


def gradients_of(layer, x, mask, weights):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, mask=mask)
        loss = tf.reduce_sum(weights * y * y + tf.sin(y))
    return y, tape.gradient(loss, [x, *[v.value for v in layer.trainable_weights]])


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("graph", [True, False])
def test_statistics_and_gradients_are_those_of_the_whole_batch(masked, graph):
    rank, size = hvd.rank(), hvd.size()
    random = np.random.default_rng(3)
    # A large mean and a small variance, for which E[x^2] - E[x]^2 cancels.
    sizes = [2 + 3 * r for r in range(size)]
    whole = (30 + 0.3 * random.normal(size=(sum(sizes), 4, 3)) + random.normal(size=3)).astype("float32")
    mask = random.random(whole.shape[:2]) < 0.7 if masked else None
    weights = random.normal(size=whole.shape).astype("float32")
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    part = lambda a: None if a is None else tf.constant(a[mine])  # noqa: E731
    layer, reference = hvd.SyncBatchNormalization(momentum=0.5), keras.layers.BatchNormalization(momentum=0.5)
    layer.build(whole.shape)
    run = tf.function(gradients_of) if graph else gradients_of
    tf.config.run_functions_eagerly(not graph)
    y, (of_x, *of_weights) = run(layer, part(whole), part(mask), part(weights))
    expected, (all_of_x, *all_of_weights) = gradients_of(
        reference, tf.constant(whole), None if mask is None else tf.constant(mask), tf.constant(weights)
    )
    np.testing.assert_allclose(y, expected[mine], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(of_x, all_of_x[mine], rtol=1e-2, atol=2e-2)
    for own, of_all in zip(of_weights, all_of_weights, strict=True):
        np.testing.assert_allclose(hvd.allreduce(own, op=hvd.Sum), of_all, rtol=2e-3, atol=5e-3)
    for own, of_all in zip(layer.non_trainable_weights, reference.non_trainable_weights, strict=True):
        np.testing.assert_allclose(own.numpy(), of_all.numpy(), rtol=1e-4)


def test_layer_is_saved_and_needs_no_other_ranks_in_inference(tmp_path):
    model = keras.Sequential([keras.Input((3,)), hvd.SyncBatchNormalization()])
    x = np.ones((2 + hvd.rank(), 3), "float32")
    if hvd.rank() == 0:
        np.testing.assert_allclose(model(x, training=False), x, rtol=1e-2)
    path = tmp_path / "model.keras"
    model.save(path)
    assert type(keras.models.load_model(path).layers[-1]) is hvd.SyncBatchNormalization
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
