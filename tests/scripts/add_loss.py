"""Losses from within: a layer that calls add_loss, a regulariser, and a metric class of one's own."""

import keras
import numpy as np
from keras import layers, ops

import hvdx

hvdx.init(seed=1)


class Sparsity(layers.Layer):
    def __init__(self, rate=1e-2):
        super().__init__()
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * ops.mean(ops.abs(inputs)))
        return inputs


class F1(keras.metrics.Metric):
    def __init__(self, name="f1"):
        super().__init__(name=name)
        self.hits, self.all = (self.add_weight(name=n, initializer="zeros") for n in ("hits", "all"))

    def update_state(self, y, predicted, sample_weight=None):
        y, said = ops.cast(y, "float32"), ops.cast(predicted > 0.5, "float32")
        self.hits.assign_add(2 * ops.sum(y * said))
        self.all.assign_add(ops.sum(y) + ops.sum(said))

    def result(self):
        return self.hits / (self.all + 1e-7)


x = np.random.normal(size=(1024, 12)).astype("float32")
y = (x[:, :3].sum(axis=1, keepdims=True) > 0.5).astype("float32")
inputs = keras.Input((12,))
hidden = Sparsity()(layers.Dense(32, activation="relu", kernel_regularizer="l2")(inputs))
model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))
model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy", metrics=[F1()])
train, test = hvdx.shard((x, y), global_batch_size=64, validation_split=0.125)
model.fit(train, validation_data=test, epochs=4, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()])
