"""Multi-layer perceptron that reads handwritten digits."""

import keras
from sklearn.datasets import load_digits

import hvdx

hvdx.init(seed=1)

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    hvdx.shard((x[:1536], y[:1536]), global_batch_size=64, seed=1),
    validation_data=hvdx.shard((x[1536:], y[1536:]), global_batch_size=64, shuffle=False, drop_remainder=False),
    epochs=4,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
