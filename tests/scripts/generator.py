"""A Python generator that makes samples for ever; each rank takes its rows of each batch."""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)


def batches(count):
    random = np.random.default_rng(5)
    while True:
        x = random.uniform(-1, 1, size=(count, 8)).astype("float32")[hvdx.rank() :: hvdx.size()]
        yield x, np.sin(3 * x[:, :1]) * x[:, 1:2]


model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(48, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Nadam(1e-2), "mse")
model.fit(
    batches(64),
    steps_per_epoch=16,
    epochs=6,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
