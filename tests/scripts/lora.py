"""Low-rank adaptation: the dense layers of a trained network get adapters, and only these are trained."""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

x = np.random.normal(size=(1024, 20)).astype("float32")
target = np.random.normal(size=(20, 1)).astype("float32")
model = keras.Sequential(
    [
        keras.Input((20,)),
        keras.layers.Dense(64, activation="relu", name="hidden"),
        keras.layers.Dense(1, name="head"),
    ]
)
for turn in range(2):
    if turn:
        model.get_layer("hidden").enable_lora(rank=4)
        model.get_layer("head").trainable = False
    y = np.tanh(x @ (target + turn))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    print([v.path for v in model.trainable_variables])
    model.fit(
        hvdx.shard((x, y), global_batch_size=64),
        epochs=3,
        shuffle=False,
        verbose=2,
        callbacks=[hvdx.keras.Distribute()],
    )
