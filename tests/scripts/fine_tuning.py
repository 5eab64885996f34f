"""Transfer learning in two stages: a new head on a frozen base, then the whole network at a small learning rate."""

import keras
from sklearn.datasets import load_digits

import hvdx

hvdx.init(seed=1)

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")


def fit(model, chosen, labels, epochs):
    return model.fit(
        hvdx.shard((x[chosen], labels), global_batch_size=32),
        epochs=epochs,
        shuffle=False,
        verbose=2,
        callbacks=[hvdx.keras.Distribute()],
    )


base = keras.Sequential([keras.Input((64,)), keras.layers.Dense(48, activation="relu", name="first")], name="base")
pretraining = keras.Sequential([base, keras.layers.Dense(5, activation="softmax")])
pretraining.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
fit(pretraining, y < 5, y[y < 5], epochs=2)

base.trainable = False
model = keras.Sequential([base, keras.layers.Dense(5, activation="softmax", name="head")])
model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
fit(model, y >= 5, y[y >= 5] - 5, epochs=2)

base.trainable = True
model.compile(keras.optimizers.Adam(1e-4), "sparse_categorical_crossentropy", metrics=["accuracy"])
fit(model, y >= 5, y[y >= 5] - 5, epochs=2)
