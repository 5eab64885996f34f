"""A PyDataset that divides itself over the ranks and shuffles itself after each epoch."""

import math

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.batch_size = x, y, batch_size
        self.random = np.random.default_rng(3)
        self.on_epoch_end()

    def __len__(self):
        return math.floor(len(self.x) / (self.batch_size * hvdx.size()))

    def __getitem__(self, step):
        begin = (step * hvdx.size() + hvdx.rank()) * self.batch_size
        rows = self.order[begin : begin + self.batch_size]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        self.order = self.random.permutation(len(self.x))


x = np.random.normal(size=(1000, 12)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("float32")
model = keras.Sequential(
    [keras.Input((12,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1, activation="sigmoid")]
)
model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy", metrics=["accuracy"])
model.fit(Batches(x, y, 50 // hvdx.size()), epochs=6, shuffle=False, verbose=2, callbacks=[hvdx.keras.Distribute()])
