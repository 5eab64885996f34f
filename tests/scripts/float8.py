"""Training in float8, whose scales belong to each rank.

Refused: all_reduce, threshold, parameter_averaging, parameter_server, auto
"""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

x = np.random.normal(size=(256, 16)).astype("float32")
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
model.quantize("float8")
model.compile("adam", "mse")
model.fit(
    hvdx.shard((x, x[:, :1]), global_batch_size=32),
    epochs=2,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
