"""Raw strings into the model: TextVectorization and StringLookup with vocabularies learned from the data."""

import random

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvdx

hvdx.init(seed=1)

good, bad, neutral = ["great", "lovely", "fun"], ["poor", "dull", "awful"], ["film", "plot", "actor", "scene", "end"]
texts, stars = [], []
for _ in range(800):
    liked = random.random() < 0.5
    words = random.choices(neutral, k=6) + random.choices(good if liked else bad, k=2)
    random.shuffle(words)
    texts.append(" ".join(words))
    stars.append("up" if liked else "down")

vectorize = layers.TextVectorization(max_tokens=50, output_sequence_length=8)
vectorize.adapt(texts)
lookup = layers.StringLookup(num_oov_indices=0)
lookup.adapt(stars)
data = tf.data.Dataset.from_tensor_slices((texts, np.array(lookup(tf.constant(stars)))))

inputs = keras.Input((), dtype="string")
hidden = layers.GlobalAveragePooling1D()(layers.Embedding(50, 12)(vectorize(inputs)))
model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))
model.compile(keras.optimizers.Adam(2e-2), "binary_crossentropy", metrics=["accuracy"])
model.fit(hvdx.shard(data, global_batch_size=50), epochs=4, verbose=2, callbacks=[hvdx.keras.Distribute()])
