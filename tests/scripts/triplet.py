"""Siamese network with a triplet loss: three inputs share one embedding."""

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

import hvdx

hvdx.init(seed=1)

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
random = np.random.default_rng(0)
anchors = random.integers(len(images), size=1024)
positives = np.array([random.choice(np.flatnonzero(labels == labels[i])) for i in anchors])
negatives = np.array([random.choice(np.flatnonzero(labels != labels[i])) for i in anchors])

embedding = keras.Sequential(
    [keras.Input((64,)), layers.Dense(48, activation="relu"), layers.Dense(8), layers.UnitNormalization()]
)
inputs = [keras.Input((64,), name=name) for name in ("anchor", "positive", "negative")]
anchor, positive, negative = (embedding(i) for i in inputs)
near = ops.sum(ops.square(anchor - positive), axis=1, keepdims=True)
far = ops.sum(ops.square(anchor - negative), axis=1, keepdims=True)
model = keras.Model(inputs, near - far)
model.compile(keras.optimizers.Adam(3e-3), loss=lambda _, difference: ops.maximum(difference + 0.5, 0.0))
model.fit(
    hvdx.shard(
        ((images[anchors], images[positives], images[negatives]), np.zeros((1024, 1), "float32")), global_batch_size=64
    ),
    epochs=4,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
