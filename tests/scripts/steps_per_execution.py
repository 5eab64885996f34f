"""Several steps in one call of the training function (steps_per_execution).

Backends: tensorflow, jax
"""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

x = np.random.normal(size=(1000, 10)).astype("float32")
y = np.sign(x[:, :1]) * x[:, 1:2]
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"], steps_per_execution=4)
model.fit(
    hvdx.shard((x, y), global_batch_size=50),
    validation_data=hvdx.shard((x[:250], y[:250]), global_batch_size=50, shuffle=False, drop_remainder=False),
    epochs=4,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
