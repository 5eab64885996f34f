"""Variational autoencoder with a sampling layer.

One process: other values, since each rank draws samples of its own.
"""

import keras
from keras import layers, ops
from sklearn.datasets import load_digits

import hvdx

hvdx.init(seed=1)


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seed_generator)


inputs = keras.Input((64,))
hidden = layers.Dense(48, activation="relu")(inputs)
mean, log_variance = layers.Dense(2, name="mean")(hidden), layers.Dense(2, name="log_variance")(hidden)
encoder = keras.Model(inputs, [mean, log_variance, Sampling()([mean, log_variance])])
decoder = keras.Sequential(
    [keras.Input((2,)), layers.Dense(48, activation="relu"), layers.Dense(64, activation="sigmoid")]
)


class VAE(keras.Model):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.reconstruction = keras.metrics.Mean(name="reconstruction")
        self.kl = keras.metrics.Mean(name="kl")

    def call(self, x):
        mean, log_variance, z = self.encoder(x)
        return self.decoder(z), mean, log_variance

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        decoded, mean, log_variance = y_pred
        reconstruction = ops.mean(ops.sum(keras.losses.binary_crossentropy(x[..., None], decoded[..., None]), 1))
        kl = -0.5 * ops.mean(ops.sum(1 + log_variance - ops.square(mean) - ops.exp(log_variance), 1))
        self.reconstruction.update_state(reconstruction)
        self.kl.update_state(kl)
        return reconstruction + kl


model = VAE(encoder, decoder)
model.compile(optimizer=keras.optimizers.Adam(1e-2))
x = (load_digits().data / 16).astype("float32")
model.fit(hvdx.shard(x, global_batch_size=64), epochs=4, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()])
