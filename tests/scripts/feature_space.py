"""Structured data: a FeatureSpace adapted to columns of numbers, categories and texts."""

import keras
import numpy as np
import tensorflow as tf
from keras.utils import FeatureSpace

import hvdx

hvdx.init(seed=1)

count = 1024
columns = {
    "age": np.random.randint(20, 80, size=count),
    "pressure": np.random.normal(120, 15, size=count).astype("float32"),
    "sex": np.random.randint(2, size=count),
    "thal": np.random.choice(["normal", "fixed", "reversible"], size=count),
}
risk = (columns["age"] - 50) / 15 + (columns["pressure"] - 120) / 20 + (columns["thal"] == "fixed")
target = (risk + 0.3 * np.random.normal(size=count) > 0.3).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((columns, target))

space = FeatureSpace(
    features={
        "age": FeatureSpace.float_discretized(num_bins=8),
        "pressure": FeatureSpace.float_normalized(),
        "sex": FeatureSpace.integer_categorical(num_oov_indices=0),
        "thal": FeatureSpace.string_categorical(num_oov_indices=0),
    },
    crosses=[FeatureSpace.cross(("sex", "age"), crossing_dim=16)],
    output_mode="concat",
)
space.adapt(dataset.map(lambda x, _: x).batch(128))
prepared = hvdx.shard(dataset, global_batch_size=32).map(lambda x, y: (space(x), y))

encoded = space.get_encoded_features()
hidden = keras.layers.Dense(32, activation="relu")(encoded)
model = keras.Model(encoded, keras.layers.Dense(1, activation="sigmoid")(hidden))
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
model.fit(prepared, epochs=4, verbose=2, callbacks=[hvdx.keras.Distribute()])
