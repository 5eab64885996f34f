"""Large embedding tables of which a batch reads a few rows, so that gradients are IndexedSlices."""

import keras
import numpy as np
from keras import layers

import hvdx

hvdx.init(seed=1)

count, hashed = 1024, 5000
codes = np.random.randint(hashed, size=(count, 4))
clicked = (codes[:, 0] % 2 == 0).astype("float32")
inputs = keras.Input((4,), dtype="int32")
wide = layers.Flatten()(layers.Embedding(hashed, 1)(inputs))
deep = layers.Flatten()(layers.Embedding(hashed, 8)(inputs))
outputs = layers.Dense(1, activation="sigmoid")(layers.concatenate([wide, layers.Dense(16, activation="relu")(deep)]))
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.SGD(1.0), "binary_crossentropy", metrics=["accuracy"])
model.fit(
    hvdx.shard((codes, clicked), global_batch_size=64),
    epochs=5,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
