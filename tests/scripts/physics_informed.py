"""Physics-informed network: it solves u'' = -u, u(0) = 0, u'(0) = 1, by derivatives with respect to its input.

Falls: residual
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import hvdx

hvdx.init(seed=1)


class Oscillator(keras.Model):
    def train_step(self, t):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as outer:
                outer.watch(t)
                with tf.GradientTape() as inner:
                    inner.watch(t)
                    u = self(t, training=True)
                slope = inner.gradient(u, t)
            bend = outer.gradient(slope, t)
            origin = tf.zeros((1, 1))
            with tf.GradientTape() as start:
                start.watch(origin)
                u0 = self(origin, training=True)
            loss = ops.mean(ops.square(bend + u)) + ops.mean(u0**2 + (start.gradient(u0, origin) - 1) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"residual": loss}


inputs = keras.Input((1,))
hidden = layers.Dense(24, activation="tanh")(layers.Dense(24, activation="tanh")(inputs))
model = Oscillator(inputs, layers.Dense(1)(hidden))
model.compile(optimizer=keras.optimizers.Adam(5e-3))
t = np.linspace(0, 3, 512, dtype="float32")[:, None]
model.fit(hvdx.shard(t, global_batch_size=64), epochs=8, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()])
