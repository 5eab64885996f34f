"""A rank that joined the others in an epoch of theirs."""

# Tests: hvdx/comm/spares.py

import keras
import numpy as np

import hvdx
from hvdx.comm import world
from hvdx.comm.spares import EchoComm
from hvdx.keras import Distribute, joining, survival
from hvdx.keras.seams.models import set_initial_epoch


class Admitted(EchoComm):
    """World of a spare that joins at once. The other rank sends the same values as the spare."""

    survives = waits = True

    def wait(self, place):
        self.waits = False
        return True


def test_next_fit_begins_with_its_own_first_epoch(monkeypatch):
    """Without `Checkpoint`, which sets the first epoch of each fit."""
    monkeypatch.setattr(world, "_comm", Admitted(1, 2, "here"))
    monkeypatch.setattr(world, "_launch", object())
    monkeypatch.setattr(world, "_graphs", {})
    monkeypatch.setattr(joining, "place", lambda comm: None)
    # The others are in their third epoch.
    monkeypatch.setattr(survival.Survival, "_give", lambda self, epoch: set_initial_epoch(self._leader.model, 2))
    begun = []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = hvdx.shard((np.zeros((8, 2), np.float32), np.zeros((8, 1), np.float32)), 2)
    for epochs in (4, 2):
        note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
        model.fit(data, epochs=epochs, verbose=0, callbacks=[Distribute("all_reduce"), note])
    assert begun == [2, 3, 0, 1]
