"""Small trained Keras models of several kinds, and the mean that tests compare averages with."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

N = 24


def mlp(activation="relu", units=6, dtype=None):
    """Return a model with batch normalisation and dropout."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(units, activation=activation, dtype=dtype),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(2, name="head"),
        ]
    )


def cnn():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.DepthwiseConv2D(3)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def two_inputs():
    """Return a model with a layer that is used twice, an operation that is not a layer, and a model as a layer."""
    a, b = keras.Input((4,), name="left"), keras.Input((4,), name="right")
    shared = layers.Dense(5)
    inner = mlp()
    x = layers.Concatenate()([shared(a), shared(b), inner(a)]) * 2.0
    return keras.Model([a, b], layers.Dense(2)(layers.LayerNormalization()(x)))


@keras.saving.register_keras_serializable("hvdx-tests")
class OwnClass(keras.Model):
    """Subclassed model with layers in attributes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(5)
        self.norm = layers.BatchNormalization()
        self.blocks = [layers.Dense(5, activation="tanh"), layers.Dense(2)]

    def call(self, inputs, training=None):
        x = self.norm(self.first(inputs), training=training)
        for block in self.blocks:
            x = block(x)
        return x


def mixed():
    """Return a model with variables of float16, bfloat16, float32 and float64, and LSTM and embedding layers."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(7, 3)(inputs)
    x = layers.LSTM(4)(x)
    x = layers.Dense(4, dtype="bfloat16")(x)
    x = layers.Dense(4, dtype="float16")(x)
    return keras.Model(inputs, layers.Dense(2, dtype="float64")(x))


MODELS = {"mlp": mlp, "cnn": cnn, "two_inputs": two_inputs, "own_class": OwnClass, "mixed": mixed}


def data_for(kind, seed=0):
    """Return inputs for a model of a kind."""
    rng = np.random.default_rng(seed)
    if kind == "cnn":
        return rng.standard_normal((N, 8, 8, 3), np.float32)
    if kind == "mixed":
        return rng.integers(0, 7, (N, 6)).astype(np.int32)
    x = rng.standard_normal((N, 4), np.float32)
    return [x, x[::-1].copy()] if kind == "two_inputs" else x


def trained(kind, seed):
    """Return a model that was trained for a few steps; the seed determines its initial weights and data."""
    keras.utils.set_random_seed(seed)
    model = MODELS[kind]()
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(data_for(kind, seed), np.random.default_rng(seed).random((N, 2)), batch_size=8, verbose=0)
    return model


def exact_mean(arrays, weights=None):
    """Return the mean of arrays by the obvious formula, in float64."""
    weights = weights or [1.0] * len(arrays)
    total = sum(w * np.asarray(a).astype(np.float64) for w, a in zip(weights, arrays, strict=True))
    return (total / sum(weights)).astype(np.asarray(arrays[0]).dtype)


def assert_same(got, expected, what=""):
    """Check that two arrays have the same dtype, shape and bytes."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    assert got.tobytes() == expected.tobytes(), what


def listing(folder):
    """Return the content of every file in a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
