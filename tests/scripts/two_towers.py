"""Recommender with two towers: users and films, with the other films of the batch as negatives.

One process: other values, since the negatives come from each rank's own batch.
"""

import keras
import numpy as np
from keras import layers, ops

import hvdx

hvdx.init(seed=1)

users, films = 300, 120
seen = np.random.randint(users, size=2048)
liked = (seen * 7 % 12) * 10 + np.random.randint(10, size=2048)


class TwoTowers(keras.Model):
    def __init__(self, width=16):
        super().__init__()
        self.user = keras.Sequential([layers.Embedding(users, width), layers.Dense(width)])
        self.film = keras.Sequential([layers.Embedding(films, width), layers.Dense(width)])

    def call(self, pair):
        return ops.matmul(self.user(pair["user"]), ops.transpose(self.film(pair["film"])))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        labels = ops.arange(ops.shape(y_pred)[0])
        return ops.mean(ops.sparse_categorical_crossentropy(labels, y_pred, from_logits=True))


model = TwoTowers()
model.compile(optimizer=keras.optimizers.Adagrad(0.5))
model.fit(
    hvdx.shard({"user": seen, "film": liked}, global_batch_size=64),
    epochs=4,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
