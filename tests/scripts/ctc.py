"""Sequence recognition with the CTC loss: which symbols follow each other in a noisy signal."""

import keras
import numpy as np
from keras import layers

import hvdx

hvdx.init(seed=1)

symbols, length, width = 6, 4, 5
labels = np.random.randint(1, symbols, size=(768, length))
patterns = np.random.normal(size=(symbols, width)).astype("float32")
signal = np.repeat(patterns[labels], 4, axis=1) + 0.1 * np.random.normal(size=(768, 4 * length, width))

inputs = keras.Input((4 * length, width))
x = layers.Conv1D(16, 3, padding="same", activation="relu")(inputs)
x = layers.Bidirectional(layers.GRU(12, return_sequences=True))(x)
outputs = layers.Dense(symbols)(x)
model = keras.Model(inputs, outputs)


def ctc(y, predicted):
    one = keras.ops.ones_like(y[:, 0], dtype="int32")
    return keras.ops.ctc_loss(keras.ops.cast(y, "int32"), predicted, length * one, 4 * length * one, mask_index=0)


model.compile(keras.optimizers.Adam(1e-2), loss=ctc)
model.fit(
    hvdx.shard((signal.astype("float32"), labels.astype("int32")), global_batch_size=32),
    epochs=3,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
