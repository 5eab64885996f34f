"""A custom strategy in each placement that has an adapter on the host."""

import keras
import numpy as np
import pytest

import hvdx
import hvdx.keras as hvd
from hvdx import comm as world
from hvdx.errors import ConfigError
from hvdx.keras.adapters.optimizer import adapter_of, attach
from hvdx.keras.fit import replicas
from hvdx.strategies import HostExchange, Strategy
from hvdx.strategies.contract import views
from hvdx.strategies.telemetry import Telemetry


class Mean(Strategy):
    """Mean of gradients, updates or weights over MPI."""

    name, runs = "mean", "host"

    def __init__(self, placement="gradient"):
        self.placement = placement

    def open(self, comm, specs, name=""):
        return MeanExchange(comm, specs)


class MeanExchange(HostExchange):
    def __init__(self, comm, specs):
        super().__init__(specs, Telemetry())
        self._channel, self._size = comm.channel("the means"), comm.size

    def combine(self, step_input):
        flat = np.concatenate([np.ravel(t) for t in step_input.tensors])
        self._channel.all_reduce(flat)
        self.telemetry.steps += 1
        return views(flat / np.float32(self._size), self.specs)


def trained(strategy):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(hvdx.rank()).normal(size=(24, 4)).astype("float32")
    callback = hvd.Distribute(strategy)
    model.fit(x, x.sum(1, keepdims=True), batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    return model, callback


@pytest.mark.graph(every=True)
@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize("placement", ["gradient", "update", "weights"])
def test_strategy_combines_what_its_placement_says(placement):
    """Without momentum the means of gradients, of updates and of weights give the same result."""
    model, callback = trained(Mean(placement))
    reduced, _ = trained("all_reduce")
    assert replicas.differing(model.weights, world.start()) == {}
    for a, b in zip(model.get_weights(), reduced.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    if hvdx.size() > 1:
        assert callback.cost().steps == 12
    assert adapter_of(model.optimizer) is None


@pytest.mark.sizes(1, 2)
def test_place_without_an_adapter_is_refused():
    strategy = Mean("update")
    strategy.runs = "graph"
    with pytest.raises(ConfigError, match=r"strategy Mean\(placement='update'\): expected \(runs, placement\)"):
        attach(keras.optimizers.SGD(), strategy, "nowhere")
