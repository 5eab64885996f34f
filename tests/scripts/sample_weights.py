"""Rare fraud among many transactions: class weights, and a weight for each sample."""

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

x = np.random.normal(size=(2048, 8)).astype("float32")
y = (x[:, 0] + x[:, 1] > 2.2).astype("float32")
trust = np.random.uniform(0.5, 1.5, size=2048).astype("float32")
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(24, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
)
metrics = [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")]
model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy", metrics=metrics, weighted_metrics=["accuracy"])
model.fit(
    hvdx.shard((x, y, trust), global_batch_size=64),
    epochs=2,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
model.fit(
    hvdx.shard((x, y), global_batch_size=64, seed=3),
    class_weight={0: 1.0, 1: float((y == 0).sum() / y.sum())},
    epochs=3,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
