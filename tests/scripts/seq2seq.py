"""Sequence to sequence with attention: an encoder and a decoder learn to reverse numbers."""

import keras
import numpy as np
from keras import layers

import hvdx

hvdx.init(seed=1)

digits, length, start = 8, 6, 8
source = np.random.randint(digits, size=(1024, length))
target = source[:, ::-1]
shifted = np.concatenate([np.full((1024, 1), start), target[:, :-1]], axis=1)

encoder_in = keras.Input((length,), name="source", dtype="int32")
decoder_in = keras.Input((length,), name="shifted", dtype="int32")
encoded, state = layers.GRU(32, return_sequences=True, return_state=True)(layers.Embedding(digits, 16)(encoder_in))
decoded = layers.GRU(32, return_sequences=True)(layers.Embedding(digits + 1, 16)(decoder_in), initial_state=state)
context = layers.Attention()([decoded, encoded])
outputs = layers.Dense(digits, activation="softmax")(layers.concatenate([decoded, context]))
model = keras.Model([encoder_in, decoder_in], outputs)
model.compile(keras.optimizers.RMSprop(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    hvdx.shard(({"source": source, "shifted": shifted}, np.ascontiguousarray(target)), global_batch_size=64),
    epochs=4,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
