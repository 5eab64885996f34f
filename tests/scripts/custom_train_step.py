"""Model with a train_step for each backend of Keras, and metrics of its own."""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)


def loss_of(y, predicted):
    return keras.ops.mean(keras.losses.huber(y, predicted))


class Regression(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    def train_step(self, *arguments):
        return getattr(self, f"{keras.backend.backend()}_step")(*arguments)

    def tensorflow_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = loss_of(y, predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.logs(loss, y, predicted)

    def torch_step(self, data):
        import torch

        x, y = data
        self.zero_grad()
        predicted = self(x, training=True)
        loss = loss_of(y, predicted)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
        return self.logs(loss, y, predicted)

    def jax_step(self, state, data):
        import jax

        trained, others, optimizer, metrics = state
        x, y = data

        def loss_and_updates(values):
            predicted, updated = self.stateless_call(values, others, x, training=True)
            return loss_of(y, predicted), (predicted, updated)

        (loss, (predicted, others)), gradients = jax.value_and_grad(loss_and_updates, has_aux=True)(trained)
        trained, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trained)
        with keras.StatelessScope(zip(self.metrics_variables, metrics, strict=True)) as scope:
            logs = self.logs(loss, y, predicted)
        return logs, (trained, others, optimizer, [scope.get_current_value(v) for v in self.metrics_variables])

    def logs(self, loss, y, predicted):
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
