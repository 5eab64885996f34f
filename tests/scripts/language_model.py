"""Causal language model of characters, with text generated after each epoch."""

import keras
import numpy as np
from keras import layers, ops

import hvdx

hvdx.init(seed=1)

text = "the quick brown fox jumps over the lazy dog and runs away from the angry bear. " * 24
letters = sorted(set(text))
index = {letter: i for i, letter in enumerate(letters)}
length = 24
codes = np.array([index[letter] for letter in text])
x = np.stack([codes[i : i + length] for i in range(0, len(codes) - length - 1, 3)])
y = np.stack([codes[i + 1 : i + length + 1] for i in range(0, len(codes) - length - 1, 3)])

inputs = keras.Input((length,), dtype="int32")
h = layers.Embedding(len(letters), 32)(inputs)
for _ in range(2):
    h = h + layers.MultiHeadAttention(2, 16, use_bias=False)(layers.LayerNormalization()(h), h, use_causal_mask=True)
    h = h + layers.Dense(32)(layers.Dense(64, activation="gelu")(layers.LayerNormalization()(h)))
model = keras.Model(inputs, layers.Dense(len(letters))(layers.LayerNormalization()(h)))


class Generate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        written = list(codes[:length])
        for _ in range(4):
            written.append(int(ops.argmax(self.model(np.array([written[-length:]]))[0, -1])))
        print(f"epoch {epoch + 1}:", "".join(letters[i] for i in written[length:]))


model.compile(keras.optimizers.AdamW(3e-3, clipnorm=1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(
    hvdx.shard((x, y), global_batch_size=64),
    epochs=2,
    shuffle=False,
    verbose=2,
    callbacks=[Generate(), hvdx.keras.Distribute()],
)
