"""Fine tuning of a network quantised to int8: the frozen kernels are int8, the adapters float32."""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

x = np.random.normal(size=(512, 16)).astype("float32")
y = np.tanh(x[:, :1] - x[:, 1:2])
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
model.quantize("int8")
model.layers[0].enable_lora(4)
model.compile(keras.optimizers.Adam(1e-2), "mse")
model.fit(
    hvdx.shard((x, y), global_batch_size=32), epochs=4, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()]
)
