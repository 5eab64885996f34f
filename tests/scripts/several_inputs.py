"""Functional model with two inputs and two outputs: the priority and the department of a ticket."""

import keras
import numpy as np
from keras import layers

import hvdx

hvdx.init(seed=1)

words, tags = 200, 12
titles = np.random.randint(1, words, size=(1024, 10))
flags = np.random.randint(2, size=(1024, tags)).astype("float32")
priority = (flags[:, :3].sum(1, keepdims=True) / 3).astype("float32")
department = titles[:, 0] % 4

title = keras.Input((10,), name="title", dtype="int32")
tag = keras.Input((tags,), name="tags")
text = layers.LSTM(16)(layers.Embedding(words, 16)(title))
both = layers.concatenate([text, tag])
model = keras.Model(
    {"title": title, "tags": tag},
    {
        "priority": layers.Dense(1, activation="sigmoid", name="priority")(both),
        "department": layers.Dense(4, name="department")(both),
    },
)
model.compile(
    keras.optimizers.RMSprop(1e-2),
    loss={
        "priority": keras.losses.BinaryCrossentropy(),
        "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"priority": 1.0, "department": 0.5},
    metrics={"department": ["accuracy"], "priority": ["mae"]},
)
model.fit(
    hvdx.shard(
        ({"title": titles, "tags": flags}, {"priority": priority, "department": department}), global_batch_size=64
    ),
    epochs=4,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
