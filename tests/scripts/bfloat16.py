"""Everything in bfloat16, weights included.

One process: other values, since sums of bfloat16 depend on their order.
Refused: threshold:max_staleness, parameter_server
"""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)
keras.config.set_dtype_policy("bfloat16")

x = np.random.normal(size=(1024, 10)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(3)])
model.compile(
    keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
model.fit(
    hvdx.shard((x, y), global_batch_size=64), epochs=4, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()]
)
