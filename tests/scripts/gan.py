"""Generative adversarial network: a generator and a discriminator with an optimiser each.

Falls: nothing, since two networks play against each other.
One process: other values, since each rank draws noise of its own.
"""

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import hvdx

hvdx.init(seed=1)

latent = 16
discriminator = keras.Sequential(
    [keras.Input((64,)), layers.Dense(64), layers.LeakyReLU(0.2), layers.Dense(1)], name="discriminator"
)
generator = keras.Sequential(
    [keras.Input((latent,)), layers.Dense(64), layers.LeakyReLU(0.2), layers.Dense(64, activation="sigmoid")],
    name="generator",
)


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.noise = keras.random.SeedGenerator(7)
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_of = d_optimizer, g_optimizer, loss

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def train_step(self, real):
        count = tf.shape(real)[0]
        fake = self.generator(keras.random.normal((count, latent), seed=self.noise))
        images = tf.concat([fake, real], axis=0)
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_of(labels, self.discriminator(images))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights, strict=True))
        noise = keras.random.normal((count, latent), seed=self.noise)
        with tf.GradientTape() as tape:
            g_loss = self.loss_of(tf.zeros((count, 1)), self.discriminator(self.generator(noise)))
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


model = GAN(discriminator, generator)
model.compile(
    keras.optimizers.Adam(3e-4), keras.optimizers.Adam(3e-4), keras.losses.BinaryCrossentropy(from_logits=True)
)
x = (load_digits().data / 16).astype("float32")
model.fit(hvdx.shard(x, global_batch_size=64), epochs=3, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()])
