"""The updates of Keras' optimisers, as operations of a graph."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdx.keras.adapters.updates import updates_of


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad", "Adam", "AdamW"])
def test_an_update_is_the_change_of_the_weights_without_a_pass_for_its_sign(name):
    start, gradient = np.zeros((3, 5), np.float32), np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)
    alone, diverted = keras.Variable(start), keras.Variable(start)
    make = getattr(keras.optimizers, name)
    own, others = make(0.125), make(0.125)
    own.build([alone])
    others.build([diverted])
    # In a graph, too: TensorFlow turns a quotient by a root into a product there.
    tf.function(lambda g, rate: own.update_step(g, alone, rate))(tf.constant(gradient), tf.constant(0.125))

    @tf.function
    def step(gradient, rate):
        return updates_of(others, lambda: others.update_step(gradient, diverted, rate), [diverted])[0]

    traced = step.get_concrete_function(tf.constant(gradient), tf.constant(0.125))
    # From weights of zeros, the weights are the update, bit for bit.
    assert np.array_equal(traced(tf.constant(gradient), tf.constant(0.125)), alone.numpy())
    assert not np.any(diverted.numpy())
    negated = [op.outputs[0].shape.rank for op in traced.graph.get_operations() if op.type == "Neg"]
    assert not any(negated), "a negative of the size of the weights"
