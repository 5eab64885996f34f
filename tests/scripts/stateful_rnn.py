"""Recurrent network that keeps its state from batch to batch; each rank follows series of its own.

Own: state
Backends: tensorflow, jax
One process: other values, since the state has a row for each series of a batch.
"""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

series, steps, window = 32, 20, 6
phase = np.random.uniform(0, 6, size=(series, 1))
waves = np.sin(np.arange(steps * window + 1) / 4 + phase).astype("float32")
mine = waves[hvdx.rank() :: hvdx.size()]
x = np.concatenate([mine[:, i * window : (i + 1) * window, None] for i in range(steps)])
y = np.concatenate([mine[:, i * window + 1 : (i + 1) * window + 1, None] for i in range(steps)])


class ResetStates(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        rnn.reset_state()


rnn = keras.layers.GRU(16, return_sequences=True, stateful=True)
model = keras.Sequential([keras.Input(batch_shape=(len(mine), window, 1)), rnn, keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(1e-2), "mse")
model.fit(
    x,
    y,
    batch_size=len(mine),
    epochs=5,
    shuffle=False,
    verbose=2,
    callbacks=[ResetStates(), hvdx.keras.Distribute(local=[rnn])],
)
