"""The checkpoint of `hvdx run --checkpoint`."""

# Tests: hvdx/comm/supervision.py

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from hvdx.comm import LocalComm, supervision
from hvdx.errors import ConfigError
from hvdx.keras import Checkpoint, Distribute, saving
from hvdx.keras.saving import Saving
from hvdx.strategies import resolve


@pytest.fixture(autouse=True)
def first_fit(monkeypatch, tmp_path):
    monkeypatch.setattr(saving, "_fits", 0)
    monkeypatch.setenv(saving.VARIABLE, str(tmp_path / "ckpt"))
    monkeypatch.delenv(saving.EVERY_VARIABLE, raising=False)


def added(strategy="all_reduce"):
    """Return the checkpoint that is added to an empty list of callbacks, and the list."""
    found = SimpleNamespace(callbacks=[])
    part = Saving(LocalComm(), SimpleNamespace(strategy=resolve(strategy)))
    return part.add_checkpoint(found), found.callbacks


@pytest.mark.parametrize(
    ("strategy", "every"),
    [("all_reduce", "1 minute"), ("auto", "1 minute"), ("parameter_server", "1 epoch"),
     ("threshold:max_staleness=inf", "1 epoch")],
)  # fmt: skip
def test_interval_fits_the_strategy(strategy, every, monkeypatch):
    checkpoint, callbacks = added(strategy)
    assert checkpoint.every == every
    assert callbacks == [checkpoint]
    monkeypatch.setenv(saving.EVERY_VARIABLE, "7 steps")
    assert added(strategy)[0].every == "7 steps"
    monkeypatch.delenv(saving.VARIABLE)
    assert added(strategy) == (None, [])


def test_wrong_interval_names_its_variable(monkeypatch):
    monkeypatch.setenv(saving.EVERY_VARIABLE, "often")
    with pytest.raises(ConfigError, match=r"HVDX_CHECKPOINT_EVERY=often: .*'500 steps'"):
        added()


def test_each_fit_has_a_folder_and_a_checkpoint_of_the_script_stays(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(supervision.VARIABLE, "x:1")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)

    def fit(*more):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[Distribute(), *more])
        _, reports, _ = supervision.split(capfd.readouterr().err.encode())
        return [{k: v for k, v in report.items() if k != "seconds"} for report in reports]

    def saved(folder):
        return {"kind": "saved", "position": "epoch 1", "folder": str(tmp_path / folder)}

    assert fit() == [{"kind": "training", "saves": True}, saved("ckpt")]
    assert fit() == [{"kind": "training", "saves": True}, saved("ckpt/fit-2")]
    assert fit(Checkpoint(tmp_path / "own")) == [{"kind": "training", "saves": True}, saved("own")]
    assert {path.name for path in (tmp_path / "ckpt").iterdir()} == {"epoch-0001", "fit-2"}
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"epoch-0001"}
    monkeypatch.delenv(saving.VARIABLE)
    assert fit() == [{"kind": "training", "saves": False}]


def test_model_that_a_restart_could_not_restore_is_refused():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ConfigError, match="expected a model that is built"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[Distribute()])
