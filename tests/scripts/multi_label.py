"""Several labels a sample, with an AUC over all of them and a threshold chosen afterwards."""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

x = np.random.normal(size=(1030, 16)).astype("float32")
y = (x @ np.random.normal(size=(16, 6)) > 1).astype("int32")
model = keras.Sequential(
    [keras.Input((16,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(6, activation="sigmoid")]
)
model.compile(
    keras.optimizers.Adam(1e-2),
    keras.losses.BinaryFocalCrossentropy(),
    metrics=[keras.metrics.AUC(multi_label=True, num_labels=6), keras.metrics.TopKCategoricalAccuracy(k=2)],
)
model.fit(
    hvdx.shard((x[:900], y[:900]), global_batch_size=60),
    validation_data=hvdx.shard((x[900:], y[900:]), global_batch_size=60, shuffle=False, drop_remainder=False),
    epochs=4,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
