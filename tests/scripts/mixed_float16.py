"""Mixed precision with a loss scale that overflows at first.

One process: other values, since float16 activations are rounded.
"""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)
keras.mixed_precision.set_dtype_policy("mixed_float16")

x = np.random.normal(size=(1024, 10)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
inputs = keras.Input((10,))
hidden = keras.layers.Dense(32, activation="relu")(inputs)
model = keras.Model(inputs, keras.layers.Dense(3, activation="softmax", dtype="float32")(hidden))
optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2), initial_scale=2.0**24)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    hvdx.shard((x, y), global_batch_size=64), epochs=5, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()]
)
