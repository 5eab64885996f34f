"""The check of a rank's gradients for NaN, on virtual ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdx.keras.adapters import host
from hvdx.keras.adapters.optimizer import attach
from tests.ranks.test_contract import Mean
from tests.strategies.virtual import on_all

SIZES = {"large": host._LARGE, "other large": host._LARGE, "small": 3, "other small": 1}


class Recorded(Mean):
    """Mean of the updates of all ranks."""

    def __init__(self, found):
        super().__init__("update")
        self.found = found

    def open(self, comm, specs, name=""):
        exchange = super().open(comm, specs)
        take = exchange.take

        def recorded(step_input):
            self.found.append((step_input.finite, step_input.blamed))
            return take(step_input)

        exchange.take = recorded
        return exchange


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("device", "where", "used"),
    [
        ("CPU:0", None, [True, True, True, True]),
        ("CPU:0", "large", [False, True, True, True]),
        ("CPU:0", "small", [True, True, False, False]),
        ("GPU:0", None, [True, True, True, True]),
        ("GPU:0", "large", [False, False, False, False]),
    ],
)
def test_gradient_with_nan_reaches_no_momentum_and_marks_the_step(device, where, used, bad, monkeypatch):
    monkeypatch.setattr(host, "device_of", lambda variable: device)

    def run(comm):
        weights = [keras.Variable(np.zeros(n, np.float32), name=name) for name, n in SIZES.items()]
        optimizer, found = keras.optimizers.SGD(1.0, momentum=0.5), []
        attach(optimizer, Recorded(found), "adapters", comm=comm)
        gradients = [np.ones(n, np.float32) for n in SIZES.values()]
        if where:
            gradients[list(SIZES).index(where)][-1] = bad
        optimizer.apply([tf.constant(g) for g in gradients], weights)
        return found, [m.numpy() for m in optimizer.momentums]

    ((found, momenta),) = on_all(1, run)
    assert found == [(where is None, where or "")]
    for momentum, use in zip(momenta, used, strict=True):
        np.testing.assert_array_equal(momentum, -1.0 if use else 0.0)
