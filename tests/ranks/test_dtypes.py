"""Models whose weights have several dtypes, bfloat16 among them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
import hvdx.keras as hvd
from hvdx.errors import ConfigError
from tests.ranks import models

# Most layers have a policy of their own, so one training has gradients of three dtypes.
_STRATEGIES = [
    "all_reduce:engine=horovod",
    "all_reduce:engine=mpi",
    "all_reduce:engine=horovod,compression=bf16",
    "parameter_averaging:period=2,engine=horovod",
    "threshold",
]


def _model(seed):
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy("bfloat16")
    words = keras.Input((3,), dtype="int32")
    x = keras.layers.Embedding(7, 4)(words)
    x = keras.layers.LayerNormalization()(keras.layers.Flatten()(x))
    x = keras.layers.Dense(5, activation="tanh", dtype="float32")(x)
    x = keras.layers.Dense(4, activation="tanh", dtype="float64")(x)
    model = keras.Model(words, keras.layers.Dense(models.CLASSES, dtype="float32")(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _fit(model, callbacks, batch, **share):
    words = np.random.default_rng(3).integers(0, 7, (models.samples(), 3)).astype("int32")
    return model.fit(
        hvdx.shard((words, words[:, 0] % models.CLASSES), batch, seed=1, **share),
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=callbacks,
    ).history


@pytest.mark.graph
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_model_of_three_dtypes_trains(strategy, tmp_path):
    folder = hvd.broadcast_object(str(tmp_path), 0)
    model = _model(seed=hvdx.rank())
    losses = _fit(model, [hvd.Distribute(strategy, check_every=2), hvd.Checkpoint(folder)], models.BATCH)["loss"]
    models.assert_identical(model, optimizer="threshold" not in strategy)
    assert {w.dtype for w in model.weights} == {"bfloat16", "float32", "float64"}
    assert np.isfinite(losses).all()
    restored = _model(seed=7)
    hvd.checkpoint.restore(folder, restored)
    models.assert_close(restored, model, tolerance=0)
    if strategy.startswith("all_reduce"):
        reference = _model(seed=0)
        _fit(reference, [], models.BATCH * hvdx.size(), rank=0, size=1)
        # bfloat16 has 8 bits of precision.
        models.assert_close(model, reference, tolerance=0.03)


def test_bfloat16_weights_are_refused_where_servers_hold_them():
    with pytest.raises(ConfigError, match="mixed_bfloat16"):
        _fit(_model(seed=0), [hvd.Distribute("threshold:max_staleness=inf")], models.BATCH)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.uint32, tf.complex64])
def test_horovods_collectives_move_dtypes_that_it_lacks(dtype):
    mine = tf.cast([hvdx.rank(), 2], dtype)
    expected = [value for rank in range(hvdx.size()) for value in (rank, 2)]
    for got, values in ((hvd.broadcast(mine, 1), [1, 2]), (hvd.allgather(mine), expected)):
        assert got.dtype == dtype
        assert tf.cast(got, tf.float32).numpy().tolist() == values
