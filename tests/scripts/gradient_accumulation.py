"""Gradients of four batches make one step of the optimiser."""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

x = np.random.normal(size=(1024, 10)).astype("float32")
y = x[:, :1] - 2 * x[:, 1:2] + 0.5
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(2e-2, gradient_accumulation_steps=4, global_clipnorm=5.0), "mse")
model.fit(
    hvdx.shard((x, y), global_batch_size=16), epochs=4, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()]
)
