"""What differs in the oldest version of Keras that hvdx supports, 3.6, on stand-ins for its classes."""

# Tests: hvdx/keras/adapters/local_variables.py, hvdx/keras/adapters/weights.py, hvdx/keras/fit/callback_list.py
# Tests: hvdx/keras/horovod/collectives.py, hvdx/keras/seams/layers.py

from types import SimpleNamespace

import keras
import tensorflow as tf

from hvdx.keras.adapters.local_variables import LocalVariables
from hvdx.keras.adapters.weights import _initialized
from hvdx.keras.fit import callback_list
from hvdx.keras.horovod.collectives import _tensor
from hvdx.keras.seams.layers import KerasVariable


class Iterator:
    """Iterator over the batches of `fit` as in Keras 3.6: it has `_current_iterator` only with `steps_per_epoch`."""

    def __init__(self, dataset):
        self.steps_per_epoch, self._distributed_dataset = None, dataset
        self.data_adapter = SimpleNamespace()

    def enumerate_epoch(self):
        if not self._current_iterator:
            self._current_iterator = iter(self._distributed_dataset)
        for step in range(self.steps_per_epoch):
            yield step, self._current_iterator


class Model:
    def fit(self, callback):
        epoch_iterator = Iterator(tf.data.Dataset.range(3))
        callback.on_train_begin()
        return [int(next(batches)) for _, batches in epoch_iterator.enumerate_epoch()]


def test_epochs_are_extended():
    class Callback(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            assert callback_list.extend_epochs(self, 5)

    callback, model = Callback(), Model()
    callback.set_model(model)
    assert model.fit(callback) == [0, 1, 2, 0, 1]


def test_variables_of_layers_are_variables():
    """They are instances of a base of `keras.Variable` alone."""
    old = KerasVariable(1.5)
    assert not isinstance(old, keras.Variable)
    assert isinstance(keras.layers.Layer().add_weight(shape=()), KerasVariable)
    assert _initialized([old])
    local = LocalVariables()
    local.add(old)
    assert local.holds(old)
    assert float(_tensor("allreduce", old)) == 1.5
