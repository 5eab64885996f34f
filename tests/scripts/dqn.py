"""Reinforcement learning in a loop of one's own: a deep Q-network that calls train_on_batch.

Falls: nothing, since the targets grow.
One process: other values, since each rank sees episodes of its own.
Own: target
Refused: auto, jax, torch
"""

import collections
import random

import keras
import numpy as np

import hvdx

hvdx.init(seed=1)

random.seed(hvdx.rank())  # each rank sees episodes of its own
cells, goal = 8, 7


def network():
    made = keras.Sequential([keras.Input((cells,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])
    made.compile(hvdx.keras.DistributedOptimizer(keras.optimizers.Adam(1e-2)), "mse")
    return made


model, target = network(), network()
hvdx.keras.broadcast_variables(model.variables, 0)
target.set_weights(model.get_weights())
memory = collections.deque(maxlen=500)
place = 0
for step in range(160):
    move = random.randrange(2)
    after = max(0, min(goal, place + (1 if move else -1)))
    memory.append((place, move, float(after == goal), after))
    place = 0 if after == goal else after
    if step % 20 == 0:
        target.set_weights(model.get_weights())
    if step > 32:
        states, moves, rewards, nexts = map(np.array, zip(*random.sample(memory, 32), strict=True))
        future = rewards + 0.9 * (1 - rewards) * target.predict_on_batch(np.eye(cells)[nexts]).max(axis=1)
        values = np.array(model.predict_on_batch(np.eye(cells)[states]))
        values[np.arange(32), moves] = future
        loss = model.train_on_batch(np.eye(cells)[states], values)
hvdx.keras.flush(model.optimizer)
