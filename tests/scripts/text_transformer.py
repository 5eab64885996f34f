"""Text classification with a transformer block written as a layer.

One process: other values, since each rank draws dropout masks of its own.
"""

import keras
import numpy as np
from keras import layers, ops

import hvdx

hvdx.init(seed=1)


class TransformerBlock(layers.Layer):
    def __init__(self, width, heads, inner, rate=0.1):
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width)
        self.inner = keras.Sequential([layers.Dense(inner, activation="relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.drops = [layers.Dropout(rate) for _ in range(2)]

    def call(self, x, training=None):
        x = self.norms[0](x + self.drops[0](self.attention(x, x), training=training))
        return self.norms[1](x + self.drops[1](self.inner(x), training=training))


class TokenAndPosition(layers.Layer):
    def __init__(self, length, words, width):
        super().__init__()
        self.token, self.position = layers.Embedding(words, width), layers.Embedding(length, width)

    def call(self, x):
        return self.token(x) + self.position(ops.arange(ops.shape(x)[-1]))


words, length = 500, 20
x = np.random.randint(words, size=(1024, length))
y = (np.sum(x < 50, axis=1) > 2).astype("int32")
inputs = keras.Input((length,), dtype="int32")
hidden = TransformerBlock(16, 2, 32)(TokenAndPosition(length, words, 16)(inputs))
outputs = layers.Dense(2, activation="softmax")(layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(hidden)))
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    hvdx.shard((x, y), global_batch_size=64), epochs=4, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()]
)
