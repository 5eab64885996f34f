"""Model with a train_step and metrics of its own."""

import keras
import numpy as np
import tensorflow as tf

import hvdx

hvdx.init(seed=1)


class Regression(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = keras.ops.mean(keras.losses.huber(y, predicted))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, predicted)
        return {"loss": self.loss_tracker.result(), "mae": self.mae.result(), "bias": keras.ops.mean(predicted - y)}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae]


inputs = keras.Input((16,))
outputs = keras.layers.Dense(1)(keras.layers.Dense(32, activation="tanh")(inputs))
model = Regression(inputs, outputs)
model.compile(optimizer=keras.optimizers.Adam(1e-2))
x = np.random.normal(size=(1024, 16)).astype("float32")
y = np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
model.fit(
    hvdx.shard((x, y), global_batch_size=64),
    epochs=5,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
