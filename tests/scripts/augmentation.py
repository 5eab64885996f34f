"""Images that are flipped, turned and moved by layers of the model.

One process: other values, since each rank draws augmentations of its own.
"""

import keras
from keras import layers
from sklearn.datasets import load_digits

import hvdx

hvdx.init(seed=1)

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.RandomTranslation(0.1, 0.1),
        layers.RandomRotation(0.05),
        layers.Conv2D(12, 3, activation="relu"),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    hvdx.shard((x[:1536], y[:1536]), global_batch_size=64),
    validation_data=hvdx.shard((x[1536:], y[1536:]), global_batch_size=64, shuffle=False, drop_remainder=False),
    epochs=4,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
