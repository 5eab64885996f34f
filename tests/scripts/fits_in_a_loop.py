"""Several fits of one model: a loop over growing parts of the data, as in curriculum learning."""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

x = np.random.normal(size=(1024, 8)).astype("float32")
y = np.abs(x).sum(axis=1, keepdims=True)
order = np.argsort(y[:, 0])
x, y = x[order], y[order]
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
for part in (256, 512, 1024):
    history = model.fit(
        hvdx.shard((x[:part], y[:part]), global_batch_size=32),
        epochs=2,
        shuffle=False,
        verbose=2,
        callbacks=[hvdx.keras.Distribute()],
    )
    print(part, "samples:", history.history["loss"][-1])
