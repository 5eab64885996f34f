"""Configurations, vocabularies and tables of models, compared between ranks."""

import keras
import pytest
import tensorflow as tf

from hvdx.keras.fit.agreement import model_state


def test_names_seeds_and_counters_of_a_configuration_may_differ():
    def model(rate=0.1, seed=1, activation="relu"):
        x = keras.Input((4,))
        y = keras.layers.Dropout(rate, seed=seed)(keras.layers.Dense(4, activation=activation)(x))
        return keras.Model(x, keras.layers.Add()([x, keras.layers.Dense(4)(y)]))

    first = model_state.configuration(model())
    second = model_state.configuration(model(seed=2))
    assert model_state.differing_values(first, second, 1) == []
    assert model_state.digest(first) == model_state.digest(second)
    (found,) = model_state.differing_values(first, model_state.configuration(model(activation="tanh")), 2)
    assert found == "Functional.layers.1.config.activation is 'relu' on rank 0, 'tanh' on rank 2"
    x = keras.Input((4,))
    other = keras.Model(x, keras.layers.Add()([x, keras.layers.Dropout(0.1)(keras.layers.Dense(4)(x))]))
    assert model_state.digest(first) != model_state.digest(model_state.configuration(other))


class _Own(keras.Model):
    """Model without a configuration of its own, with layers in a list and in an attribute."""

    def __init__(self, units, thing):
        super().__init__()
        self.thing = thing
        self.blocks = [keras.Sequential([keras.layers.Dense(units)]), keras.layers.Dense(2)]

    def call(self, x):
        return self.blocks[1](self.blocks[0](x))


def test_configuration_of_a_subclassed_model_has_its_layers():
    first, same = _Own(3, object()), _Own(3, object())
    assert model_state.configuration(first) == model_state.configuration(same)
    found = model_state.differing_values(*(model_state.configuration(m) for m in (first, _Own(5, object()))), 1)
    assert any("units is 3 on rank 0, 5 on rank 1" in line for line in found)


@pytest.mark.parametrize("values", [[3, 1, 2], [0.5, 1.5, -2.0], ["x", "y", "z"]])
def test_digest_of_a_table_does_not_depend_on_the_order_of_its_entries(values):
    def digest(keys, values):
        given = tf.lookup.KeyValueTensorInitializer(tf.constant(keys), tf.constant(values))
        table = tf.lookup.StaticHashTable(given, tf.constant(values[0]))
        return model_state.table_digest(table.resource_handle, table.key_dtype, table.value_dtype)

    first = digest(["a", "b", "c"], values)
    assert first == digest(["c", "a", "b"], [values[2], values[0], values[1]])
    assert first != digest(["b", "a", "c"], values)
    assert first != digest(["a", "b"], values[:2])


def test_vocabulary_is_compared_by_its_entries():
    def state(*words):
        return model_state.adapted(keras.Sequential([keras.layers.TextVectorization(vocabulary=words)]))

    first, same, other = state("sea", "sun"), state("sea", "sun"), state("sun", "sea")
    assert len(first) == 1
    (found,) = model_state.differing([first, same, other])
    assert found.endswith("(ranks 2)")
    assert model_state.differing([first, []]) == []
