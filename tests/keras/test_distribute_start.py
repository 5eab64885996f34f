"""When the weights of rank 0 are broadcast, and which are left out; tests/ranks tests the broadcast."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from hvdx.comm import LocalComm
from hvdx.keras.distribute import Start
from hvdx.keras.fit import replicas


@pytest.fixture
def sent(monkeypatch):
    """The excluded variables of each broadcast, in a list."""
    calls = []
    monkeypatch.setattr(replicas, "broadcast_state", lambda model, root, comm, excluded: calls.append(set(excluded)))
    return calls


def start(model, steps_done=0):
    model.compile("sgd", "mse")
    prepared = []
    adapters = [SimpleNamespace(prepare_broadcast=lambda: prepared.append(True))]
    part = Start(LocalComm(), SimpleNamespace(steps_done=steps_done), SimpleNamespace(adapters=adapters))
    part.set_model(model)
    part.on_train_begin()
    part.agree([None])
    return part, prepared


@pytest.mark.parametrize("steps_done", [0, 3])
def test_statistics_stay_rank_local_in_mid_epoch_alone(sent, steps_done):
    norm = keras.layers.BatchNormalization()
    part, prepared = start(keras.Sequential([keras.Input((3,)), norm]), steps_done)
    part.end_first_step()
    assert sent == [{id(v) for v in norm.non_trainable_weights} if steps_done else set()]
    assert prepared == []


def test_layers_that_the_first_step_builds_are_broadcast_after_it(sent):
    part, prepared = start(keras.Sequential([keras.layers.Dense(2)]))
    assert sent == []
    part.model(np.zeros((1, 3), "float32"))
    part.end_first_step()
    assert (sent, prepared) == ([set()], [True])
