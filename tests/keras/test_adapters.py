"""Adapters between an optimiser and a strategy, on virtual ranks: threads of this process, without a launcher."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdx
from hvdx.keras.optimizer import attach
from hvdx.keras.weights_binding import WeightsBinding
from tests.ranks.test_contract import Mean
from tests.strategies.virtual import on_all


def stepped(comm, strategy, steps=3):
    """A weight after some steps, in which the gradient of rank r is r + 1."""
    weight, optimizer = keras.Variable(np.zeros(4, np.float32)), keras.optimizers.SGD(1.0)
    binding = attach(optimizer, strategy, "adapters", comm=comm)
    for _ in range(steps):
        optimizer.apply([tf.fill([4], comm.rank + 1.0)], [weight])
    binding.flush()
    binding.restore(binding.arrays())
    return weight.numpy(), binding


@pytest.mark.parametrize("placement", ["gradient", "update", "weights"])
def test_adapter_of_each_place_combines_over_the_ranks_that_it_is_given(placement):
    for weight, binding in on_all(2, lambda comm: stepped(comm, Mean(placement))):
        np.testing.assert_allclose(weight, -4.5)
        assert isinstance(binding, WeightsBinding) == (placement == "weights")


def test_auto_is_tied_like_the_others():
    for weight, binding in on_all(2, lambda comm: stepped(comm, hvdx.Auto(), 5)):
        np.testing.assert_allclose(weight, -7.5)
        assert binding.strategy.ready([binding.exchange])
