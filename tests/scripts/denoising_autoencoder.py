"""Convolutional autoencoder that removes noise from images."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import hvdx

hvdx.init(seed=1)

clean = (load_digits().images[:768, :, :, None] / 16).astype("float32")
noisy = np.clip(clean + 0.3 * np.random.normal(size=clean.shape), 0, 1).astype("float32")
inputs = keras.Input((8, 8, 1))
x = layers.Conv2D(8, 3, activation="relu", padding="same")(inputs)
x = layers.MaxPooling2D(2)(x)
x = layers.Conv2D(8, 3, activation="relu", padding="same")(x)
x = layers.Conv2DTranspose(8, 3, strides=2, activation="relu", padding="same")(x)
outputs = layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x)
model = keras.Model(inputs, outputs)
model.compile("adam", "binary_crossentropy")
model.fit(
    hvdx.shard((noisy, clean), global_batch_size=32), epochs=4, shuffle=False, verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)  # fmt: skip
