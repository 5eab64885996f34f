"""Contrastive learning of an encoder: a noisy view of a sample resembles the other view's nearest neighbour in a queue.

Own: queue
One process: other values, since each rank fills a queue of its own.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from sklearn.datasets import load_digits

import hvdx

hvdx.init(seed=1)


class Contrastive(keras.Model):
    def __init__(self, width=16, length=256, temperature=0.2):
        super().__init__()
        self.augment = keras.Sequential([layers.GaussianNoise(0.2, seed=3), layers.Dropout(0.2, seed=4)])
        self.encoder = keras.Sequential([keras.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(width)])
        self.temperature = temperature
        self.queue = self.add_weight(shape=(length, width), initializer="zeros", trainable=False, name="queue")
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, x):
        count = ops.shape(x)[0]
        with tf.GradientTape() as tape:
            first = ops.normalize(self.encoder(self.augment(x, training=True)), axis=1)
            second = ops.normalize(self.encoder(self.augment(x, training=True)), axis=1)
            nearest = ops.argmax(ops.matmul(first, ops.transpose(self.queue)), axis=1)
            neighbours = ops.stop_gradient(ops.take(self.queue, nearest, axis=0))
            logits = ops.matmul(neighbours, ops.transpose(second)) / self.temperature
            loss = ops.mean(ops.sparse_categorical_crossentropy(ops.arange(count), logits, from_logits=True))
        gradients = tape.gradient(loss, self.encoder.trainable_variables)
        self.optimizer.apply(gradients, self.encoder.trainable_variables)
        self.queue.assign(ops.concatenate([second, self.queue[:-count]], axis=0))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


x = (load_digits().data / 16).astype("float32")
model = Contrastive()
model.queue.assign(ops.normalize(model.encoder(x[:256]), axis=1))
model.compile(optimizer=keras.optimizers.Adam(1e-3))
model.fit(
    hvdx.shard(x, global_batch_size=64),
    epochs=5,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute(local=[model.queue])],
)
assert np.allclose(np.linalg.norm(model.queue, axis=1), 1, atol=1e-4)
