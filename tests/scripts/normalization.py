"""Regression on columns of different size, with a Normalization layer adapted to them."""

import keras
from sklearn.datasets import load_diabetes

import hvdx

hvdx.init(seed=1)

x, y = load_diabetes(return_X_y=True, scaled=False)
y = y / 100
scale = keras.layers.Normalization()
scale.adapt(x[:352])
model = keras.Sequential([keras.Input((10,)), scale, keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(1e-2), "mae", metrics=[keras.metrics.RootMeanSquaredError()])
model.fit(
    hvdx.shard((x[:352].astype("float32"), y[:352].astype("float32")), global_batch_size=32),
    validation_data=hvdx.shard(
        (x[352:].astype("float32"), y[352:].astype("float32")),
        global_batch_size=32,
        shuffle=False,
        drop_remainder=False,
    ),
    epochs=6,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
