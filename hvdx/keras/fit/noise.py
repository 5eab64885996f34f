"""Random numbers in the training step (dropout, augmentation, samples): during `fit` each rank draws its own.

A script seeds all ranks alike, so that shuffles, splits and initial weights are alike. Without the functions of this
module, ranks would also draw the same dropout masks, for different samples.
"""

from __future__ import annotations

import random

import keras
import numpy as np

from hvdx.keras.backend import tf
from hvdx.keras.fit.part import Part
from hvdx.keras.seams.models import common_generator, layers_of, seed_generators_of
from hvdx.keras.types import Logs
from hvdx.keras.variables import view_of

# A state of a layer's generator is [seed, counter]. Keras' seeds have 32 bits of the 64; the rank goes into the others.
# JAX and PyTorch have 32 bits in all. There the rank goes into the counter, of which 20 bits are left: as many numbers
# as a million steps draw.
_SEED_BITS = 32
_SEED = (1 << _SEED_BITS) - 1
_COUNTER_BITS, _COUNTER_RANKS = 20, 1 << 11
# Knuth's multiplicative hash, so that seeds of neighbouring layers and ranks do not meet.
_HASH = 2654435761
# In the common generator, Keras maps each of two numbers to (x + 1) * 5387 % 933199, a prime.
_PRIME, _STRIDE = 933_199, 414_361


class Noise(Part):
    """Give this rank random numbers of its own during a fit."""

    def __init__(self, rank: int):
        super().__init__()
        self._rank = rank

    def on_train_begin(self, logs: Logs = None) -> None:
        """Begin; `Checkpoint`, which begins later, restores the states that this rank saved."""
        differ(self.model, self._rank)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Begin again: a callback may have run a fit of another model, whose end changes the common generator."""
        differ(self.model, self._rank)

    def end_first_step(self) -> None:
        """Begin in layers that were built in the first step, and had no generators before it."""
        differ_in_layers(self.model, self._rank)

    def on_train_end(self, logs: Logs = None) -> None:
        """End: ranks draw the same numbers again."""
        agree(self.model)


def generators(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Return the states of the random generators that layers hold."""
    found = [g.state for layer in layers_of(model) for g in seed_generators_of(layer)]
    return list({id(state): state for state in found}.values())


def differ(model: keras.Model, rank: int) -> None:
    """Let this rank draw random numbers of its own from the layers' generators and the common one.

    Args:
        model: model at the start of a fit.
        rank: this rank.
    """
    differ_in_layers(model, rank)
    if common_generator() is None:
        # Keras takes its seed from Python's generator, whose numbers must not depend on the number of ranks.
        state = random.getstate()
        common_generator(make=True)
        random.setstate(state)
    _set_common(rank)


def differ_in_layers(model: keras.Model, rank: int) -> None:
    """Let this rank draw random numbers of its own from the layers' generators; a second call changes nothing.

    Args:
        model: a model.
        rank: this rank.
    """
    for state in generators(model):
        state.assign(of_rank(view_of(state), rank))


def agree(model: keras.Model) -> None:
    """Undo `differ` at the end of a fit: ranks that have drawn as often draw the same numbers from now on.

    No number is repeated, since the counters stay.
    """
    differ_in_layers(model, 0)
    _set_common(0)


def of_rank(state: np.ndarray, rank: int) -> np.ndarray:
    """Return the state of a layer's generator with another rank.

    Args:
        state: int64[2], uint32[2] or int32[2], seed and counter.
        rank: rank that draws from it; 0 leaves Keras' seed as it is.

    Example:
        >>> of_rank(of_rank(np.array([7, 3]), 1), 0).tolist()
        [7, 3]
    """
    if state.dtype.itemsize == 4:
        drawn = int(state[1]) & (1 << _COUNTER_BITS) - 1
        return np.array([state[0], drawn | rank % _COUNTER_RANKS << _COUNTER_BITS], state.dtype)
    hashed = rank * _HASH & 0x7FFFFFFF
    return np.array([int(state[0]) & _SEED | hashed << _SEED_BITS, state[1]], state.dtype)


def common_of_rank(state: np.ndarray, rank: int) -> np.ndarray:
    """Return the state of the common generator with another rank.

    Args:
        state: int64[2]; the first number is the same on all ranks, and the second follows from it.
        rank: rank that draws from it.
    """
    first = int(state[0])
    return np.array([first, (first + rank * _STRIDE) % _PRIME], state.dtype)


def _set_common(rank: int) -> None:
    state = common_generator(make=True).state
    state.assign(common_of_rank(view_of(state), rank))


def seed_graph(rank: int) -> None:
    """Seed the operations of `tf.random` in the graph that is being traced differently on each rank.

    Args:
        rank: this rank.
    """
    graph = tf.compat.v1.get_default_graph()
    # Without a seed, TensorFlow seeds each operation at random. Eager operations do not read the graph's seed.
    if not tf.executing_eagerly() and graph.seed is not None:
        graph.seed = (graph.seed + rank * _HASH) & 0x7FFFFFFF
