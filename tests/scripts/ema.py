"""Moving average of the weights in the optimiser (use_ema), which replaces them at the end.

Refused: jax threshold, jax parameter_server, torch threshold, torch parameter_server
"""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

x = np.random.normal(size=(1024, 10)).astype("float32")
y = (np.linalg.norm(x, axis=1) > 3).astype("float32")
model = keras.Sequential(
    [keras.Input((10,)), keras.layers.Dense(48, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
)
optimizer = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9, weight_decay=1e-4)
model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
model.fit(
    hvdx.shard((x, y), global_batch_size=64),
    epochs=5,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute(), keras.callbacks.SwapEMAWeights(swap_on_epoch=False)],
)
