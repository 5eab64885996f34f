"""Graph attention network: the model holds the whole graph, a batch is a set of its nodes."""

import keras
import numpy as np
from keras import layers, ops

import hvdx

hvdx.init(seed=1)

nodes, features, classes = 300, 20, 3
kind = np.random.randint(classes, size=nodes)
x = np.eye(classes)[kind] @ np.random.normal(size=(classes, features)) + np.random.normal(size=(nodes, features))
pairs = np.random.randint(nodes, size=(6000, 2))
edges = pairs[(kind[pairs[:, 0]] == kind[pairs[:, 1]]) | (np.random.rand(6000) < 0.05)]
edges = np.concatenate([edges, np.stack([np.arange(nodes)] * 2, axis=1)])


class GraphAttention(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.attention = self.add_weight(shape=(2 * self.units, 1), name="attention")

    def call(self, states, edges):
        h = ops.matmul(states, self.kernel)
        ends = ops.reshape(ops.take(h, edges, axis=0), (-1, 2 * self.units))
        scores = ops.exp(ops.clip(ops.leaky_relu(ops.matmul(ends, self.attention)[:, 0]), -2, 2))
        total = ops.segment_sum(scores, edges[:, 0], num_segments=nodes)
        weights = scores / ops.take(total, edges[:, 0])
        return ops.segment_sum(ops.take(h, edges[:, 1], axis=0) * weights[:, None], edges[:, 0], num_segments=nodes)


class GraphModel(keras.Model):
    def __init__(self, states, edges):
        super().__init__()
        self.states, self.edges = ops.convert_to_tensor(states, "float32"), ops.convert_to_tensor(edges, "int32")
        self.blocks = [GraphAttention(16), GraphAttention(16)]
        self.head = layers.Dense(classes)

    def call(self, indices):
        h = self.states
        for block in self.blocks:
            h = ops.elu(block(h, self.edges))
        return ops.take(self.head(h), indices, axis=0)


model = GraphModel(x, edges)
model.compile(
    keras.optimizers.SGD(0.2), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
model.fit(
    hvdx.shard((np.arange(256), kind[:256]), global_batch_size=32),
    epochs=6,
    shuffle=False,
    verbose=2,
    callbacks=[hvdx.keras.Distribute()],
)
