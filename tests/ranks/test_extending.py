"""The strategy and the codec of docs/extending.md, found by their entry points."""

import keras
import numpy as np
import pytest

import hvdx
import hvdx.keras as hvd
from hvdx.strategies import parse
from tests.launch import ROOT
from tests.ranks import models
from tests.ranks.checkpoints import of_other_ranks


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "fixtures" / "extension"))


@pytest.mark.sizes(1, 2, 4)
@pytest.mark.parametrize("spelling", ["top_k:share=0.1", "parameter_server:servers=colocated,codec=int8"])
def test_example_trains_by_its_name(spelling, monkeypatch):
    monkeypatch.setenv("HVDX_STRATEGY", spelling)
    model = models.compiled(models.network(seed=hvdx.rank()), keras.optimizers.SGD(0.1))
    callback = hvd.Distribute()
    assert repr(callback.strategy) == repr(parse(spelling))
    losses = models.fit(model, [callback], epochs=4).history["loss"]
    assert losses[-1] < losses[0]
    models.assert_identical(model, optimizer=False)


@pytest.mark.sizes(1, 2)
def test_residual_of_the_example_is_in_checkpoints(tmp_path):
    folder = hvd.broadcast_object(tmp_path, 0) / "ckpt"

    def train(model, epochs):
        return models.fit(model, [hvd.Distribute("top_k:share=0.1"), hvd.Checkpoint(folder)], epochs=epochs)

    straight, resumed = (models.compiled(models.network(seed=0), keras.optimizers.SGD(0.1)) for _ in range(2))
    models.fit(straight, [hvd.Distribute("top_k:share=0.1")], epochs=2)
    train(models.compiled(models.network(seed=0), keras.optimizers.SGD(0.1)), 1)
    train(resumed, 2)
    for a, b in zip(straight.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_example_resumes_on_another_number_of_ranks(tmp_path):
    folder = hvd.broadcast_object(tmp_path, 0) / "ckpt"
    callbacks = [hvd.Distribute("top_k:share=0.1"), hvd.Checkpoint(folder)]
    models.fit(models.compiled(models.network(seed=0), keras.optimizers.SGD(0.1)), callbacks, epochs=1)
    of_other_ranks(folder / "epoch-0001", 1)
    resumed = models.compiled(models.network(seed=1), keras.optimizers.SGD(0.1))
    assert len(models.fit(resumed, callbacks, epochs=2).history["loss"]) == 1
    models.assert_identical(resumed)
