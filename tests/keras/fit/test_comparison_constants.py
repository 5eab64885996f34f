"""Constants of a traced training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdx.keras.fit import comparison


class _Constant(keras.layers.Layer):
    def __init__(self, values, captured):
        super().__init__()
        self.values = tf.constant(values) if captured else values

    def call(self, x):
        return x + self.values


@pytest.mark.parametrize("captured", [False, True])
def test_constants_of_a_traced_training_are_found(captured):
    def found(value, size=200):
        tf.config.run_functions_eagerly(False)
        inputs = keras.Input((size,))
        model = keras.Model(inputs, keras.layers.Dense(1)(_Constant(np.full(size, value, "float32"), captured)(inputs)))
        model.compile("sgd", "mse")
        model.fit(np.zeros((4, size)), np.zeros((4, 1)), verbose=0)
        return comparison.constants_of(model.train_function)

    first = found(1.0)
    (difference,) = comparison.differing([first, first, found(2.0)])
    assert "float32[200] (ranks 2)" in difference
    assert comparison.differing([found(1.0, 8), found(2.0, 8)]) == []  # small
    assert comparison.differing([first, found(2.0, 300)]) == []  # another shape
