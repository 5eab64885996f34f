"""A tf.data pipeline with a seeded shuffle and a map, batched by hvdx.shard."""

import keras
import numpy as np
import tensorflow as tf

import hvdx

hvdx.init(seed=1)

x = np.random.rand(1200, 10).astype("float32")
y = np.argmax(x[:, :4], axis=1)
dataset = (
    tf.data.Dataset.from_tensor_slices((x, y))
    .shuffle(1200, seed=4, reshuffle_each_iteration=False)
    .map(lambda x, y: (2 * x - 1, tf.one_hot(y, 4)), num_parallel_calls=2)
    .cache()
)
train, test = dataset.take(1000), dataset.skip(1000)
model = keras.Sequential(
    [keras.Input((10,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4, activation="softmax")]
)
model.compile(keras.optimizers.Adam(1e-2), "categorical_crossentropy", metrics=["accuracy"])
model.fit(
    hvdx.shard(train, global_batch_size=50, seed=2),
    validation_data=hvdx.shard(test, global_batch_size=50, shuffle=False, drop_remainder=False),
    epochs=4,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
