"""Convolutional network with batch normalisation.

One process: other values, since each rank normalises by the statistics of its own batch.
"""

import keras
from keras import layers
from sklearn.datasets import load_digits

import hvdx

hvdx.init(seed=1)

x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)


def block(filters):
    return [layers.Conv2D(filters, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU()]


model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        *block(8),
        layers.MaxPooling2D(),
        *block(16),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10),
    ]
)
model.compile(
    keras.optimizers.SGD(0.1, momentum=0.9),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(
    hvdx.shard((x[:1500], y[:1500]), global_batch_size=64),
    validation_data=hvdx.shard((x[1500:], y[1500:]), global_batch_size=64, shuffle=False, drop_remainder=False),
    epochs=3,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
